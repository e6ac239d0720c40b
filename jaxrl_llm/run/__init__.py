"""A run: how it is assembled, started, watched, stopped and recorded."""
