"""Positions of tokens in their sequences, for tests of sliding windows."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels.visibility import Window


def positions_of(segments, prefixes):
  """Counts the tokens of each segment, after those of its prefix; padding is at 0."""
  positions = np.zeros(segments.shape, np.int32)
  for row, slot in np.ndindex(segments.shape):
    segment = segments[row, slot]
    if segment:
      before = 0 if prefixes is None or not prefixes[row, slot] else np.sum(segments[row] == prefixes[row, slot])
      positions[row, slot] = before + np.sum(segments[row, :slot] == segment)
  return positions


def window_of(segments, prefixes, size):
  """Makes the window in which each token sees the last `size` tokens of its sequence."""
  positions = jnp.asarray(positions_of(np.asarray(segments), None if prefixes is None else np.asarray(prefixes)))
  return Window(positions - size + 1, positions)
