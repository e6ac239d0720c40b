"""Whether the noise of stale gradients grows with length, from 16 to 256 tokens."""
