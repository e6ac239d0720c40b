"""KL-Cov: token ratio x no gate, with a pull on tokens of the largest covariance x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import pulled_selected
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.selections import largest_covariances


@algorithm(weights="token_mean", settings_of=pulled_selected)
def kl_cov(*, cov_kl_coef: float = 1.0, cov_share: float = 2e-4) -> Slots:
  """Builds the KL-Cov objective: a pull on a few tokens of the largest covariance, no clip.

  J = (1/Σ|y|) Σ_t [r_t·A_t − cov_kl_coef·|log r_t| if selected]
  selected: the ⌊cov_share·Σ|y|⌋ tokens with the largest covariance  (see `selections`)

  Tokens of large covariance of log-probability and advantage lower the entropy most.

  Args:
    cov_share: Share of the batch's tokens that are held, at least one.

  Example:
    >>> sorted(kl_cov().needs)
    ['old_logprobs']

  References:
    The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617,
      2025, section 4.2.

  Note:
    The penalty is the authors' code, |log r|; the paper writes KL(π_old‖π). Its share is 2e-4 for
    its model of 32B weights and 2e-3 for that of 7B. The tokens are selected once per update, from
    the whole global batch, by log π_old; verl and the authors select them in each micro-batch, by
    the current policy. A token whose covariance is not above 0 is never selected.
  """
  return Slots(ratio=token_ratio, gate=pulled_selected(cov_kl_coef), prepare=largest_covariances(cov_share))
