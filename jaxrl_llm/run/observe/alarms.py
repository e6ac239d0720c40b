"""Alarms: rules over the last steps that flag what a person watching a run's curves would call out.

They change nothing in the run. Each rule looks at one metric, and every row of the metrics says in
`alarm/NAME` whether it holds. An alarm begins when its rule first holds and ends after a few steps
in which it does not; each logs a line. What the rules need to know of the past is a small JSON
value in the run's record, so a resumed run reports the same alarms as an unbroken one.

Rules that warn of collapses in `experiments/studies/alarms` with few false alarms are on by
default: `reward_collapse`, `policy_kl`, and `nonfinite_logprobs`, which is a fact and no guess. All
others are off. `loss_spike` and `grad_norm_spike` hold as often in healthy runs as before a
collapse. `entropy_collapse`, `truncation` and `no_signal` warned of hardly any collapse at a limit
that healthy runs respect.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config.alarms import AlarmLimits

WARM_UP = 16
"""Steps that a rule must have seen before it calls one an outlier."""

CALM = 5
"""Steps without its rule after which an alarm ends, so that a metric that swings around its limit
does not log a line at each step."""

State = dict[str, Any]
"""State as JSON. `window`: the last finite values of each watched metric. `first_entropy`: the
run's first entropy. `since`: for each active alarm, the steps at which it began and at which its
rule last held. `counts`: how often each alarm has begun."""


def new_state() -> State:
  """Returns the state before the first step of a run."""
  return {"window": {}, "first_entropy": None, "since": {}, "counts": {}}


def deviation(value: float, past: Sequence[float]) -> float:
  """Returns by how many standard deviations, robustly estimated, a value exceeds past ones.

  (x − median) / (1.4826·MAD), where MAD is the median distance from the median. The factor 1.4826
  makes it the standard deviation of a normal distribution. The result is 0 if there are too few
  past values, or if half of them are the same number.

  Args:
    value: New value.
    past: Values before it.

  Example:
    >>> past = list(range(17))
    >>> round(deviation(100, past), 1), round(deviation(100, [*past, 1e6]), 1)
    (15.5, 13.7)

  Note:
    MaxText skips a step whose loss is 6 standard deviations above the mean of the last 128. In RL
    the loss swings around 0 with heavy tails: one spike in the window would inflate its standard
    deviation and hide the next, while the median and the MAD do not move. After a lasting change of
    level, the alarm ends once the new level makes up half of the window.
  """
  if len(past) < WARM_UP:
    return 0.0
  middle = statistics.median(past)
  spread = 1.4826 * statistics.median(abs(x - middle) for x in past)
  return (value - middle) / spread if spread > 0 else 0.0


def observe(state: State, row: Mapping[str, Any], *, step: int, limits: AlarmLimits) -> tuple[State, dict[str, int], list[str]]:
  """Applies the rules to one more step.

  Args:
    state: State after the steps before; not modified.
    row: Metrics of the step. A rule whose metric is missing or not finite stays silent.
    step: Number of the step, from 1.
    limits: Limits of the rules.

  Returns:
    The next state; `alarm/NAME` for each rule that is on, 1 while it holds; and lines for alarms
    that begin or end.

  Example:
    >>> limits = AlarmLimits(truncation_above=0.5)
    >>> state, metrics, lines = observe(new_state(), {"response_length/clip_ratio": 0.75}, step=7, limits=limits)
    >>> metrics
    {'alarm/truncation': 1}
    >>> lines
    ['alarm truncation at RL step 7: 75.0% of the responses were cut at their budget, above
    config.alarms.truncation_above=0.5']
    >>> observe(state, {"response_length/clip_ratio": 0.25}, step=8, limits=limits)[1:]
    ({'alarm/truncation': 0}, [])
    >>> observe(state, {"response_length/clip_ratio": 0.25}, step=12, limits=limits)[2]
    ['alarm truncation is over at RL step 12; it lasted from step 7 to 7']
  """
  reasons, lines = _rules(state, row, limits), []
  since, counts = dict(state["since"]), dict(state["counts"])
  for name, why in reasons.items():
    if why:
      if name not in since:
        counts[name] = counts.get(name, 0) + 1
        lines.append(f"alarm {name} at RL step {step:,}: {why}")
      since[name] = [since.get(name, [step])[0], step]
    elif name in since and step - since[name][1] >= CALM:
      first, last = since.pop(name)
      lines.append(f"alarm {name} is over at RL step {step:,}; it lasted from step {first:,} to {last:,}")
  window = dict(state["window"])
  for name in ("actor/loss", "actor/grad_norm", "critic/rewards/mean"):
    if (value := _number(row, name)) is not None:
      window[name] = [*window.get(name, ()), value][-limits.window :]
  first = state["first_entropy"] if state["first_entropy"] is not None else _number(row, "actor/entropy")
  state = {"window": window, "first_entropy": first, "since": since, "counts": counts}
  return state, {f"alarm/{name}": int(bool(why)) for name, why in reasons.items()}, lines


def _rules(state: State, row: Mapping[str, Any], limits: AlarmLimits) -> dict[str, str]:
  """Returns the reason why each rule holds, or an empty string if it does not.

  Rules that are off, or have nothing to look at, are left out.
  """
  reasons = {}
  # A loss can spike to both sides; a gradient is only too large, and a reward only too small.
  for name, metric, field, size in (
    ("loss_spike", "actor/loss", "spike_sigmas", abs),
    ("grad_norm_spike", "actor/grad_norm", "spike_sigmas", lambda x: x),
    ("reward_collapse", "critic/rewards/mean", "reward_sigmas", lambda x: -x),
  ):
    most, value = getattr(limits, field), _number(row, metric)
    if most is not None and value is not None:
      past = state["window"].get(metric, [])
      sigmas = size(deviation(value, past))
      why = f"{metric}={value:.3g} is {sigmas:.1f} deviations from {statistics.median(past):.3g}, the median" if past else ""
      reasons[name] = f"{why} of the last {len(past)} steps, beyond config.alarms.{field}={most:g}" if sigmas > most else ""
  kl, most = _number(row, "actor/ppo_kl_k3"), limits.policy_kl_above
  if kl is not None and most is not None:
    why = f"actor/ppo_kl_k3={kl:.3g} nats per token from the old policy is above config.alarms.policy_kl_above={most:g}"
    reasons["policy_kl"] = why if kl > most else ""
  entropy, first = _number(row, "actor/entropy"), state["first_entropy"]
  if entropy is not None and (limits.entropy_below is not None or limits.entropy_fraction is not None):
    why, nats = "", f"actor/entropy={entropy:.3g} nats per token"
    if limits.entropy_below is not None and entropy < limits.entropy_below:
      why = f"{nats} is below config.alarms.entropy_below={limits.entropy_below:g}"
    elif limits.entropy_fraction is not None and first is not None and entropy < limits.entropy_fraction * first:
      why = f"{nats} is below config.alarms.entropy_fraction={limits.entropy_fraction:g} of the first, {first:.3g}"
    reasons["entropy_collapse"] = why
  for name, metric, what in (
    ("truncation", "response_length/clip_ratio", "of the responses were cut at their budget"),
    ("no_signal", "group/frac_reward_zero_std", "of the groups have samples without advantages, which teach nothing"),
  ):
    limit, value = getattr(limits, f"{name}_above"), _number(row, metric)
    if limit is not None and value is not None:
      reasons[name] = f"{value:.1%} {what}, above config.alarms.{name}_above={limit:g}" if value > limit else ""
  broken = row.get("rollout/nonfinite_logprobs", 0)
  if broken or "nonfinite_logprobs" in state["since"]:
    reasons["nonfinite_logprobs"] = broken and f"{broken:.0f} sequences have non-finite sampler log-probabilities"
  return reasons


def _number(row: Mapping[str, Any], name: str) -> float | None:
  value = row.get(name)
  return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
