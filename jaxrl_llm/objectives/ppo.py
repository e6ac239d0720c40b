"""PPO: token ratio x hard clip x token mean, with a critic."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.penalties import value_loss
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="token_mean", settings_of=hard_clip)
def ppo(
  *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, value_coef: float = 0.5, value_clip: float | None = 0.2
) -> Slots:
  """Builds the PPO objective (proximal policy optimisation), a hard clip with a critic.

  J = (1/Σ|y|) Σ_t [ min(r_t·A_t, clip(r_t, 1 − clip_low, 1 + clip_high)·A_t)
                     − value_coef·(V_t − R̂_t)² ]

  Args:
    value_coef: Weight of the critic's squared error.
    value_clip: Half-width of the band around the critic's old prediction, in units of the return;
      None for the plain square.

  Example:
    >>> sorted(ppo(entropy_coef=0.01).needs)
    ['entropy', 'old_logprobs']

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017.

  Note:
    The critic's term is added if `PolicyOutputs.values` is given. A critic with parameters of its
    own is trained on `Objective.value_loss` instead, and the policy part stands alone. verl's dual
    clip at 3 is always on; here `dual_clip` is off unless set. verl bounds the log-ratio at ±20, as
    here; TRL does not.
  """
  gate = hard_clip(clip_low, clip_high, dual_clip)
  return Slots(ratio=token_ratio, gate=gate, value_loss=value_loss(value_coef, value_clip))
