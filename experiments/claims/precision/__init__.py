"""Token and sequence ratios with old log-probabilities of lower precision (E16)."""
