"""Loss, gradients and a few metrics of an objective, compiled once per choice of settings.

Metrics that the tests do not read are not compiled.
"""

import functools
from typing import Any

import jax
import numpy as np

from jaxrl_llm.objectives import make, value

CLIP_FRACTIONS = ("actor/pg_clipfrac", "actor/pg_clipfrac_seq")


def _is_returned(metric: str) -> bool:
  return metric in CLIP_FRACTIONS or metric == "actor/loss" or metric.endswith("_loss")


@functools.cache
def _program(name: str, settings: tuple, compiler_options: tuple):
  objective = make(name, **dict(settings))

  def loss_fn(differentiated, fixed):
    loss, metrics = value(objective, **differentiated, **fixed)
    return loss, {metric: x for metric, x in metrics.items() if _is_returned(metric)}

  return jax.jit(jax.value_and_grad(loss_fn, has_aux=True), compiler_options=dict(compiler_options))


def evaluate(name: str, settings: dict[str, Any], arrays: dict[str, np.ndarray], compiler_options: dict[str, Any]):
  """Evaluates an objective on a batch.

  Returns:
    The loss, the clip fractions and losses by name, and the gradients in the log-probabilities and,
    if given, in the values.
  """
  differentiated = {field: arrays[field] for field in ("logprobs", "values") if field in arrays}
  fixed = {field: x for field, x in arrays.items() if field not in differentiated}
  program = _program(name, tuple(sorted(settings.items())), tuple(compiler_options.items()))
  (loss, metrics), grads = jax.device_get(program(differentiated, fixed))
  return loss, metrics, grads
