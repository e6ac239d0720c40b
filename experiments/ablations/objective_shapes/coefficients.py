"""The weight C that an objective gives A·∇log π of a token, by differentiating `objectives.value`.

No formula is written out here.
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
"""π_old of every token.

Only methods with a trust region in probability, or a width that follows it, read it.
"""


@functools.cache
def policy_term(name: str, **settings: object) -> Objective:
  """Returns an objective without its KL penalty.

  `custom` is the sequence's ratio through the soft gate, a smooth GSPO.
  """
  if name == "custom" and not settings:
    settings = {"ratio": "sequence", "gate": "soft", "weights": "sequence_mean"}
  if "kl_coef" in inspect.signature(objectives.OBJECTIVES[name]).parameters:
    settings.setdefault("kl_coef", 0.0)
  return objectives.make(name, **settings)


def coefficients(
  objective: Objective, log_ratio: np.ndarray, advantages: np.ndarray, probability: float = OLD_PROBABILITY
) -> np.ndarray:
  """Returns C of every token: the gradient of the loss in log π, over −w·A.

  Args:
    objective: What to differentiate.
    log_ratio: Log-ratio of the tokens, [N, T]; a row is a sequence.
    advantages: Advantages of the sequences, [N]; never 0.
    probability: Π_old of every token.

  Returns:
    [N, T]. If a token's log-probability also moves other tokens' terms, the sum over all.
  """
  dtype = jnp.result_type(float)
  log_ratio, advantages = jnp.asarray(log_ratio, dtype), jnp.asarray(advantages, dtype)
  # An argument and no constant of the program: the compiler would fold what it knows, for seconds.
  segments = jnp.ones(log_ratio.shape, jnp.int32)
  return np.asarray(_compiled(objective)(log_ratio, advantages, jnp.log(jnp.asarray(probability, dtype)), segments))


@functools.cache
def _compiled(objective: Objective) -> Callable[..., Array]:
  """Returns one program for each shape; op by op it would take minutes."""

  def weigh(log_ratio: Array, advantages: Array, old_logprob: Array, segments: Array) -> Array:
    old = jnp.full_like(log_ratio, old_logprob)
    mask = jnp.ones_like(old)
    given = dict(segments=segments, sampler_logprobs=old)
    loss = lambda logprobs: objectives.value(objective, logprobs, old, advantages, mask, **given)[0]
    return -jax.grad(loss)(old + log_ratio) / (objective.weigh(mask, None) * advantages[:, None])

  return jax.jit(weigh)


def curve(objective: Objective, ratio: np.ndarray, sign: int, probability: float = OLD_PROBABILITY) -> np.ndarray:
  """Returns C against the ratio, for responses of one token.

  There the ratios of token, sequence and product are the same number.
  """
  return coefficients(objective, np.log(ratio)[:, None], np.full(len(ratio), float(sign)), probability)[:, 0]
