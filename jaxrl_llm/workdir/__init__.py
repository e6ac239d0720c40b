"""The contents of a workdir: claim, checkpoints, metrics, summary, logs and non-finite batches."""
