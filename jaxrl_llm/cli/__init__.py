"""The console script `jaxrl-llm`: every command under one name, and new projects."""
