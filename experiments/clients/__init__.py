"""Clients of others, unmodified, against the service, and a table of what works."""
