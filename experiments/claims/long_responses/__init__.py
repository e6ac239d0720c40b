"""Whether the noise of token ratios accumulates over long responses until RL collapses (E25)."""
