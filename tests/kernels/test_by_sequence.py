"""Attention in the order of each sequence, against plain attention and against itself elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels.by_sequence import attention_by_sequence
from jaxrl_llm.kernels.visibility import packed
from jaxrl_llm.models.attention import xla_attention
from tests.kernels.windows import window_of

# Tokens of a prompt and of its responses, for each row.
ROWS = [(70, (20, 3, 65)), (5, (10, 100, 2, 7)), (64, (64,))]


def rows(length):
  """Returns segments and prefixes of `ROWS`."""
  segments, prefixes = np.zeros((len(ROWS), length), np.int32), np.zeros((len(ROWS), length), np.int32)
  for row, (prompt, responses) in enumerate(ROWS):
    segments[row, :prompt], start = 1, prompt
    for segment, size in enumerate(responses, 2):
      segments[row, start : start + size], prefixes[row, start : start + size] = segment, 1
      start += size
  return jnp.asarray(segments), jnp.asarray(prefixes)


def numbers(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(("heads", "groups", "width", "size"), [(6, 2, 16, None), (2, 2, 8, 30)])
@pytest.mark.parametrize("shares", [True, False])
def test_it_is_plain_attention_with_its_gradients(heads, groups, width, size, shares):
  segments, prefixes = rows(170)
  prefixes = prefixes if shares else None
  q, k, v = (numbers(i, len(ROWS), 170, n, width) for i, n in enumerate((heads, groups, groups)))
  ct = numbers(3, *q.shape) * (segments > 0)[..., None, None]
  window, mask = size and window_of(segments, prefixes, size), packed(segments, prefixes).mask
  plain = lambda q, k, v: xla_attention(q, k, v, mask if window is None else mask & window.sees())
  expected, of_plain = jax.vjp(plain, q, k, v)
  result, of_result = jax.vjp(lambda q, k, v: attention_by_sequence(q, k, v, segments, prefixes, window), q, k, v)
  counted = (segments > 0)[..., None, None]
  np.testing.assert_allclose(result * counted, expected * counted, atol=2e-6)
  for own, other in zip(of_result(ct), of_plain(ct), strict=True):
    np.testing.assert_allclose(own, other, atol=5e-6)


def test_a_sequence_has_the_same_bits_wherever_it_lies_and_whether_it_shares_its_prompt():
  segments, prefixes = rows(170)
  q, k, v = (numbers(i, len(ROWS), 170, n, 16) for i, n in enumerate((4, 2, 2)))
  attend = jax.jit(attention_by_sequence)
  packed_rows = np.asarray(attend(q, k, v, segments, prefixes))
  compared = 0
  for row, (prompt, responses) in enumerate(ROWS):
    for segment, size in enumerate(responses, 2):
      slots = np.concatenate([np.arange(prompt), np.flatnonzero(np.asarray(segments[row]) == segment)])
      here = slice(7 * segment, 7 * segment + len(slots))
      alone = [jnp.zeros((1, 220, *x.shape[2:])).at[0, here].set(x[row, slots]) for x in (q, k, v)]
      ids = jnp.zeros((1, 220), jnp.int32).at[0, here].set(1)
      result = np.asarray(attend(*alone, ids, None))[0, here][prompt:]
      assert result.tolist() == packed_rows[row, slots[prompt:]].tolist()
      compared += size
  assert compared == sum(sum(responses) for _, responses in ROWS)
