"""E17: whether on-policy learning needs a correction for the mismatch of the sampler."""
