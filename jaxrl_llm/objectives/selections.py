"""Selections of tokens by a statistic over the global batch: covariances, entropies, mismatch.

A selection is a function `batch -> batch` that an objective keeps as `Objective.prepare`. The train
step calls it once, before any split, so that micro-batches, packing and devices cannot change it.
What it compares is frozen over the updates of a rollout batch: π_old, and not the current policy.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

from jaxrl_llm.objectives.base import keep_unless, require_correctable, required
from jaxrl_llm.objectives.mismatch import MISMATCH, log_mismatch
from jaxrl_llm.segments import largest_bound, order_statistic, quantile
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch


def covariances(batch: TrainBatch) -> Float[Array, "B T"]:
  """Computes each token's term of the covariance of log-probability and advantage.

  (log π_old − mean log π_old)·(A − mean A), with means over the counted tokens of the batch

  To first order, an update lowers the entropy in proportion to its sum. Tokens that do not count
  get 0.

  Example:
    >>> ints, ones = jnp.ones((1, 2), int), jnp.ones((1, 2))
    >>> batch = TrainBatch(ints, ints, ints, ones, jnp.array([[1., -1.]]), jnp.array([[-1., -3.]]))
    >>> covariances(batch).tolist()
    [[1.0, 1.0]]

  References:
    The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617,
      2025, eq. 10.
  """
  counted = batch.mask > 0
  num_tokens = jnp.maximum(jnp.sum(counted), 1)

  def centred(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    x = jnp.where(counted, x, 0).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.where(counted, x - jnp.sum(x) / num_tokens, 0)

  return centred(batch.old_logprobs) * centred(batch.advantages)


def largest_covariances(share: float) -> Callable[[TrainBatch], TrainBatch]:
  """Makes the selection of the tokens with the largest covariances.

  They are max(1, ⌊share·N⌋) of the batch's N tokens, and more at ties; those whose covariance is
  not above 0 are left out.

  References:
    As in `covariances`, section 4.2 (KL-Cov).
  """

  def prepare(batch: TrainBatch) -> TrainBatch:
    counted, values = batch.mask > 0, covariances(batch)
    least = order_statistic(values, counted, jnp.sum(counted) - _number(share, counted))
    return batch._replace(selected=(counted & (values >= least) & (values > 0)).astype(values.dtype))

  return prepare


def random_covariances(share: float, low: float, high: float) -> Callable[[TrainBatch], TrainBatch]:
  """Makes the selection of random tokens whose covariances lie in a band.

  They are max(1, ⌊share·N⌋) of the batch's N tokens, or all in the band if there are fewer. Chance
  is a hash of each token's log-probability and advantage, so the selection is the same on any
  devices, in any rows and after a restart.

  References:
    As in `covariances`, section 4.2 (Clip-Cov).
  """

  def prepare(batch: TrainBatch) -> TrainBatch:
    counted, values = batch.mask > 0, covariances(batch)
    inside = counted & (values >= low) & (values <= high)
    # Hashes of 24 bits are exact as floats.
    chance = (_hash(batch.old_logprobs, batch.advantages) >> 8).astype(jnp.float32)
    number = jnp.minimum(_number(share, counted), jnp.sum(inside))
    most = order_statistic(chance, inside, number - 1)
    return batch._replace(selected=(inside & (chance <= most)).astype(values.dtype))

  return prepare


def top_entropy(objective: Objective, *, share: float = 0.2) -> Objective:
  """Keeps the policy term only at the tokens at which the old policy was least certain.

  1 if H_t ≥ the (1 − share)-quantile of H over the counted tokens of the batch, else 0

  H is the entropy of π_old at the token. Penalties and denominators keep all tokens.

  Args:
    objective: Objective to wrap.
    share: Share of the tokens that is kept, and more at ties.

  Returns:
    The wrapped objective, which needs `old_entropy`, with the metric `actor/kept_fraction`, of
    tokens.

  Raises:
    ValueError: If the objective ignores `TrainBatch.importance`.

  Example:
    >>> from jaxrl_llm.objectives.dapo import dapo
    >>> sorted(top_entropy(dapo()).needs)
    ['old_entropy', 'old_logprobs']

  References:
    Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for
      LLM Reasoning, arXiv:2506.01939, 2025, eq. 5.

  Note:
    The quantile is taken once per update, over the whole global batch and under π_old, and does not
    follow the current policy. TRL's `top_entropy_quantile` is 1 − share.
  """
  require_correctable(objective)

  def prepare(batch: TrainBatch) -> TrainBatch:
    batch = batch if objective.prepare is None else objective.prepare(batch)
    counted = batch.mask > 0
    entropy = required(batch.old_entropy, "old_entropy", "top_entropy compares tokens by it")
    entropy = jnp.where(counted, entropy, 0).astype(jnp.promote_types(entropy.dtype, jnp.float32))
    keep = keep_unless(entropy < quantile(entropy, counted, 1 - share), entropy)
    # The mask is part of the weights from here on.
    return batch._replace(importance=keep if batch.importance is None else batch.importance * keep, old_entropy=None)

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    if batch.old_entropy is not None or batch.importance is None:
      batch = prepare(batch)
    loss, metrics = objective.token_loss(outputs, batch)
    return loss, metrics | {"actor/kept_fraction": jax.lax.stop_gradient(jnp.where(batch.importance == 0, 0.0, 1.0))}

  return objective._replace(token_loss=token_loss, needs=objective.needs | {"old_entropy"}, prepare=prepare)


def m2po(objective: Objective, *, threshold: float = 0.04) -> Objective:
  """Drops the tokens of the largest mismatch until the second moment of the rest is small (M2PO).

  1 if (log k_t)² < c, else 0,  k = π_old/μ
  c: the largest with (1/n) Σ (log k)² < threshold over the n counted tokens of the batch below c

  The tokens that are kept have weight 1. Penalties and denominators keep all tokens.

  Args:
    objective: Objective to wrap.
    threshold: Second moment, in nats², that the mean over the kept tokens stays below.

  Returns:
    The wrapped objective, with the metrics `actor/kept_fraction`, of tokens with a weight other
    than 0, and `rollout_corr/m2` and `rollout_corr/m2_kept`, the second moment of all tokens and of
    those.

  Raises:
    ValueError: If the objective ignores `TrainBatch.importance`.

  Example:
    >>> from jaxrl_llm.objectives.dapo import dapo
    >>> sorted(m2po(dapo()).needs)
    ['old_logprobs', 'sampler_logprobs']

  References:
    Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs? (M2PO),
      arXiv:2510.01161, 2025.

  Note:
    The paper's ratio is that of the current policy to the one that drew the tokens. As in AReaL,
    π_old stands for the current policy: the learner's at the start of the step, lag included. It is
    known for the whole global batch before any split, so the selection is exact, is made once per
    update and does not follow the updates. AReaL selects in each micro-batch, keeps one token if
    none is below the threshold, where none is kept here, and takes the dropped tokens out of the
    denominators. Tokens of equal mismatch are kept or dropped together. If π_old is replaced by μ
    (`bypass`) or is interpolated between μ and π, there is no mismatch to select by beforehand, and
    the loss raises a ValueError.
  """
  require_correctable(objective)

  def second_moment(batch: TrainBatch) -> Float[Array, "B T"]:
    why = "m2po selects by the mismatch of learner and sampler, which a replaced old policy leaves unknown"
    required(batch.sampler_logprobs, "sampler_logprobs", why)
    log_k = jax.lax.stop_gradient(log_mismatch(batch))
    return jnp.square(jnp.where(batch.mask > 0, log_k, 0).astype(jnp.promote_types(log_k.dtype, jnp.float32)))

  def prepare(batch: TrainBatch) -> TrainBatch:
    batch = batch if objective.prepare is None else objective.prepare(batch)
    m2 = second_moment(batch)
    inside = (batch.mask > 0) & ~jnp.isnan(m2)

    def is_small(below: Bool[Array, "B T"]) -> Bool[Array, ""]:
      kept = inside & below
      return (jnp.sum(jnp.where(kept, m2, 0)) < threshold * jnp.sum(kept)) | ~jnp.any(kept)

    keep = keep_unless(m2 >= largest_bound(m2, is_small), m2)
    importance = keep if batch.importance is None else batch.importance * keep
    # The selection marks the batch as prepared; an inner objective may have made its own.
    return batch._replace(importance=importance, selected=1 - keep if batch.selected is None else batch.selected)

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    if batch.selected is None:
      batch = prepare(batch)
    loss, metrics = objective.token_loss(outputs, batch)
    m2, kept = second_moment(batch), jax.lax.stop_gradient(jnp.where(batch.importance == 0, 0.0, 1.0))
    selection = {"actor/kept_fraction": kept, "rollout_corr/m2": m2, "rollout_corr/m2_kept": jnp.where(kept > 0, m2, jnp.nan)}
    return loss, metrics | selection

  return objective._replace(token_loss=token_loss, needs=objective.needs | MISMATCH, prepare=prepare)


def _number(share: float, counted: Bool[Array, "B T"]) -> Array:
  """Returns the number of tokens to select, at least 1."""
  return jnp.maximum(jnp.floor(share * jnp.sum(counted)).astype(jnp.int32), 1)


def _hash(*arrays: Float[Array, "B T"]) -> UInt[Array, "B T"]:
  """Hashes float32 values to 32 bits: FNV-1a over words, then the finaliser of MurmurHash3."""
  state = jnp.full(arrays[0].shape, 0x811C9DC5, jnp.uint32)
  for x in arrays:
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    state = (state ^ bits) * jnp.uint32(0x01000193)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    state = (state ^ (state >> shift)) * jnp.uint32(factor)
  return state ^ (state >> 16)
