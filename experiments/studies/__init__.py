"""Studies of our own questions. Each protocol is committed before its study runs."""
