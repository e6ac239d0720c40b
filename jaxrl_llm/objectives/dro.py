"""DRO: token ratio x quadratic pull x sequence sum."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.score_gates import quadratic_pull


@algorithm(weights="sequence_sum", settings_of=quadratic_pull)
def dro(*, pull: float = 0.05) -> Slots:
  """Builds the DRO objective: a quadratic pull to the old policy, no weight and no clip.

  J = (1/N) Σ_i Σ_t [A_t·log π(y_t) − (pull/2)·(log π(y_t) − log π_old(y_t))²]

  It is made for data of any policy: a square holds the policy near the one that drew them.

  Example:
    >>> sorted(dro(pull=0.1).needs)
    ['old_logprobs']

  References:
    Offline Regularised Reinforcement Learning for Large Language Models Alignment (DRO),
      arXiv:2405.19107, 2024.
    Kimi k1.5: Scaling Reinforcement Learning with LLMs, arXiv:2501.12599, 2025, eq. 2 and 3.

  Note:
    This is the loss that the Tinker service calls `dro`, per token and with its β as `pull`; it
    sums over all tokens, without 1/N. The papers take the log-ratio of the whole response, and
    learn a value (DRO) or take the mean reward (Kimi) as the baseline, here the advantages. Tokens
    with A = 0 are still pulled.
  """
  return Slots(ratio=token_ratio, gate=quadratic_pull(pull), teaches_without_advantage=True)
