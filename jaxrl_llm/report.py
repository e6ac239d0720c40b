"""One HTML page of a run, and one figure: `python -m jaxrl_llm.report WORKDIR`.

The page is a single file that opens without a network: styles, scripts and data are inside it. It can be made at any time, also while the
run goes on; whatever is missing yet is left out. Model output is data, never HTML: it is embedded as JSON in which no tag can begin, the
page shows it with `textContent` only, and its content security policy allows no script but the page's own.
"""

import argparse
import base64
import hashlib
import json
import math
import os
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

SOURCES = ("metrics.jsonl", "samples.jsonl", "config.json", "summary.json")
"""The files a report is made from. Each may be missing, but not all."""

MAX_ROWS = 4000
"""Metric rows of one phase that the page holds; of more, every k-th."""

MAX_SAMPLES = 2000
"""Rollouts that the page holds; of more, a random choice that is always the same."""

MAX_TOKENS = 400_000
"""Tokens whose numbers the page holds for the heat-map, in all rollouts together."""

MAX_CHARS = 20_000
"""Characters of one text that the page holds."""

_TOKEN_FIELDS = ("tokens", "token_ids", "logprobs", "ratio", "clipped")
_SCRIPTS = ("charts.js", "panels.js", "rollouts.js", "page.js")


def write_report(workdir: str | os.PathLike) -> Path:
  """Writes `workdir/report.html`, replacing an older one in one step.

  Args:
    workdir: a run's folder, finished or not.

  Returns:
    The page's path.

  Raises:
    FileNotFoundError: `workdir` does not exist or holds none of `SOURCES`.
  """
  workdir = Path(workdir)
  page = _page(report_data(workdir))
  temporary = workdir / "report.html.tmp"
  temporary.write_text(page, encoding="utf-8")
  os.replace(temporary, workdir / "report.html")
  return workdir / "report.html"


def report_data(workdir: str | os.PathLike) -> dict[str, Any]:
  """Everything the page shows, as strict JSON values.

  Returns:
    `header`, `phases` (columns of numbers by metric name), `samples`, `config` (flat, by dotted name), `versions`, and `notes`: one
    sentence for everything that was thinned to keep the page quick.

  Raises:
    FileNotFoundError: as for `write_report`.
  """
  workdir = Path(workdir)
  if not any((workdir / name).is_file() for name in SOURCES):
    raise FileNotFoundError(f"{workdir}: not a run's folder (none of {', '.join(SOURCES)} is there)")
  summary, config = _read_object(workdir / "summary.json"), _flat(_read_object(workdir / "config.json"))
  rows, samples, notes = _read_rows(workdir / "metrics.jsonl"), _read_rows(workdir / "samples.jsonl"), []
  phases = {}
  for phase in sorted({row["phase"] for row in rows}):
    phases[phase] = _columns(_thin_rows([row for row in rows if row["phase"] == phase], phase, notes))
  data = {
    "header": _header(summary, config, rows, workdir),
    "phases": phases,
    "samples": _thin_samples(samples, notes),
    "config": config,
    "versions": summary.get("versions") or {},
    "notes": notes,
  }
  return _strict(data)


def write_figure(workdir: str | os.PathLike, path: str | os.PathLike) -> Path:
  """Draws the run's learning curves, two rows of three panels, as a PNG for a README or a paper.

  Args:
    workdir: a run's folder.
    path: the image to write; the ending says the format (.png, .pdf, .svg).

  Returns:
    `path`.

  Raises:
    FileNotFoundError: `workdir` has no metrics.
    ImportError: matplotlib is not installed.
  """
  try:
    from matplotlib import rc_context  # Lazy: an optional dependency.
    from matplotlib.figure import Figure  # Not pyplot: no global state, no display.
  except ImportError as error:
    raise ImportError("the figure needs matplotlib: pip install 'jaxrl-llm[logging]'") from error
  rows = _read_rows(Path(workdir) / "metrics.jsonl")
  if not rows:
    raise FileNotFoundError(f"{Path(workdir) / 'metrics.jsonl'}: no metrics to draw")
  style = {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False}
  style |= {"axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e8eb", "grid.linewidth": 0.8, "axes.edgecolor": "#8a919c"}
  style |= {"axes.axisbelow": True, "lines.linewidth": 1.6, "legend.frameon": False, "legend.fontsize": 8, "svg.hashsalt": "jaxrl_llm"}
  with rc_context(style):
    figure = Figure(figsize=(10.5, 5.4), dpi=160, layout="constrained")
    for axes, panel in zip(figure.subplots(2, 3).flat, _panels(rows), strict=True):
      _draw_panel(axes, *panel)
    figure.savefig(path)
  return Path(path)


def _panels(rows: Sequence[Mapping[str, Any]]) -> list[tuple]:
  """Title, rows, lines as (label, metric name) and the band of each panel."""
  rl, evals = ([row for row in rows if row["phase"] == phase] for phase in ("rl", "eval"))
  gate = ("Soft gate", rl, (("positive advantage", "sapo/gate_pos"), ("negative advantage", "sapo/gate_neg")), None)
  clip = ("Clip fraction", rl, (("", "actor/pg_clipfrac"),), None)
  return [
    ("Held-out accuracy", evals, (("", "eval/accuracy"),), ("eval/accuracy_low", "eval/accuracy_high")),
    ("Reward", rl, (("", "critic/rewards/mean"),), None),
    ("Entropy (nats)", rl, (("", "actor/entropy"),), None),
    gate if any("sapo/gate_pos" in row for row in rl) else clip,
    ("Response length (tokens)", rl, (("mean", "response_length/mean"), ("max", "response_length/max")), None),
    ("Importance ratio", rl, (("99th percentile", "ratio/p99"), ("mean", "ratio/mean")), None),
  ]


def _draw_panel(axes: Any, title: str, rows: Sequence[Mapping], lines: Sequence[tuple[str, str]], band: tuple[str, str] | None) -> None:
  axes.set_title(title)
  axes.set_xlabel("RL step")
  drawn = False
  for (label, name), color in zip(lines, ("#2563b8", "#d9730d"), strict=False):
    steps, values = _series(rows, name)
    if not steps:
      continue
    drawn = True
    axes.plot(steps, values, color=color, label=label or None, marker="o" if len(steps) < 25 else None, markersize=3.5)
    bounded = [row for row in rows if all(isinstance(row.get(bound), int | float) for bound in band)] if band else []
    if bounded:
      low, high = ([row[bound] for row in bounded] for bound in band)
      axes.fill_between([row["step"] for row in bounded], low, high, color=color, alpha=0.16, linewidth=0, label="interval")
  if title == "Held-out accuracy":
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
  if not drawn:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#8a919c")
  elif axes.get_legend_handles_labels()[1]:
    axes.legend()


def _series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
  """Steps and values where the metric is a number."""
  points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
  return [step for step, _ in points], [value for _, value in points]


def _header(summary: Mapping[str, Any], config: Mapping[str, Any], rows: Sequence[Mapping], workdir: Path) -> dict[str, Any]:
  """What the head of the page says: the summary, and before there is one, what the rows so far tell."""
  accuracies = _series((row for row in rows if row["phase"] == "eval"), "eval/accuracy")[1]
  steps = [row["step"] for row in rows if row["phase"] == "rl"]
  memory = _series(rows, "perf/max_memory_allocated_gb")[1]
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


def _page(data: Mapping[str, Any]) -> str:
  """The page: template, styles, scripts and data in one string."""
  assets = resources.files("jaxrl_llm") / "report_assets"
  script = "\n".join((assets / name).read_text("utf-8") for name in _SCRIPTS)
  style = (assets / "page.css").read_text("utf-8")
  parts = {
    "{{script_hash}}": _hash(script),
    "{{style_hash}}": _hash(style),
    "{{style}}": style,
    "{{script}}": script,
    "{{data}}": embed_json(data),
  }
  page = (assets / "page.html").read_text("utf-8")
  # One pass, so that nothing in the data can be taken for a placeholder.
  return re.sub(r"{{\w+}}", lambda mark: parts[mark[0]], page)


def _hash(text: str) -> str:
  """The hash by which the content security policy knows the page's own script and style."""
  return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embed_json(value: Any) -> str:
  """JSON that can stand in an HTML script element: no tag or comment can begin in it, and it is plain ASCII.

  Example:
    >>> embed_json({"response": "</script><!--"})
    '{"response":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
  """
  text = json.dumps(value, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _strict(value: Any) -> Any:
  """Numbers that are not finite as None; files that others wrote may hold them."""
  if isinstance(value, dict):
    return {str(name): _strict(item) for name, item in value.items()}
  if isinstance(value, list):
    return [_strict(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested settings by dotted name."""
  flat = {}
  for name, value in tree.items():
    flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
  return flat


def _read_rows(path: Path) -> list[dict[str, Any]]:
  """Rows of a `.jsonl` file, also while a run writes it; a line that is no row, as a torn last one, is passed over."""
  rows = []
  for line in path.read_bytes().split(b"\n") if path.is_file() else ():
    try:
      row = json.loads(line)
    except ValueError:
      continue
    if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("phase"), str):
      rows.append(row)
  return rows


def _read_object(path: Path) -> dict[str, Any]:
  """A JSON object; empty where the file is missing, half written or something else."""
  try:
    value = json.loads(path.read_bytes())
  except (OSError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}


def main(argv: Sequence[str] | None = None) -> int:
  """Command line: writes the page, and with --figure the figure. Returns the exit status."""
  parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.report", description="Writes WORKDIR/report.html.")
  parser.add_argument("workdir", metavar="WORKDIR", help="a run's folder")
  parser.add_argument("--figure", metavar="PATH", help="also draw the learning curves (.png, .pdf or .svg)")
  args = parser.parse_args(argv)
  try:
    print(write_report(args.workdir))
    if args.figure:
      print(write_figure(args.workdir, args.figure))
  except (OSError, ImportError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
