"""A run in W&B, MLflow and Trackio, each of which is fed by a process of its own."""
