"""Environments of the package verifiers, with their data, harness, tools and rewards."""
