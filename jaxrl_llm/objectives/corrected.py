"""The corrections that a config enables, checked together and applied in a fixed order."""

from typing import Any

from jaxrl_llm.objectives.corrections import CORRECTIONS
from jaxrl_llm.objectives.mismatch import LEVELS
from jaxrl_llm.objectives.settings import is_finite, is_number
from jaxrl_llm.types import Objective


def _is_band(x: Any) -> bool:
  return isinstance(x, tuple | list) and len(x) == 2 and all(map(is_number, x)) and 0 <= x[0] <= 1 <= x[1] and x[0] < x[1]


_CAP = (lambda x: x is None or (is_number(x) and x >= 1), "None or a number >= 1, so that k = 1 keeps its weight")
_BAND = (lambda x: x is None or _is_band(x), "None or two numbers (low, high) with 0 <= low <= 1 <= high and low < high")

RULES = {
  "tis": _CAP,
  "mis": _CAP,
  "level": (lambda x: isinstance(x, str) and x in LEVELS, "one of " + ", ".join(map(repr, LEVELS))),
  "icepop": _BAND,
  "geometric_rejection": _BAND,
  "off_policy_mask": (lambda x: x is None or (is_finite(x) and x >= 0), "None or a finite number of nats per token >= 0"),
  "off_policy_anchor": (lambda x: x in ("old", "sampler"), "'old' or 'sampler'"),
  "bypass": (lambda x: isinstance(x, bool), "True or False"),
  "top_entropy": (lambda x: x is None or (is_number(x) and 0 < x < 1), "None or a number > 0 and < 1, the share of tokens to keep"),
}
"""Rule of each setting of `corrected`: the test that it must pass, and the same test in words."""


def corrected(
  objective: Objective,
  *,
  tis: Any = None,
  mis: Any = None,
  level: Any = "token",
  icepop: Any = None,
  geometric_rejection: Any = None,
  off_policy_mask: Any = None,
  off_policy_anchor: Any = "old",
  bypass: Any = False,
  top_entropy: Any = None,
) -> Objective:
  """Wraps an objective in the corrections that are enabled.

  The order from the inside out is top_entropy, off_policy_mask, geometric_rejection, one of tis,
  mis and icepop, bypass. Weights multiply, so only the place of bypass matters: as the outermost,
  it sets what all others see as π_old. The settings come from a config, so they may have any type.

  Args:
    objective: Objective to wrap.
    tis, mis: Caps of these corrections; None leaves a correction out.
    level: Level of `tis` and `mis`, "token" or "sequence".
    icepop: Band (low, high), a tuple or a list.
    geometric_rejection: Band (low, high), a tuple or a list.
    off_policy_mask: Threshold delta, in nats per token.
    off_policy_anchor: Anchor of `off_policy_mask`, "old" or "sampler".
    bypass: Whether the sampler's policy is used as π_old.
    top_entropy: Share of the tokens that is kept, those of the largest entropy.

  Returns:
    The wrapped objective, or the objective itself if no correction is enabled.

  Raises:
    ValueError: If settings are illegal, exclude each other or have no effect on this objective,
      such as any correction of sft. All problems are in one line.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> sorted(corrected(gspo(), tis=2.0, off_policy_mask=0.1).needs)
    ['old_logprobs', 'sampler_logprobs']
    >>> corrected(gspo(), level="sequence")
    Traceback (most recent call last):
      ...
    ValueError: level: found 'sequence', expected 'token', because neither tis nor mis is set and \
it would be ignored
  """
  settings = dict(tis=tis, mis=mis, level=level, icepop=icepop, geometric_rejection=geometric_rejection)
  settings |= dict(off_policy_mask=off_policy_mask, off_policy_anchor=off_policy_anchor, bypass=bypass, top_entropy=top_entropy)
  problems = [f"{name}: found {x!r}, expected {RULES[name][1]}" for name, x in settings.items() if not RULES[name][0](x)]
  # Only legal settings can be compared with one another.
  problems = problems or _conflicts(objective, settings)
  if problems:
    raise ValueError("; ".join(problems))
  arguments = {
    "off_policy_mask": {"delta": off_policy_mask, "anchor": off_policy_anchor},
    "geometric_rejection": dict(zip(("low", "high"), geometric_rejection or (), strict=False)),
    "tis": {"cap": tis, "level": level},
    "mis": {"cap": mis, "level": level},
    "icepop": dict(zip(("low", "high"), icepop or (), strict=False)),
    "bypass": {},
    "top_entropy": {"share": top_entropy},
  }
  for name, wrap in CORRECTIONS.items():
    if _is_on(settings.get(name)):
      objective = wrap(objective, **arguments[name])
  return objective


def _is_on(setting: Any) -> bool:
  return setting is not None and setting is not False


def _conflicts(objective: Objective, settings: dict[str, Any]) -> list[str]:
  """Returns problems of settings that are legal alone, but not together or with this objective."""
  on = {name: x for name, x in settings.items() if name in CORRECTIONS and _is_on(x)}
  weights = [name for name in ("tis", "mis", "icepop") if name in on]
  problems = []
  if len(weights) > 1:
    clashes = ", ".join(f"{name}: found {on[name]!r}" for name in weights)
    problems.append(f"{clashes}, expected at most one of them, because each puts its own weight on the mismatch")
  if settings["level"] != "token" and not {"tis", "mis"} & on.keys():
    problems.append(f"level: found {settings['level']!r}, expected 'token', because neither tis nor mis is set and it would be ignored")
  if settings["off_policy_anchor"] != "old" and "off_policy_mask" not in on:
    anchor = settings["off_policy_anchor"]
    problems.append(
      f"off_policy_anchor: found {anchor!r}, expected 'old', because off_policy_mask is not set and it would be ignored"
    )
  if not objective.correctable:
    why = "because the objective has no policy term that a weight could correct"
    return problems + [f"{name}: found {x!r}, expected {'False' if name == 'bypass' else 'None'}, {why}" for name, x in on.items()]
  of_mismatch = [*weights, *(["geometric_rejection"] if "geometric_rejection" in on else [])]
  if "bypass" in on:
    ignored = "bypass uses the sampler's policy as the old one, which leaves no mismatch"
    problems += [f"{name}: found {on[name]!r}, expected None, because {ignored}" for name in of_mismatch]
    if "old_logprobs" not in objective.needs and "off_policy_mask" not in on:
      problems.append("bypass: found True, expected False, because the objective never reads the old policy")
  elif "sampler_logprobs" in objective.needs:
    twice = "the objective itself corrects the mismatch, which would count twice"
    problems += [f"{name}: found {on[name]!r}, expected None, because {twice}" for name in weights]
  return problems
