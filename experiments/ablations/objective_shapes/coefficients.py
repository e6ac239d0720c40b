"""Weight C that an objective gives A·∇log π of a token, by differentiating `objectives.value`.

This module repeats no formula of an objective.
"""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm import objectives
from jaxrl_llm.types import Objective

OLD_PROBABILITY = 0.3
"""Probability π_old of every token.

It matters only to methods whose trust region is in probabilities or has a width that depends on
them.
"""


@functools.cache
def policy_term(name: str, **settings: object) -> Objective:
  """Makes an objective without its KL penalty.

  Without settings, `custom` is the sequence's ratio through the soft gate: a smooth GSPO.
  """
  if name == "custom" and not settings:
    settings = {"ratio": "sequence", "gate": "soft", "weights": "sequence_mean"}
  if "kl_coef" in inspect.signature(objectives.OBJECTIVES[name]).parameters:
    settings.setdefault("kl_coef", 0.0)
  return objectives.make(name, **settings)


def coefficients(
  objective: Objective, log_ratio: np.ndarray, advantages: np.ndarray, probability: float = OLD_PROBABILITY
) -> np.ndarray:
  """Computes C of every token: the gradient of the loss in log π, over −w·A.

  Args:
    objective: Objective to differentiate.
    log_ratio: Log-ratio of the tokens, [N, T]. Each row is a sequence.
    advantages: Advantages of the sequences, [N]. None of them may be 0.
    probability: Probability π_old of every token.

  Returns:
    C, [N, T]. If a token's log-probability also affects the terms of other tokens, C is the sum
    over all of them.
  """
  dtype = jnp.result_type(float)
  log_ratio, advantages = jnp.asarray(log_ratio, dtype), jnp.asarray(advantages, dtype)
  # The segments are an argument, because the compiler would spend seconds on folding a constant.
  segments = jnp.ones(log_ratio.shape, jnp.int32)
  return np.asarray(_compiled(objective)(log_ratio, advantages, jnp.log(jnp.asarray(probability, dtype)), segments))


@functools.cache
def _compiled(objective: Objective) -> Callable[..., Array]:
  """Compiles C, with one program per shape. Without compilation it would take minutes."""

  def weigh(log_ratio: Array, advantages: Array, old_logprob: Array, segments: Array) -> Array:
    """Differentiates the loss in log π and divides by −w·A."""
    old = jnp.full_like(log_ratio, old_logprob)
    mask = jnp.ones_like(old)
    inputs = dict(segments=segments, sampler_logprobs=old)
    loss = lambda logprobs: objectives.value(objective, logprobs, old, advantages, mask, **inputs)[0]
    return -jax.grad(loss)(old + log_ratio) / (objective.weigh(mask, None) * advantages[:, None])

  return jax.jit(weigh)


def curve(objective: Objective, ratio: np.ndarray, sign: int, probability: float = OLD_PROBABILITY) -> np.ndarray:
  """Computes C against the ratio for responses of one token.

  For such responses the ratios of token, sequence and product are equal.
  """
  return coefficients(objective, np.log(ratio)[:, None], np.full(len(ratio), float(sign)), probability)[:, 0]
