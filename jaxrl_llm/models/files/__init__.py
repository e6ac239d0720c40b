"""Checkpoints: safetensors, GGUF, and the tensor names of published families."""
