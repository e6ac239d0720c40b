"""A published checkpoint before a weight is read: where it lies, its header, tokenizer and chat template. No JAX."""
