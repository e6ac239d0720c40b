"""GMPO: token ratio x geometric clip x sequence mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import geometric_clip
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="sequence_mean", settings_of=geometric_clip)
def gmpo(*, log_clip_low: float = 0.4, log_clip_high: float = 0.4) -> Slots:
  """Builds the GMPO objective (geometric-mean policy optimisation), a clip of log-ratios.

  J = (1/N) Σ_i g_i·A_i,  log g_i = (1/|y_i|) Σ_t z̃_t
  z̃ = min(log r, log_clip_high) if A > 0, max(log r, −log_clip_low) if A < 0

  It clips tokens, then weighs a response by the geometric mean of the clipped ratios.

  Example:
    >>> sorted(gmpo(log_clip_high=0.2).needs)
    ['old_logprobs']

  References:
    Geometric-Mean Policy Optimization, arXiv:2507.20673, 2025.

  Note:
    verl averages over the rows of a micro-batch, empty ones included; here the mean is over the
    responses of the whole batch that have a counted token. verl's clip fractions also count tokens
    outside the band on the side where no clip binds. Both implementations take one advantage per
    response.
  """
  return Slots(ratio=token_ratio, gate=geometric_clip(log_clip_low, log_clip_high))
