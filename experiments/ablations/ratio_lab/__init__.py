"""How importance ratios spread with length, and which clip binds, on real updates of a small model. See README.md."""
