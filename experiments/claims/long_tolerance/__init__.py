"""What a sampler's mismatch costs an objective whose responses have 64 tokens (E24)."""
