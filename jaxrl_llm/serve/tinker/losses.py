"""Losses by name: Tinker's own, as sums over tokens, and all rows of the table of objectives."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives import OBJECTIVES, make
from jaxrl_llm.objectives.ratios import bounded_log_ratio
from jaxrl_llm.objectives.settings import did_you_mean
from jaxrl_llm.segments import segment_mean
from jaxrl_llm.serve.refusals import Refusal, wrong
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch

ROW = "objective"
"""Entry of a loss's config that names a row of the table of objectives."""

FIELDS = {
  "weights": "advantages",
  "advantages": "advantages",
  "logprobs": "old_logprobs",
  "mask": "mask",
  "sequence_ratio_mask": "mask",
  "sampler_logprobs": "sampler_logprobs",
  "ref_logprobs": "ref_logprobs",
  "groups": "groups",
}
"""Fields of a batch by the name of the array that a client sends for them."""

_Logprobs = Float[Array, "B T"]
_Surrogate = Callable[[_Logprobs, TrainBatch], Float[Array, "B T"]]


class Loss(NamedTuple):
  """A loss with its settings.

  Attributes:
    name: Name.
    settings: Settings, in order.
    objective: The loss of each token, and its weights.
    reads: Arrays that each datum has beside its targets.
  """

  name: str
  settings: tuple[tuple[str, Any], ...]
  objective: Objective
  reads: tuple[str, ...]


def _ratio(logprobs: _Logprobs, batch: TrainBatch) -> Float[Array, "B T"]:
  # Bounded, as everywhere here: the placeholder of a token without an advantage must not overflow.
  return jnp.exp(bounded_log_ratio(logprobs, batch.old_logprobs))


def cross_entropy() -> _Surrogate:
  """Returns w·log π."""
  return lambda logprobs, batch: batch.advantages * logprobs


def importance_sampling() -> _Surrogate:
  """Returns r·A."""
  return lambda logprobs, batch: _ratio(logprobs, batch) * batch.advantages


def ppo(*, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> _Surrogate:
  """Returns min(r·A, clip(r)·A)."""

  def surrogate(logprobs: _Logprobs, batch: TrainBatch) -> Float[Array, "B T"]:
    return _clipped(_ratio(logprobs, batch), batch.advantages, clip_low_threshold, clip_high_threshold)

  return surrogate


def cispo(*, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> _Surrogate:
  """Returns sg[clip(r)]·log π·A."""

  def surrogate(logprobs: _Logprobs, batch: TrainBatch) -> Float[Array, "B T"]:
    weight = jnp.clip(_ratio(logprobs, batch), clip_low_threshold, clip_high_threshold)
    return jax.lax.stop_gradient(weight) * logprobs * batch.advantages

  return surrogate


def dro(*, beta: float = 0.05) -> _Surrogate:
  """Returns A·log π − (β/2)·(log π − log π_old)²."""
  return lambda logprobs, batch: (
    logprobs * batch.advantages - beta / 2 * jnp.square(logprobs - batch.old_logprobs)
  )


def gspo(*, clip_low_threshold: float = 1 - 3e-4, clip_high_threshold: float = 1 + 4e-4) -> _Surrogate:
  """Returns min(s·A, clip(s)·A), with the mean ratio s of the sequence and a token's gradient."""

  def surrogate(logprobs: _Logprobs, batch: TrainBatch) -> Float[Array, "B T"]:
    log_ratio = bounded_log_ratio(logprobs, batch.old_logprobs)
    of_sequence = segment_mean(log_ratio, batch.mask, batch.segments)
    ratio = jnp.exp(jax.lax.stop_gradient(of_sequence - log_ratio) + log_ratio)
    return _clipped(ratio, batch.advantages, clip_low_threshold, clip_high_threshold)

  return surrogate


def _clipped(ratio: Array, advantages: Array, low: float, high: float) -> Float[Array, "B T"]:
  return jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)


_SAMPLED = ("logprobs", "advantages")
LOSSES: dict[str, tuple[Callable[..., _Surrogate], tuple[str, ...]]] = {
  "cross_entropy": (cross_entropy, ("weights",)),
  "importance_sampling": (importance_sampling, _SAMPLED),
  "ppo": (ppo, _SAMPLED),
  "cispo": (cispo, _SAMPLED),
  "dro": (dro, _SAMPLED),
  "gspo": (gspo, (*_SAMPLED, "sequence_ratio_mask")),
}
"""Tinker's losses, each with the arrays that it reads. What they return is summed and maximised."""

_READ_BY_NEED = {
  "old_logprobs": "logprobs",
  "sampler_logprobs": "sampler_logprobs",
  "ref_logprobs": "ref_logprobs",
  "groups": "groups",
}
_COMPUTED = frozenset({"entropy"})


def make_loss(name: str, config: Mapping[str, float | str]) -> Loss:
  """Makes a loss.

  Args:
    name: Key of `LOSSES` or of `objectives.OBJECTIVES`.
    config: Settings by name. The entry "objective" names a row of the table of objectives, whose
      settings the others are; it comes before `name`.

  Raises:
    Refusal: If the name or a setting is wrong, or the loss reads what no client can send.

  Example:
    >>> make_loss("ppo", {"clip_high_threshold": 1.3}).reads, make_loss("ppo", {"objective": "sapo", "tau_pos": 2}).reads
    (('logprobs', 'advantages'), ('mask', 'advantages', 'logprobs'))
  """
  settings = dict(config)
  row = settings.pop(ROW, None if name in LOSSES else name)
  if row is None:
    return _of_tinker(name, settings)
  if row not in OBJECTIVES:
    known = ", ".join(LOSSES)
    field = f"loss_fn_config.{ROW}" if ROW in config else "loss_fn"
    raise wrong(
      field,
      row,
      f"one of {known}, or a row of the table of objectives{did_you_mean(row, {*LOSSES, *OBJECTIVES})}",
    )
  # All numbers arrive as floats, and some settings are whole numbers.
  plain = {key: int(x) if isinstance(x, float) and x.is_integer() else x for key, x in settings.items()}
  try:
    objective = make(row, **plain)
  except ValueError as error:
    raise Refusal(400, f"loss_fn_config: {error}", field="loss_fn_config") from error
  if unknown := sorted(objective.needs - _READ_BY_NEED.keys() - _COMPUTED):
    raise Refusal(400, f"loss_fn: {row} reads {unknown[0]}, which no client can send", field="loss_fn")
  reads = ["mask"] + ([] if objective.imitates else ["advantages"])
  reads += [_READ_BY_NEED[need] for need in sorted(objective.needs - _COMPUTED)]
  return Loss(row, tuple(sorted(plain.items())), objective, tuple(reads))


def _of_tinker(name: str, settings: Mapping[str, float | str]) -> Loss:
  factory, reads = LOSSES[name]
  known = inspect.signature(factory).parameters
  for key, value in settings.items():
    if key not in known:
      expected = f"one of {', '.join([*known, ROW])}{did_you_mean(key, known)}"
      raise wrong(f"loss_fn_config.{key}", value, expected)
    if not isinstance(value, float):
      raise wrong(f"loss_fn_config.{key}", value, "a number")
  surrogate = factory(**settings)

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    return -surrogate(outputs.logprobs, batch), {}

  objective = Objective(
    weigh=lambda mask, segments: (segments > 0).astype(jnp.float32), token_loss=token_loss
  )
  return Loss(name, tuple(sorted(settings.items())), objective, reads)
