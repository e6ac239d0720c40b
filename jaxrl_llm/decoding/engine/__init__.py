"""Decoding of requests that arrive at any time: one loop, whose cache outlives them."""
