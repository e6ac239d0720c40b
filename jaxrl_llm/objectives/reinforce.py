"""REINFORCE: no ratio x no gate x sequence sum."""

from jaxtyping import Array, Float

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import unclipped
from jaxrl_llm.objectives.ratios import no_ratio
from jaxrl_llm.types import GateContext, TokenTerm


@algorithm(weights="sequence_sum")
def reinforce() -> Slots:
  """REINFORCE: the plain policy gradient of data that the current policy drew.

  J = (1/N) Σ_i Σ_t A_t·log π(y_t)

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
  surrogate = unclipped()

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    # From log π itself and not from the log-ratio: whatever stands for the old policy, its bound of ±20 included, has no say here.
    del log_ratio
    return surrogate(no_ratio(context.logprobs, context.mask, context.segments), advantages, context)

  return Slots(ratio=no_ratio, gate=gate, anchor=None)
