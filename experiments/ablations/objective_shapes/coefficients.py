"""The weight C that an objective gives A·∇log π of a token, by differentiating `objectives.value`. No formula is written out here."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.types import Objective

OLD_PROBABILITY = 0.3
"""π_old of every token. Only methods with a trust region in probability, or a width that follows it, read it."""


def policy_term(name: str, **settings: object) -> Objective:
  """An objective without its KL penalty; `custom` is the sequence's ratio through the soft gate, a smooth GSPO."""
  if name == "custom" and not settings:
    settings = {"ratio": "sequence", "gate": "soft", "weights": "sequence_mean"}
  if "kl_coef" in inspect.signature(objectives.OBJECTIVES[name]).parameters:
    settings.setdefault("kl_coef", 0.0)
  return objectives.make(name, **settings)


def coefficients(
  objective: Objective, log_ratio: np.ndarray, advantages: np.ndarray, probability: float = OLD_PROBABILITY
) -> np.ndarray:
  """C of every token: the gradient of the loss in log π, over −w·A.

  Args:
    objective: what to differentiate.
    log_ratio: of the tokens, [N, T]; a row is a sequence.
    advantages: of the sequences, [N], or of the tokens, [N, T]; never 0.
    probability: π_old of every token.

  Returns:
    [N, T]. Of a method in which a token's log-probability also moves the other tokens' terms, the sum over all terms.
  """
  old = jnp.full(np.shape(log_ratio), np.log(probability), jnp.result_type(float))
  mask = jnp.ones_like(old)
  advantages = jnp.asarray(advantages, old.dtype)
  loss = lambda logprobs: objectives.value(objective, logprobs, old, advantages, mask, sampler_logprobs=old)[0]
  gradient = jax.grad(loss)(old + jnp.asarray(log_ratio, old.dtype))
  spread = advantages if advantages.ndim == 2 else advantages[:, None]
  return np.asarray(-gradient / (objective.weigh(mask, None) * spread))


def curve(objective: Objective, ratio: np.ndarray, sign: int, probability: float = OLD_PROBABILITY) -> np.ndarray:
  """C against the ratio, for responses of one token: there the ratios of token, sequence and product are the same number."""
  return coefficients(objective, np.log(ratio)[:, None], np.full(len(ratio), float(sign)), probability)[:, 0]
