"""What lies in a workdir: checkpoints, metrics, summary, logs, non-finite batches, and whose it is."""
