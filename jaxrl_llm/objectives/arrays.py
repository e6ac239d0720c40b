"""Evaluation of objectives on plain arrays, for notebooks, tests and other training loops."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.segments import reduce_metrics, token_weights
from jaxrl_llm.types import Metrics, Objective, PolicyOutputs, TrainBatch


def _shaped(name: str, x: ArrayLike, shape: tuple[int, ...]) -> Array:
  x = jnp.asarray(x)
  if x.shape != shape:
    raise ValueError(f"{name}: found shape {x.shape}, expected [B, T] = {shape}, the shape of logprobs")
  return x


def value(
  objective: Objective,
  logprobs: ArrayLike,
  old_logprobs: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  segments: ArrayLike | None = None,
  sampler_logprobs: ArrayLike | None = None,
  ref_logprobs: ArrayLike | None = None,
  entropy: ArrayLike | None = None,
  values: ArrayLike | None = None,
  returns: ArrayLike | None = None,
  old_values: ArrayLike | None = None,
  groups: ArrayLike | None = None,
  old_entropy: ArrayLike | None = None,
) -> tuple[Float[Array, ""], Metrics]:
  """Computes the loss and the metrics of a whole batch.

  loss = Σ w·l

  The loss is differentiable in `logprobs`, `entropy` and `values`, and works under jit, grad and
  vmap. The computation uses the widest float type among the arguments, float32 at least. A sequence
  without a counted token contributes nothing and is not counted.

  Args:
    objective: Objective, as returned by `make`.
    logprobs: Log-probability of each token under the current policy, in nats, [B, T].
    old_logprobs: Log-probability of each token under the policy that sampled, in nats, [B, T].
    advantages: Advantages, [B, T], or [B] for one advantage per row.
    mask: Mask of counted tokens, [B, T], 1 or True if a token counts. Values at other tokens are
      never read, NaN included.
    segments: Sequence of the row that each token belongs to, [B, T], from 1, with 0 for padding;
      None for one sequence per row.
    sampler_logprobs: Log-probabilities that the sampler reported, [B, T], if its engine differs
      from the learner's.
    ref_logprobs: Log-probabilities under the frozen reference, [B, T].
    entropy: Entropy of the current policy at each token, in nats, [B, T].
    values: Values of the critic, [B, T].
    returns: Targets of the critic, [B, T].
    old_values: Values of the critic at rollout time, [B, T].
    groups: Prompt that each token's sequence is a sample of, [B, T], any integers; for
      weights="prompt_mean" only.
    old_entropy: Entropy of the old policy at each token, in nats, [B, T], for the correction
      `top_entropy` only.

  Returns:
    The loss, to be minimised, and scalar metrics; `actor/loss` is the loss.

  Raises:
    ValueError: If an array has the wrong shape or type, or is missing.

  Example:
    >>> from jaxrl_llm.objectives.dapo import dapo
    >>> logprobs = jnp.log(jnp.array([[.5, .5], [.25, .5]]))
    >>> old_logprobs = jnp.log(jnp.array([[.5, .25], [.5, .5]]))
    >>> loss, metrics = value(dapo(), logprobs, old_logprobs, jnp.array([1., -1.]), jnp.array([[1, 1], [1, 0]]))
    >>> print(f"{loss:.4f} {metrics['actor/pg_clipfrac']:.4f}")
    -0.4933 0.6667
  """
  shape = jnp.shape(logprobs)
  if len(shape) != 2:
    raise ValueError(f"logprobs: found shape {shape}, expected [B, T]")
  num_rows = shape[0]
  if jnp.shape(advantages) not in (shape, (num_rows,)):
    raise ValueError(f"advantages: found shape {jnp.shape(advantages)}, expected [B, T] = {shape} or [B] = {(num_rows,)}")
  if jnp.ndim(advantages) == 1:
    advantages = jnp.broadcast_to(jnp.asarray(advantages)[:, None], shape)
  if (values is None) != (returns is None):
    missing, present = ("values", "returns") if values is None else ("returns", "values")
    raise ValueError(f"{missing}: found None, expected an array [B, T], because {present} are given")

  floats = dict(logprobs=logprobs, old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs, ref_logprobs=ref_logprobs)
  floats |= dict(advantages=advantages, entropy=entropy, values=values, returns=returns, old_values=old_values)
  floats |= dict(old_entropy=old_entropy)
  floats = {name: _shaped(name, x, shape) for name, x in floats.items() if x is not None}
  dtype = jnp.result_type(jnp.float32, *floats.values())
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"{', '.join(floats)}: found {dtype}, expected real numbers")
  floats = {name: x.astype(dtype) for name, x in floats.items()}
  mask = (_shaped("mask", mask, shape) > 0).astype(dtype)
  # Ones stand for None: each row is one sequence.
  segments = jnp.ones(shape, jnp.int32) if segments is None else _shaped("segments", segments, shape)
  if not jnp.issubdtype(segments.dtype, jnp.integer):
    raise ValueError(f"segments: found {segments.dtype}, expected integers")
  if groups is not None:
    groups = _shaped("groups", groups, shape)
    if not jnp.issubdtype(groups.dtype, jnp.integer):
      raise ValueError(f"groups: found {groups.dtype}, expected integers")
    # Numbers any integers from 0.
    groups = jnp.unique(groups, return_inverse=True, size=groups.size)[1].reshape(shape)

  zeros = jnp.zeros(shape, jnp.int32)
  outputs = PolicyOutputs(**{name: floats.pop(name, None) for name in PolicyOutputs._fields})
  batch = TrainBatch(tokens=zeros, positions=zeros, segments=segments.astype(jnp.int32), mask=mask, groups=groups, **floats)
  batch = batch if objective.prepare is None else objective.prepare(batch)
  weights = token_weights(objective, batch.mask, batch.segments, batch.groups)
  losses, token_metrics = objective.token_loss(outputs, batch)
  loss = jnp.sum(weights * losses)
  metrics = reduce_metrics(token_metrics, batch.mask, weights)
  return loss, metrics | {"actor/loss": jax.lax.stop_gradient(loss)}
