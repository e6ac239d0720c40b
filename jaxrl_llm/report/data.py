"""What the page of a run shows, read from its files and thinned to what a browser takes quickly."""

import json
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.report.page import strict
from jaxrl_llm.workdir import metrics

SOURCES = ("metrics.jsonl", "samples.jsonl", "config.json", "summary.json")
"""The files a report is made from. Each may be missing, but not all."""

MAX_ROWS = 4000
"""Metric rows of one phase that the page holds; of more, every k-th."""

MAX_SAMPLES = 2000
"""Rollouts that the page holds; of more, a random choice that is always the same."""

MAX_TOKENS = 250_000
"""Tokens whose numbers the page holds for the heat-map, in all rollouts together."""

MAX_CHARS = 20_000
"""Characters of one text that the page holds."""

_TOKEN_FIELDS = ("tokens", "token_ids", "logprobs", "log_ratio", "gate_weight", "entropy", "written")


def report_data(workdir: str | os.PathLike) -> dict[str, Any]:
  """Everything the page shows, as strict JSON values.

  Returns:
    `header`, `phases` (columns of numbers by metric name), `samples`, `config` (flat, by dotted name), `versions`, and `notes`: one
    sentence for everything that was thinned to keep the page quick.

  Raises:
    FileNotFoundError: `workdir` does not exist or holds none of `SOURCES`.
  """
  workdir = Path(workdir)
  if not any((workdir / name).is_file() for name in SOURCES):
    raise FileNotFoundError(f"{workdir}: not a run's folder (none of {', '.join(SOURCES)} is there)")
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
  """What the head of the page says: the summary, and before there is one, what the rows so far tell."""
  accuracies = series((row for row in rows if row["phase"] == "eval"), "eval/accuracy")[1]
  steps = [row["step"] for row in rows if row["phase"] == "rl"]
  memory = series(rows, "perf/max_memory_allocated_gb")[1]
  derived = {
    "status": "no summary yet",
    "objective": config.get("objective.name"),
    "accuracy_start": accuracies[0] if accuracies else None,
    "accuracy_final": accuracies[-1] if accuracies else None,
    "num_steps": max(steps, default=0),
    "peak_memory_gb": max(memory, default=None),
  }
  known = {name: value for name, value in summary.items() if value is not None and name != "versions"}
  model = config.get("model.path") or config.get("model.preset")
  fixed = {"planned_steps": config.get("num_steps"), "task": config.get("task.name"), "model": model}
  return derived | known | fixed | {"workdir": workdir.resolve().name}


def is_number(value: Any) -> bool:
  """Whether a value is a finite number, as strict JSON has them."""
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
  """Returns steps and values of the rows in which the metric is a number."""
  points = [(row["step"], row[name]) for row in rows if is_number(row.get(name))]
  return [step for step, _ in points], [value for _, value in points]


def _thin_rows(rows: list[dict], phase: str, notes: list[str]) -> list[dict]:
  stride = math.ceil(len(rows) / MAX_ROWS)
  if stride <= 1:
    return rows
  notes.append(f"Curves of {phase} show one of every {stride} rows, {len(rows):,} in all; metrics.jsonl has every row.")
  # Counted back from the last row, so that the newest value is always there.
  return rows[::-1][::stride][::-1]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
  """Rows as columns of numbers, with None where a row lacks one. Six digits are more than a screen can show."""
  names = {name: None for row in rows for name, value in row.items() if isinstance(value, int | float) and name != "step"}
  columns: dict[str, list] = {"step": [row["step"] for row in rows]}
  for name in names:
    values = [row.get(name) for row in rows]
    columns[name] = [float(f"{value:.6g}") if isinstance(value, int | float) else None for value in values]
  return columns


def _thin_samples(samples: list[dict], notes: list[str]) -> list[dict]:
  # Random, not every k-th: a stride that meets the group size would always show the same place of the group. Seeded: same page each time.
  choose = random.Random(0)
  if len(samples) > MAX_SAMPLES:
    notes.append(f"{MAX_SAMPLES:,} of {len(samples):,} rollouts are shown, chosen at random; samples.jsonl has all.")
    samples = [samples[i] for i in sorted(choose.sample(range(len(samples)), MAX_SAMPLES))]
  sizes = [max((len(row[name]) for name in _TOKEN_FIELDS if isinstance(row.get(name), list)), default=0) for row in samples]
  budget, with_tokens = MAX_TOKENS, set()
  for i in choose.sample(range(len(samples)), len(samples)) if sum(sizes) > MAX_TOKENS else range(len(samples)):
    if sizes[i] <= budget:
      budget -= sizes[i]
      with_tokens.add(i)
  if len(with_tokens) < len(samples):
    notes.append(f"{len(with_tokens):,} of {len(samples):,} rollouts have a token heat-map; samples.jsonl has all.")
  rows = [_thin_sample(row, keep_tokens=i in with_tokens) for i, row in enumerate(samples)]
  if cut := sum(any(isinstance(row.get(n), str) and len(row[n]) > MAX_CHARS for n in ("prompt", "response", "answer")) for row in samples):
    notes.append(f"Texts longer than {MAX_CHARS:,} characters are cut, in {cut:,} rollouts.")
  return rows


def _thin_sample(row: Mapping[str, Any], *, keep_tokens: bool) -> dict[str, Any]:
  out = {}
  for name, value in row.items():
    if isinstance(value, str) and len(value) > MAX_CHARS:
      out[name] = f"{value[:MAX_CHARS]} … ({len(value) - MAX_CHARS:,} more characters)"
    elif name not in _TOKEN_FIELDS:
      out[name] = value
    elif keep_tokens and isinstance(value, list):
      out[name] = [float(f"{item:.4g}") if isinstance(item, float) else item for item in value]
  return out


def read_object(path: Path) -> dict[str, Any]:
  """A JSON object; empty where the file is missing, half written or something else."""
  try:
    value = json.loads(path.read_bytes())
  except (OSError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}
