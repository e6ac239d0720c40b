"""Speed, always as a ratio of two ways measured side by side."""
