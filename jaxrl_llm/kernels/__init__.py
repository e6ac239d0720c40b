"""Attention, grouped products and ragged reads for TPU and GPU, and the same in plain JAX."""
