"""A run in the trackers that a lab has: W&B, MLflow and Trackio, each fed by a process of its own."""
