"""The data of a run's page, read from its files and thinned to keep the page fast."""

import json
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.report.page import strict
from jaxrl_llm.workdir import metrics, owner

SOURCES = ("metrics.jsonl", "samples.jsonl", "config.json", "summary.json")
"""Files from which a report is made. At least one of them must exist."""

MAX_ROWS = 4000
"""Maximum number of metric rows per phase on the page. From more rows, every k-th is taken."""

MAX_SAMPLES = 2000
"""Maximum number of rollouts on the page. From more, a reproducible random choice is taken."""

MAX_TOKENS = 250_000
"""Maximum number of tokens with a heat-map on the page, over all rollouts."""

MAX_PICTURES = 8_000_000
"""Maximum number of characters of all pictures on the page."""

MAX_CHARS = 20_000
"""Maximum number of characters of a text on the page."""

_TOKEN_FIELDS = ("tokens", "token_ids", "logprobs", "log_ratio", "gate_weight", "entropy", "written", "blame/loss", "blame/share")


def report_data(workdir: str | os.PathLike) -> dict[str, Any]:
  """Reads the data of a run's page as strict JSON values.

  Returns:
    `header`, `phases` (columns of numbers by metric name), `samples`, `config` (flat, by dotted
    name), `versions`, and `notes`, with one sentence for each part that was thinned to keep the
    page fast.

  Raises:
    FileNotFoundError: If `workdir` does not exist or holds none of `SOURCES`.
  """
  workdir = Path(workdir)
  if not any((workdir / name).is_file() for name in SOURCES):
    raise FileNotFoundError(f"{workdir}: not the folder of a run (none of {', '.join(SOURCES)} exists)")
  summary, config = read_object(workdir / "summary.json"), flatten(read_object(workdir / "config.json"))
  rows, samples, notes = metrics.read_rows(workdir / "metrics.jsonl"), metrics.read_rows(workdir / "samples.jsonl"), []
  names = sorted({row["phase"] for row in rows})
  data = {
    "header": _header(summary, config, rows, workdir),
    "phases": {phase: _columns(_thin_rows([row for row in rows if row["phase"] == phase], phase, notes)) for phase in names},
    "samples": _thin_samples(samples, notes),
    "config": config,
    "versions": summary.get("versions") or {},
    "notes": notes,
  }
  return strict(data)


def _header(summary: Mapping[str, Any], config: Mapping[str, Any], rows: Sequence[Mapping], workdir: Path) -> dict[str, Any]:
  """Returns the head of the page: the summary, completed from the rows and the config."""
  accuracies = series((row for row in rows if row["phase"] == "eval"), "eval/accuracy")[1]
  steps = [row["step"] for row in rows if row["phase"] == "rl"]
  memory = series(rows, "perf/max_memory_allocated_gb")[1]
  status, alive = summary.get("status"), owner.is_alive(workdir)
  if status in (None, "running") and alive is not None:
    # A process that was killed could not write that it ends.
    status = "running" if alive else "died: its process is gone"
  derived = {
    "objective": config.get("objective.name"),
    "accuracy_start": accuracies[0] if accuracies else None,
    "accuracy_final": accuracies[-1] if accuracies else None,
    "num_steps": max(steps, default=0),
    "peak_memory_gb": max(memory, default=None),
  }
  known = {name: value for name, value in summary.items() if value is not None and name != "versions"}
  model = config.get("model.path") or config.get("model.preset")
  fixed = {"planned_steps": config.get("num_steps"), "task": config.get("task.name"), "model": model}
  return derived | known | fixed | {"status": status or "no summary yet"} | {"workdir": workdir.resolve().name}


def is_number(value: Any) -> bool:
  """Returns whether a value is a finite number, the only kind in strict JSON."""
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
  """Returns the steps and values of the rows in which the metric is a finite number."""
  points = [(row["step"], row[name]) for row in rows if is_number(row.get(name))]
  return [step for step, _ in points], [value for _, value in points]


def _thin_rows(rows: list[dict], phase: str, notes: list[str]) -> list[dict]:
  stride = math.ceil(len(rows) / MAX_ROWS)
  if stride <= 1:
    return rows
  notes.append(f"Curves of {phase} show one of every {stride} rows, {len(rows):,} in all; metrics.jsonl has all rows.")
  # Counted back from the last row, so that the newest value is always shown.
  return rows[::-1][::stride][::-1]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
  """Converts rows to columns of numbers, with None for missing ones.

  Six digits are more than a screen can show.
  """
  names = {name: None for row in rows for name, value in row.items() if isinstance(value, int | float) and name != "step"}
  columns: dict[str, list] = {"step": [row["step"] for row in rows]}
  for name in names:
    values = [row.get(name) for row in rows]
    columns[name] = [float(f"{value:.6g}") if isinstance(value, int | float) else None for value in values]
  return columns


def _thin_samples(samples: list[dict], notes: list[str]) -> list[dict]:
  # A stride that divides the group size would always show the same samples of a group. The choice
  # is therefore random, and seeded to give the same page each time.
  choose = random.Random(0)
  if len(samples) > MAX_SAMPLES:
    notes.append(
      f"{MAX_SAMPLES:,} of {len(samples):,} rollouts are shown, chosen at random; samples.jsonl has all of them."
    )
    samples = [samples[i] for i in sorted(choose.sample(range(len(samples)), MAX_SAMPLES))]
  sizes = [max((len(row[name]) for name in _TOKEN_FIELDS if isinstance(row.get(name), list)), default=0) for row in samples]
  budget, with_tokens = MAX_TOKENS, set()
  for i in choose.sample(range(len(samples)), len(samples)) if sum(sizes) > MAX_TOKENS else range(len(samples)):
    if sizes[i] <= budget:
      budget -= sizes[i]
      with_tokens.add(i)
  if len(with_tokens) < len(samples):
    notes.append(
      f"{len(with_tokens):,} of {len(samples):,} rollouts have a token heat-map; samples.jsonl has all of them."
    )
  of_samples = [_pictures(row) for row in samples]
  chars, with_pictures = MAX_PICTURES, set()
  for i in choose.sample(range(len(samples)), len(samples)):
    if of_samples[i] and sum(map(len, of_samples[i])) <= chars:
      chars -= sum(map(len, of_samples[i]))
      with_pictures.add(i)
  if len(with_pictures) < (shown := sum(map(bool, of_samples))):
    notes.append(f"{len(with_pictures):,} of {shown:,} rollouts with pictures show them; samples.jsonl has all of them.")
  rows = [
    thin_sample(row, keep_tokens=i in with_tokens) | ({"images": of_samples[i]} if i in with_pictures else {})
    for i, row in enumerate(samples)
  ]
  if num_cut := sum(
    any(isinstance(row.get(name), str) and len(row[name]) > MAX_CHARS for name in ("prompt", "response", "answer"))
    for row in samples
  ):
    notes.append(f"Texts of more than {MAX_CHARS:,} characters are cut, in {num_cut:,} rollouts.")
  return rows


def _pictures(row: Mapping[str, Any]) -> list[str]:
  """Returns the small copies of a sample's pictures."""
  images = row.get("images")
  return [x for x in images if isinstance(x, str) and x.startswith("data:image/")] if isinstance(images, list) else []


def thin_sample(row: Mapping[str, Any], *, keep_tokens: bool, digits: int = 4) -> dict[str, Any]:
  """Returns a row of `samples.jsonl` for the page, without its pictures.

  Args:
    row: The row.
    keep_tokens: Whether it keeps its tokens and their numbers.
    digits: Number of significant digits of the tokens' numbers.
  """
  out = {}
  for name, value in row.items():
    if isinstance(value, str) and len(value) > MAX_CHARS:
      out[name] = f"{value[:MAX_CHARS]} … ({len(value) - MAX_CHARS:,} more characters)"
    elif name == "images":
      continue
    elif name not in _TOKEN_FIELDS:
      out[name] = value
    elif keep_tokens and isinstance(value, list):
      out[name] = [float(f"{item:.{digits}g}") if isinstance(item, float) else item for item in value]
  return out


def read_object(path: Path) -> dict[str, Any]:
  """Reads a JSON object. The result is empty if the file is missing, incomplete or no object."""
  try:
    value = json.loads(path.read_bytes())
  except (OSError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}
