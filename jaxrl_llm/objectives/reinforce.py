"""REINFORCE: no ratio x no gate x sequence sum."""

from jaxtyping import Array, Float

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import unclipped
from jaxrl_llm.objectives.ratios import no_ratio
from jaxrl_llm.types import GateContext, TokenTerm


@algorithm(weights="sequence_sum")
def reinforce() -> Slots:
  """Builds the REINFORCE objective: the gradient on the current policy's data, without a gate.

  J = (1/N) Σ_i Σ_t A_t·log π(y_t)

  Example:
    >>> reinforce().needs
    frozenset()

  References:
    Simple statistical gradient-following algorithms for connectionist reinforcement learning,
      Williams, 1992.

  Note:
    The value of the surrogate is r·A with r = 1, that is A, and not A·log π as in verl. The
    gradient is the same, and the loss is on the scale of the other objectives. Nothing corrects for
    stale data, so make one update per rollout batch. The metrics of ratios still compare with
    `old_logprobs`.
  """
  surrogate = unclipped()

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    # Uses log π itself, not the log-ratio: neither the old policy nor the bound of ±20 has an
    # effect here.
    del log_ratio
    return surrogate(no_ratio(context.logprobs, context.mask, context.segments), advantages, context)

  return Slots(ratio=no_ratio, gate=gate, anchor=None)
