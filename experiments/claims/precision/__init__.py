"""E16: what old log-probabilities of lower precision do to token and sequence ratios."""
