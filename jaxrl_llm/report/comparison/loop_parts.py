"""The parts of the training loop in order, and the first one in which rows of two runs differ."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.messages import shown
from jaxrl_llm.report.data import is_number
from jaxrl_llm.workdir.metrics import reproducible

Row = Mapping[str, Any]

# One for each part that has a hash.
_DIGESTS = tuple(
  f"rollout/{name}_sha256" for name in ("prompts", "tokens", "logprobs", "rewards", "loss_mask", "advantages")
)


class LoopPart(NamedTuple):
  """A part of a step.

  Attributes:
    name: What differs, as a plural.
    metrics: Pattern of its metrics.
    cause: Likely cause if everything before it is equal.
    fields: Fields of a row of `samples.jsonl` that show it.
  """

  name: str
  metrics: str
  cause: str
  fields: tuple[str, ...] = ()

  @property
  def digest(self) -> str | None:
    """Metric with the hash of the part; None if there is none."""
    return next((name for name in _DIGESTS if re.match(self.metrics, name)), None)


PARTS = (
  LoopPart(
    name="prompts",
    metrics=r"rollout/prompts_sha256$|prompt_length/|curriculum/",
    cause="other problems or another order of them (the data file, the code of the task, a curriculum)",
    fields=("prompt", "answer", "level"),
  ),
  LoopPart(
    name="tokens",
    metrics=r"rollout/(tokens|sequences)_sha256$|rollout/(?!\w+_sha256$|counted|nonfinite)|(response_length|conversation|environment|queue)/",
    cause="the weights that drew them, the sampler or its key",
    fields=("token_ids", "response", "num_tokens", "stopped", "written"),
  ),
  LoopPart(
    name="sampler's log-probabilities",
    metrics=r"rollout/logprobs_sha256$|rollout/nonfinite",
    cause="the sampler rounds in another way (its type, its cache, a kernel, the compiler)",
    fields=("logprobs",),
  ),
  LoopPart(
    name="rewards",
    metrics=r"rollout/rewards_sha256$|critic/rewards/|rewards?/|judge/",
    cause="the reward function is not deterministic (a clock, a random number, a judge, a time limit), or its code has changed",
    fields=("reward", "correct"),
  ),
  LoopPart(
    name="loss masks",
    metrics=r"rollout/loss_mask_sha256$|rollout/counted$",
    cause="other responses or tokens count in the loss (the overlong filter, the environment's mask)",
  ),
  LoopPart(
    name="advantages",
    metrics=r"rollout/advantages_sha256$|critic/(advantages|returns)/|group/",
    cause="another estimator, or its code has changed",
    fields=("advantage",),
  ),
  LoopPart(name="packed rows", metrics=r"perf/", cause="another split of the sequences into rows"),
  LoopPart(
    name="learner's log-probabilities",
    metrics=r"rollout_corr/",
    cause="the learner computes them in another way (a kernel, the split into rows or devices)",
  ),
  LoopPart(
    name="refused updates",
    metrics=r"train/skipped_steps$",
    cause="a gradient that was not finite; the workdir has its batch",
  ),
  # Before the updates: of several in a step, all but the first follow one at this rate.
  LoopPart(
    name="learning rates", metrics=r"actor/lr$", cause="another schedule, or another number of updates before"
  ),
  # All other metrics are of the updates too; see `part_of`.
  LoopPart(
    name="updates",
    metrics=r"actor/(?!lr$)",
    cause="another objective or correction, or its code has changed",
  ),
  LoopPart(
    name="weights after the updates",
    metrics=r"$.",
    cause="the optimizer, or its state",
    fields=("entropy", "log_ratio", "gate_weight"),
  ),
)
"""Parts of an RL step, in the order in which it computes them."""

_CLOSE = "of float32 rounding apart"
_ROUNDING = "rounding, by another compiler, flag, kernel, processor or number of devices"
_OTHER = next(part for part in PARTS if part.name == "updates")
# They follow from others, or from what was done about the files.
_DERIVED = re.compile(r"alarm/|checkpoint/|perf/(?!packing_waste|prompts_saved)|step$|phase$|nonfinite$")
_SHOWN_FIRST = (
  "actor/loss",
  "actor/grad_norm",
  "critic/rewards/mean",
  "response_length/mean",
  "eval/accuracy",
  "rollout/tokens_sha256",
)
_ORDER = ("warm_start", "reward_model", "rl", "eval")


class Difference(NamedTuple):
  """The first difference of two runs.

  Attributes:
    phase: Phase of the rows.
    step: Step of the phase.
    part: Name of the part of the step, as a plural.
    detail: The two values.
    cause: Likely cause if nothing but numbers differs.
    equal: Names of the parts before it in the step that are recorded and equal.
    metrics: All metrics of the step that differ.
    position: Index of the part in `PARTS`; None in another phase than "rl".
    is_certain: Whether the files show the cause, so that no other one need be considered.
  """

  phase: str
  step: int
  part: str
  detail: str
  cause: str
  equal: tuple[str, ...] = ()
  metrics: tuple[str, ...] = ()
  position: int | None = None
  is_certain: bool = False


def place(key: tuple[str, int]) -> tuple[int, int, int]:
  """Returns the place of a phase's step in the loop: an evaluation follows its RL step."""
  phase, step = key
  return (phase in ("rl", "eval"), step, _ORDER.index(phase))


def part_of(name: str) -> LoopPart:
  """Returns the part that a metric belongs to.

  Example:
    >>> part_of("critic/rewards/mean").name, part_of("rollout/tokens_sha256").name, part_of("sapo/gate_pos").name
    ('rewards', 'tokens', 'updates')
  """
  return next((part for part in PARTS if re.match(part.metrics, name)), _OTHER)


def by_step(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Any]]:
  """Returns the numbers of each row that do not depend on the clock, by phase and step."""
  return {(row["phase"], row["step"]): _values(row) for row in rows}


def _values(row: Row) -> dict[str, Any]:
  row = reproducible(row)
  return {name: value for name, value in (row | row.get("nonfinite", {})).items() if not _DERIVED.match(name)}


def names(rows: Mapping[Any, Row]) -> set[str]:
  """Returns the names of all metrics of a run."""
  return set().union(*rows.values())


def difference_of_step(
  key: tuple[str, int],
  rows: tuple[Row, Row],
  samples: tuple[Sequence[Row], Sequence[Row]],
  *,
  shared: set[str],
) -> Difference | None:
  """Returns the first difference in the rows and samples of a step, or None.

  Args:
    key: Phase and step.
    rows: Metrics of each run.
    samples: Samples of each run.
    shared: Metrics that both runs have in some row. Others are no difference by themselves.
  """
  a, b = rows
  differing = [name for name in (a.keys() | b.keys()) & shared if a.get(name) != b.get(name)]
  # An attempt of an earlier version recorded no hashes.
  differing = [name for name in differing if not name.endswith("_sha256") or name in a and name in b]
  differing.sort(key=lambda name: _rank(name, in_both=name in a and name in b))
  pairs = list(_paired(*samples))
  if key[0] != "rl":
    if not differing:
      return None
    name, cause = part_of(differing[0]).name, part_of(differing[0]).cause
    if key[0] == "eval":
      name, cause = "held-out answers", "the sampler, or other held-out problems"
    elif key[1] == 1:
      cause = "other first weights or data"
    detail = _detail(differing[0], a, b)
    return Difference(*key, name, detail, _ROUNDING if _CLOSE in detail else cause, metrics=tuple(differing))
  if (order := _order(a, b, *samples)) is not None:
    cause = "groups arrive in another order, or the data is shuffled in another way"
    return Difference(*key, "orders of the groups", order, cause, metrics=tuple(differing), position=0)
  equal = []
  for position, part in enumerate(PARTS):
    of_part = [name for name in differing if part_of(name) is part]
    of_samples = next((text for x, y, label in pairs if (text := _sample_detail(part, x, y, label))), None)
    if of_part or of_samples:
      detail, digest = of_samples or _detail(of_part[0], a, b), part.digest
      cause = _ROUNDING if _CLOSE in detail else part.cause
      edited = of_samples is not None and digest in a and a[digest] == b.get(digest)
      if edited:
        cause = f"samples.jsonl was changed after the run, for {digest} of the step is equal"
      return Difference(*key, part.name, detail, cause, tuple(equal), tuple(differing), position, edited)
    if evident := _evident(part, a, b, pairs):
      equal.append(evident)
  return None


def _rank(name: str, *, in_both: bool) -> tuple:
  """Orders metrics by part, and within it the telling ones first and hashes last."""
  shown_first = _SHOWN_FIRST.index(name) if name in _SHOWN_FIRST else len(_SHOWN_FIRST)
  return PARTS.index(part_of(name)), not in_both, name.endswith("_sha256"), shown_first, name


def _evident(part: LoopPart, a: Row, b: Row, pairs: Sequence[tuple[Row, Row, str]]) -> str | None:
  """Returns what of a part without a difference is recorded to be equal; None for nothing."""
  if part.digest is None:
    return part.name if any(part_of(name) is part for name in a.keys() & b.keys()) else None
  if part.digest in a and part.digest in b:
    return part.name
  compared = sum(any(name in x and name in y for name in part.fields) for x, y, _ in pairs)
  return f"{part.name} of {compared} sample{'s' if compared > 1 else ''}" if compared else None


def _order(a: Row, b: Row, samples: Sequence[Row], others: Sequence[Row]) -> str | None:
  """Returns how groups of a step differ in their order alone; None if they do not."""
  pairs = [(x, y) for x, y in zip(samples, others, strict=False) if _sequence(x) != _sequence(y)]
  if (name := "rollout/sequences_sha256") in a and name in b:
    moved = a[name] == b[name] and a.get("rollout/tokens_sha256") != b.get("rollout/tokens_sha256")
  else:
    moved = bool(pairs) and Counter(map(_sequence, samples)) == Counter(map(_sequence, others))
  if not moved:
    return None
  places = [f"{_problem(x)} and {_problem(y)} in one place" for x, y in pairs]
  return places[0] if places else "all prompts and responses are the same ones"


def _sequence(sample: Row) -> tuple:
  return sample.get("prompt"), tuple(sample.get("token_ids", ()))


def _problem(sample: Row) -> str:
  return f"problem {shown(str(sample.get('prompt', '')).strip(), limit=40)}"


def _paired(samples: Sequence[Row], others: Sequence[Row]) -> Iterator[tuple[Row, Row, str]]:
  """Yields the samples of two runs in pairs, each with its label."""
  if len(samples) == len(others):
    for x, y, (_, number) in zip(samples, others, _numbered(samples), strict=True):
      yield x, y, f"{_problem(x)}, sample {number}"
    return
  # Another number of samples in the file: those of both.
  known = {(sample.get("prompt"), number): sample for sample, number in _numbered(others)}
  for sample, number in _numbered(samples):
    if (key := (sample.get("prompt"), number)) in known:
      yield sample, known[key], f"{_problem(sample)}, sample {number}"


def _numbered(samples: Sequence[Row]) -> Iterator[tuple[Row, int]]:
  counts: Counter = Counter()
  for sample in samples:
    counts[sample.get("prompt")] += 1
    yield sample, counts[sample.get("prompt")]


def _sample_detail(part: LoopPart, a: Row, b: Row, label: str) -> str | None:
  for name in part.fields:
    x, y = a.get(name), b.get(name)
    if name not in a or name not in b or x == y:
      continue
    if name in ("prompt", "answer", "level"):
      return f"{name} {shown(x, limit=40)} and {shown(y, limit=40)}"
    if isinstance(x, list) and isinstance(y, list):
      return f"{label}, {_token_detail(name, a, x, y)}"
    return f"{label}: {'' if name == 'reward' else f'{name} '}{shown(x, limit=40)} and {shown(y, limit=40)}"
  return None


def _token_detail(name: str, sample: Row, x: Sequence[Any], y: Sequence[Any]) -> str:
  """Returns the first token at which two lists of a sample differ."""
  at = next(
    (i for i, (one, other) in enumerate(zip(x, y, strict=False)) if one != other), min(len(x), len(y))
  )
  if at in (len(x), len(y)):
    return f"{len(x)} and {len(y)} tokens"
  text = (
    f" {shown(sample['tokens'][at], limit=20)}"
    if at < len(sample.get("tokens", ())) and name != "token_ids"
    else ""
  )
  field = {"logprobs": "", "token_ids": "id "}.get(name, f"{name} ")
  return f"token {at + 1}{text}: {field}{_number(x[at])} and {_number(y[at])}{_size(x[at], y[at])}"


def _detail(name: str, a: Row, b: Row) -> str:
  x, y = (row.get(name, "absent") for row in (a, b))
  short = lambda value: f"{value[:8]}…" if name.endswith("_sha256") and len(value) > 8 else _number(value)
  return f"{name}: {short(x)} and {short(y)}{_size(x, y)}"


def _number(value: Any) -> str:
  """Formats a value, a float32 with the digits that tell it from the next one."""
  if isinstance(value, float) and is_number(value) and np.float32(value) == value:
    return str(np.float32(value))
  return str(value)


def _size(x: Any, y: Any) -> str:
  """Returns how far apart two numbers are, if they are close enough for rounding."""
  if not (is_number(x) and is_number(y)) or isinstance(x, int) or isinstance(y, int) or x * y <= 0:
    return ""
  bits = np.array([x, y], np.float32).view(np.int32).astype(np.int64)
  apart = int(abs(bits[0] - bits[1]))
  if np.float32(x) != x or np.float32(y) != y or apart > 64:
    return ""
  return f", {apart} unit{'s' if apart != 1 else ''} {_CLOSE}"
