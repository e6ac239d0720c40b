"""Whether a mixture of experts collapses under GRPO without replayed routes, and under GSPO does not (E6). See README.md."""
