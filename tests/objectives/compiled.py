"""Loss, gradients and a few metrics of an objective, compiled once for its settings; a metric nobody asks for is not compiled."""

import functools
from typing import Any

import jax
import numpy as np

from jaxrl_llm.objectives import make, value

CLIP_FRACTIONS = ("actor/pg_clipfrac", "actor/pg_clipfrac_seq")


def _asked_for(metric: str) -> bool:
  return metric in CLIP_FRACTIONS or metric == "actor/loss" or metric.endswith("_loss")


@functools.cache
def _program(name: str, settings: tuple, compiler_options: tuple):
  objective = make(name, **dict(settings))

  def loss_fn(differentiated, fixed):
    loss, metrics = value(objective, **differentiated, **fixed)
    return loss, {metric: x for metric, x in metrics.items() if _asked_for(metric)}

  return jax.jit(jax.value_and_grad(loss_fn, has_aux=True), compiler_options=dict(compiler_options))


def evaluate(name: str, settings: dict[str, Any], arrays: dict[str, np.ndarray], compiler_options: dict[str, Any]):
  """`(loss, clip fractions and losses by name, gradients in the log-probabilities and, where given, the values)`."""
  differentiated = {field: arrays[field] for field in ("logprobs", "values") if field in arrays}
  fixed = {field: x for field, x in arrays.items() if field not in differentiated}
  program = _program(name, tuple(sorted(settings.items())), tuple(compiler_options.items()))
  (loss, metrics), grads = jax.device_get(program(differentiated, fixed))
  return loss, metrics, grads
