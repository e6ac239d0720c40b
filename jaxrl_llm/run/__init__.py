"""A run in progress: put together, started, watched, stopped, written down."""
