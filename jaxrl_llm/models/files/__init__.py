"""Checkpoints in and out: safetensors, GGUF, and the names that published families give their tensors."""
