"""Decoding engines in processes of their own, which may come and go."""
