"""REINFORCE: no ratio x no gate x sequence sum."""

from jaxtyping import Array, Float

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import unclipped
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import no_ratio
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import GateContext, Objective, TokenMetrics


@checked
def reinforce(
  *,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "sequence_sum",
  max_tokens: int | None = None,
) -> Objective:
  """REINFORCE: the plain policy gradient of data that the current policy drew.

  J = (1/N) Σ_i Σ_t A_t·log π(y_t)

  Args:
    kl_coef: loss per nat of divergence from the reference; above 0 the objective needs `ref_logprobs`.
    kl_estimator: a key of `penalties.KL_ESTIMATORS`.
    entropy_coef: reward per nat of entropy; above 0 the objective needs `entropy`.
    weights: "token_mean", "sequence_mean", "sequence_sum" or "constant".
    max_tokens: generation budget in tokens, for weights="constant" only.

  Returns:
    The objective.

  Raises:
    ValueError: for a setting that is unknown, illegal or without effect.

  Example:
    >>> reinforce().needs
    frozenset()

  References:
    Simple statistical gradient-following algorithms for connectionist reinforcement learning, Williams, 1992.

  Note:
    The surrogate's value is r·A with r = 1, that is A, and not A·log π as in verl: the gradient is the same, and the loss is on the scale
    of the other objectives'. Nothing corrects for stale data, so make one update a rollout batch. The metrics of ratios still compare with
    `old_logprobs`.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  surrogate = unclipped()

  def gate(
    log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext
  ) -> tuple[Float[Array, "B T"], TokenMetrics]:
    # From log π itself and not from the log-ratio: whatever stands for the old policy, its bound of ±20 included, has no say here.
    del log_ratio
    return surrogate(no_ratio(context.logprobs, context.mask, context.segments), advantages, context)

  objective = policy_objective(
    ratio=no_ratio,
    gate=gate,
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
  )
  return objective._replace(needs=needs)
