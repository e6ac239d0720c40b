"""Settings of registry entries: names, import paths, signatures and legal values; no JAX."""
