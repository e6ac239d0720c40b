"""Asynchronous runs: how much faster they are, and whether they learn as well."""
