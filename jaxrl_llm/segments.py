"""The mapping from tokens to sequences: segment sums and means, batch weights, metric reductions.

`segments[b, t]` numbers the sequences of a packed row from 1; 0 is padding. `segments=None` means
that each row is one sequence. A sequence counts if at least one of its tokens has mask 1.

Responses to the same prompt may share it. The prompt is then a segment of its own, none of whose
tokens counts, and `prefixes[b, t]` holds its number for every token of its responses. Sums and
means run over counted tokens only, so shared prompts do not affect them.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Metrics, Objective, TokenMetrics, WeighFn


def segment_sum(x: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns the sum of `x` over each token's sequence, broadcast to every token of it.

  `x` should be 0 for tokens that do not count. Padding gets the sum over the padding of its row.

  Example:
    >>> segment_sum(jnp.array([[1., 2., 4., 8.]]), jnp.array([[1, 1, 2, 0]])).tolist()
    [[3.0, 3.0, 4.0, 8.0]]
  """
  return _over_segments(jnp.sum, jax.ops.segment_sum, x, segments)


def segment_max(x: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns the maximum of `x` over each token's sequence, broadcast to every token of it.

  `x` should be small, such as −∞, for tokens that do not count. A NaN is larger than any number.

  Example:
    >>> segment_max(jnp.array([[1., 2., 4., 8.]]), jnp.array([[1, 1, 2, 0]])).tolist()
    [[2.0, 2.0, 4.0, 8.0]]
  """
  return _over_segments(jnp.max, jax.ops.segment_max, x, segments)


def _over_segments(of_row: Callable, of_bins: Callable, x: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  if segments is None:
    return jnp.broadcast_to(of_row(x, axis=-1, keepdims=True), x.shape)
  # A row of T slots cannot hold more than T sequences, so T + 1 bins always suffice and the shape
  # never depends on the packing.
  num_bins = x.shape[-1] + 1
  reduced = jax.vmap(lambda row, ids: of_bins(row, ids, num_segments=num_bins))(x, segments)
  return jnp.take_along_axis(reduced, segments, axis=-1)


def segment_cumsum(x: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns the sum of `x` over each token's sequence up to the token itself.

  No sum runs over the end of a sequence, so that no digits are lost to what lies before it in its
  row.

  Example:
    >>> segment_cumsum(jnp.array([[1., 2., 4., 8.]]), jnp.array([[1, 1, 2, 0]])).tolist()
    [[1.0, 3.0, 4.0, 8.0]]
  """
  segments = jnp.zeros(x.shape, jnp.int32) if segments is None else segments
  begins = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0

  def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, a_begins), (b, b_begins) = left, right
    return jnp.where(b_begins, b, a + b), a_begins | b_begins

  return jax.lax.associative_scan(join, (x, begins), axis=1)[0]


def segment_count(mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns the number of counted tokens in each token's sequence, at least 1."""
  return jnp.maximum(segment_sum(mask, segments), 1)


def segment_mean(x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns the mean of `x` over the counted tokens of each sequence, broadcast to its tokens.

  Values outside the mask, including NaN, change neither the value nor the gradient.

  Example:
    >>> segment_mean(jnp.array([[1., 3., jnp.nan]]), jnp.array([[1., 1., 0.]]), None).tolist()
    [[2.0, 2.0, 2.0]]
  """
  return segment_sum(jnp.where(mask > 0, x, 0), segments) / segment_count(mask, segments)


def num_sequences(mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, ""]:
  """Returns the number of sequences with a counted token in the whole batch, at least 1."""
  return jnp.maximum(jnp.sum(mask / segment_count(mask, segments)), 1)


def once_per_sequence(x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns `x` at the first counted token of each sequence and NaN elsewhere.

  A metric of this form is reduced over sequences instead of tokens.

  Example:
    >>> once_per_sequence(jnp.ones((1, 4)), jnp.array([[0., 1., 1., 1.]]), jnp.array([[1, 1, 1, 2]])).tolist()
    [[nan, 1.0, nan, 1.0]]
  """
  counted = mask > 0
  so_far = jnp.cumsum(counted, axis=-1)
  if segments is None:
    first = counted & (so_far == 1)
  else:
    # Segments are contiguous: one begins where the number changes, and the count before it is
    # subtracted.
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    before = jax.lax.cummax(jnp.where(begins, so_far - counted, 0), axis=1)
    first = counted & (so_far - before == 1)
  return jnp.where(first, x, jnp.nan)


def previous_slots(segments: Int[Array, "B T"], prefixes: Int[Array, "B T"] | None = None) -> Int[Array, "B T"]:
  """Returns the slot of each token's predecessor within its own sequence.

  The slot is -1 for padding and for the first token of a sequence.

  Example:
    >>> previous_slots(jnp.array([[1, 1, 2, 3, 3, 0]]), jnp.array([[0, 0, 1, 1, 1, 0]])).tolist()
    [[-1, 0, 1, 1, 3, -1]]
  """
  slots = jnp.arange(segments.shape[-1])
  before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
  previous = jnp.where((segments == before) & (segments > 0), slots - 1, -1)
  if prefixes is None:
    return previous
  ends = jax.vmap(lambda row: jax.ops.segment_max(slots, row, num_segments=segments.shape[-1] + 1))(segments)
  joins = (segments != before) & (prefixes > 0)
  return jnp.where(joins, jnp.take_along_axis(ends, prefixes, axis=-1), previous)


def at_slots(x: Float[Array, "B T D"], slots: Int[Array, "B T"], *, in_order: bool) -> Float[Array, "B T D"]:
  """Gathers `x` at the slots of `previous_slots`; the result is arbitrary if a slot is -1.

  `in_order` asserts that every slot is either the preceding one or -1.
  """
  if in_order:
    # Without shared prompts a shift suffices, and its gradient is a shift too.
    return jnp.roll(x, 1, axis=1)
  return jnp.take_along_axis(x, jnp.maximum(slots, 0)[..., None], axis=1)


def token_mean(mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns weights w = m / Σm: every counted token of the global batch weighs the same.

  References:
    DAPO, arXiv:2503.14476, 2025, eq. 12, in verl's implementation.

  Note:
    The paper's equation divides by the tokens of one prompt's group, inside the expectation over
    prompts, which is `prompt_mean`. Here, as in verl and TRL, the whole batch has one denominator,
    so that a prompt with long responses weighs more.
  """
  del segments
  return mask / jnp.maximum(jnp.sum(mask), 1)


def sequence_mean(mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns weights w = m / (N·|y|): a mean over the tokens of each sequence, then over sequences.

  N is the number of sequences with a counted token.

  References:
    DeepSeekMath (GRPO), arXiv:2402.03300, 2024, eq. 3.
  """
  return mask / (segment_count(mask, segments) * num_sequences(mask, segments))


def sequence_sum(mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Returns weights w = m / N: a sum over the tokens of each sequence, then a mean over sequences.

  N is the number of sequences with a counted token.

  References:
    Stabilizing Reinforcement Learning with LLMs (MiniRL), arXiv:2512.01374, 2025.
  """
  return mask / num_sequences(mask, segments)


def prompt_mean(
  mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None, groups: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
  """Returns weights w = m / (K·n): a mean over each prompt's tokens, then over prompts.

  n is the number of counted tokens in the group of samples of the token's prompt, and K the number
  of prompts with a counted token. The samples of a prompt may lie in any rows.

  Args:
    mask: 1 if a token counts.
    segments: Not read.
    groups: Prompt of each token, a number from 0 to B·T.

  Raises:
    ValueError: If there are no groups.

  Example:
    >>> prompt_mean(jnp.ones((1, 4)), None, jnp.array([[1, 1, 1, 2]])).tolist()
    [[0.1666666716337204, 0.1666666716337204, 0.1666666716337204, 0.5]]

  References:
    DAPO, arXiv:2503.14476, 2025, eqs. 8 and 12; MiniMax-M1 (CISPO), arXiv:2506.13585, 2025, eq. 4;
    ScaleRL, arXiv:2510.13786, 2025, which compares the weights.
  """
  del segments
  if groups is None:
    raise ValueError("groups: found None, expected an array [B, T], because weights is 'prompt_mean'")
  # There are no more prompts than slots, and one bin a slot keeps the shape free of the packing.
  sums = jax.ops.segment_sum(mask.ravel(), groups.ravel(), num_segments=mask.size + 1)
  num_tokens = jnp.maximum(sums[groups], 1)
  return mask / (num_tokens * jnp.maximum(jnp.sum(mask / num_tokens), 1))


prompt_mean.needs = frozenset({"groups"})


def token_weights(
  objective: Objective, mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None, groups: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
  """Returns an objective's weights of all tokens of the global batch.

  `objective.weigh` gets the groups only if the objective needs them.
  """
  return objective.weigh(mask, segments, groups) if "groups" in objective.needs else objective.weigh(mask, segments)


def constant(max_tokens: int) -> WeighFn:
  """Makes weights w = m / (N·max_tokens), which do not depend on the length of any response.

  Args:
    max_tokens: Generation budget in tokens. It is a setting and not a shape, so that padding cannot
      change the loss.

  References:
    Understanding R1-Zero-like training (Dr. GRPO), arXiv:2503.20783, 2025.
  """

  def weigh(mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
    return mask / (num_sequences(mask, segments) * max_tokens)

  return weigh


def quantile(x: Float[Array, "B T"], inside: Bool[Array, "B T"], q: float) -> Float[Array, ""]:
  """Returns the q-quantile of the selected entries, with `jnp.quantile`'s linear interpolation.

  No selected entry may be NaN. The quantile of no entries is NaN.

  Example:
    >>> float(quantile(jnp.array([[4.0, 1.0, -3.0, 100.0]]), jnp.array([[True, True, True, False]]), 0.75))
    2.5
  """
  position = q * (jnp.sum(inside) - 1)
  low, high = jax.vmap(partial(order_statistic, x, inside))(jnp.stack([jnp.floor(position), jnp.ceil(position)]))
  return low + (position - jnp.floor(position)) * (high - low)


def order_statistic(x: Float[Array, "B T"], inside: Bool[Array, "B T"], rank: Array) -> Float[Array, ""]:
  """Returns the selected entry that has `rank` of them below it, counted from 0.

  No selected entry may be NaN. The statistic of no entries is NaN.

  Example:
    >>> float(order_statistic(jnp.array([[4.0, 1.0, -3.0, 100.0]]), jnp.array([[True, True, True, False]]), jnp.array(1)))
    1.0
  """
  return largest_bound(x, lambda below: jnp.sum(inside & below) <= rank)


def largest_bound(x: Float[Array, "B T"], holds: Callable[[Bool[Array, "B T"]], Bool[Array, ""]]) -> Float[Array, ""]:
  """Returns the largest number for which a condition on the entries below it holds.

  It is found bit by bit, because the order of floats is that of their bits. This takes one
  reduction per bit, 32 for float32, and devices exchange one number per reduction; a sort would
  gather all entries on every device.

  Args:
    x: Entries; a NaN is above all numbers, or below them if its sign bit is set.
    holds: Condition `(below) -> bool` on the entries that are below a number. It must hold for
      small numbers, and for no number above one for which it does not.

  Returns:
    The number, which is an entry if the condition fails at all, or NaN if it always holds.

  Example:
    >>> x = jnp.array([[4.0, 1.0, -3.0, 100.0]])
    >>> float(largest_bound(x, lambda below: jnp.sum(jnp.where(below, x, 0)) < 3))
    100.0
  """
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  unsigned = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
  width = 8 * jnp.dtype(unsigned).itemsize
  bits, top = jax.lax.bitcast_convert_type(x, unsigned), unsigned(1 << (width - 1))
  keys = jnp.where(bits >= top, ~bits, bits | top)  # Integers in the same order as the floats.

  def refine(i, key):
    trial = key | (top >> i.astype(unsigned))
    return jnp.where(holds(keys < trial), trial, key)

  key = jax.lax.fori_loop(0, width, refine, unsigned(0))
  return jax.lax.bitcast_convert_type(jnp.where(key >= top, key ^ top, ~key), x.dtype)


def reduce_metrics(metrics: TokenMetrics, mask: Float[Array, "B T"], weights: Float[Array, "B T"]) -> Metrics:
  """Reduces per-token metrics to scalars over the whole global batch.

  The end of a metric's name selects its reduction:

  | name ends with | scalar |
  | --- | --- |
  | `/min`, `/max`, `/p99` | that statistic over the counted tokens |
  | `/ess` | effective sample size of the weights x, as a fraction: (Σx)² / (n·Σx²) |
  | `_loss` | Σ w·x with the objective's weights, so that it adds up to the loss |
  | anything else | mean over the counted tokens |

  NaN entries under the mask are outside a metric's population and are left out, except in `_loss`.
  A metric with an empty population is 0.
  """
  counted = mask > 0
  # Quantiles take 32 reductions one after the other, which all metrics share.
  names, quantiles = [name for name in metrics if name.endswith("/p99")], {}
  if names:
    tails = jnp.stack([metrics[name] for name in names])
    of_names = jax.vmap(partial(quantile, q=0.99))(tails, counted & ~jnp.isnan(tails))
    quantiles = dict(zip(names, of_names, strict=True))
  reduced = {}
  for name, x in metrics.items():
    if name.endswith("_loss"):
      reduced[name] = jnp.sum(jnp.where(counted, weights * x, 0))
      continue
    inside = counted & ~jnp.isnan(x)
    if name.endswith("/min"):
      value = jnp.min(jnp.where(inside, x, jnp.inf))
    elif name.endswith("/max"):
      value = jnp.max(jnp.where(inside, x, -jnp.inf))
    elif name.endswith("/p99"):
      value = quantiles[name]
    elif name.endswith("/ess"):
      kept = jnp.where(inside, x, 0)
      # Divided by the largest first: squared weights of up to e^20 would leave few digits in
      # float32.
      kept = kept / jnp.maximum(jnp.max(kept), jnp.finfo(kept.dtype).tiny)
      squares = jnp.maximum(jnp.sum(jnp.square(kept)), jnp.finfo(kept.dtype).tiny)
      value = jnp.square(jnp.sum(kept)) / (jnp.maximum(jnp.sum(inside), 1) * squares)
    else:
      value = jnp.sum(jnp.where(inside, x, 0)) / jnp.maximum(jnp.sum(inside), 1)
    reduced[name] = jnp.where(jnp.any(inside), value, 0)
  return reduced
