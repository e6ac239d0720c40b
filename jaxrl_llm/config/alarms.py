"""Settings of the alarms, the section `alarms` of a config; see `run.observe.alarms`."""

from typing import NamedTuple

from jaxrl_llm.settings.values import ABOVE_ZERO, UNIT, at_least

RULES = {
  "window": at_least(16, "fewer steps do not show what is usual"),
  "spike_sigmas": ABOVE_ZERO,
  "reward_sigmas": ABOVE_ZERO,
  "policy_kl_above": ABOVE_ZERO,
  "entropy_below": ABOVE_ZERO,
  "entropy_fraction": ABOVE_ZERO,
  "truncation_above": UNIT,
  "no_signal_above": UNIT,
}
"""Legal values of the limits."""


class AlarmLimits(NamedTuple):
  """Limits of the rules; None turns a rule off.

  Attributes:
    window: Number of steps that a spike is measured against.
    spike_sigmas: Deviations from their median beyond which a loss or a gradient norm is a spike.
    reward_sigmas: Deviations below its median beyond which a reward has collapsed.
    policy_kl_above: Upper limit of the divergence k3 from the old policy, in nats per token, mean
      over the updates of a step. It grows with the updates of each rollout batch, the learning rate
      and the lag of the samplers.
    entropy_below: Lower limit of the entropy, in nats per token.
    entropy_fraction: Lower limit of the entropy, as a fraction of the run's first.
    truncation_above: Upper limit of the share of responses cut at their budget.
    no_signal_above: Upper limit of the share of groups without a signal, whose samples get no
      advantages.
  """

  window: int = 128
  spike_sigmas: float | None = None
  reward_sigmas: float | None = 3.0
  policy_kl_above: float | None = 0.01
  entropy_below: float | None = None
  entropy_fraction: float | None = None
  truncation_above: float | None = None
  no_signal_above: float | None = None
