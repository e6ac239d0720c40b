"""The model card of an export: what was trained on what, how well it does, and how to repeat it."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm import __version__, report
from jaxrl_llm.config.fields import FIELDS, flatten
from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.pretrained import where
from jaxrl_llm.report.data import is_number, read_object
from jaxrl_llm.workdir.metrics import read_rows

FIGURE = "learning_curves.png"
_PATHS = ("model.path", "teacher.path", "teacher.paths", "task.path", "task.test_path", "task.data_dir", "reward.model_path", "task.source")


class Exported(NamedTuple):
  """What was exported.

  Attributes:
    rl_step: RL step of the checkpoint.
    is_adapter: Whether the folder holds adapters only.
    base: Folder or file of the base model; None for random first weights.
  """

  rl_step: int
  is_adapter: bool
  base: Path | None


def write_card(folder: Path, workdir: Path, exported: Exported, *, name: str) -> list[str]:
  """Writes `README.md`, the learning curves and `run_config.json` to an exported folder.

  Models and data files are named without their folders, which are of this machine only.

  Args:
    folder: Folder of the export.
    workdir: Folder of the run.
    exported: What was exported.
    name: Title of the card.

  Returns:
    Lines about what the card lacks.
  """
  config, summary = flatten(read_object(workdir / "config.json")), read_object(workdir / "summary.json")
  config = {path: _without_folders(x) if path in _PATHS else x for path, x in config.items()}
  (folder / "run_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
  notes, has_figure = [], True
  try:
    report.write_figure(workdir, folder / FIGURE)
  except (MissingPackageError, FileNotFoundError) as error:
    notes, has_figure = [f"the card has no learning curves: {error}"], False
  evaluated = [row for row in read_rows(workdir / "metrics.jsonl") if row["phase"] == "eval" and row["step"] <= exported.rl_step]
  text = "\n".join([
    *_front_matter(config, exported),
    f"# {name}",
    "",
    _opening(config, exported),
    "",
    *_training(config, summary, exported),
    "",
    *_evaluation(config, evaluated),
    *([f"![Learning curves of the run]({FIGURE})", ""] if has_figure else []),
    *_settings(config),
    *_licence(exported),
  ])  # fmt: skip
  (folder / "README.md").write_text(text, encoding="utf-8")
  return notes


def _front_matter(config: Mapping[str, Any], exported: Exported) -> list[str]:
  licence = licence_of(exported.base)
  values = {
    "library_name": "peft" if exported.is_adapter else "transformers",
    "pipeline_tag": "text-generation",
    **({"license": licence} if licence else {}),
    "tags": ["reinforcement-learning", "jaxrl_llm", str(config.get("objective.name"))],
  }
  # JSON is YAML, and quotes whatever a name holds.
  return ["---", *(f"{name}: {json.dumps(x)}" for name, x in values.items()), "---", ""]


def licence_of(base: Path | None) -> str | None:
  """Returns the licence that the card of the base model names; None if there is none."""
  card = None if base is None or not base.is_dir() else base / "README.md"
  if card is None or not card.is_file():
    return None
  head = re.match(r"---\n(.*?)\n---", card.read_text("utf-8", errors="replace"), re.DOTALL)
  line = head and re.search(r"^license:[ \t]*[\"']?([\w.-]+)[\"']?[ \t]*$", head[1], re.MULTILINE)
  return line[1] if line else None


def _opening(config: Mapping[str, Any], exported: Exported) -> str:
  what = "Low-rank adapters" if exported.is_adapter else "A language model"
  begun = f"of `{where.name_of(exported.base)}`" if exported.is_adapter and exported.base else f"that began as {_base(config, exported)}"
  return (
    f"{what} {begun}, trained by reinforcement learning on `{config.get('task.name')}` with `{config.get('objective.name')}` "
    "in jaxrl_llm."
  )


def _base(config: Mapping[str, Any], exported: Exported) -> str:
  return f"`{where.name_of(exported.base)}`" if exported.base else f"a `{config.get('model.preset')}` with random weights"


def _training(config: Mapping[str, Any], summary: Mapping[str, Any], exported: Exported) -> list[str]:
  seconds, data, commit = summary.get("wall_seconds"), summary.get("data"), commit_of_package()
  problems = f", {data['kept']:,} problems" if isinstance(data, dict) and is_number(data.get("kept")) else ""
  batch = f"{config.get('rollout.num_prompts')} prompts with {config.get('rollout.group_size')} samples each"
  values = {
    "objective": f"`{config.get('objective.name')}`",
    "base model": _base(config, exported),
    "data": f"`{config.get('task.name')}`{problems}",
    "RL steps": f"{exported.rl_step:,}, of {batch}",
    "warm start": f"{summary.get('warm_start_steps', 0):,} supervised steps",
    "tokens learned from": f"{summary['tokens']:,}" if is_number(summary.get("tokens")) else None,
    "hardware": summary.get("device"),
    "wall time of the run": f"{seconds:,.0f} s" if is_number(seconds) else None,
    "software": f"jaxrl_llm {__version__}" + (f", commit `{commit}`" if commit else ""),
    "seed": config.get("seed"),
  }
  return ["| | |", "| --- | --- |", *(f"| {name} | {_cell(x)} |" for name, x in values.items() if x is not None)]


def _cell(value: Any) -> str:
  return " ".join(str(value).split()).replace("|", "\\|")


def _evaluation(config: Mapping[str, Any], rows: list[dict]) -> list[str]:
  measured = [row for row in rows if is_number(row.get("eval/accuracy"))]
  if not measured:
    return ["## Evaluation", "", "Not measured.", ""]
  problems = f"{config.get('eval.num_prompts')} held-out problems of `{config.get('task.test_name') or config.get('task.name')}`"
  lines = ["## Evaluation", "", f"Accuracy on {problems}, the mean over {config.get('eval.samples')} samples of each:", ""]
  lines += ["| RL step | accuracy | interval |", "| --- | --- | --- |"]
  for row in dict.fromkeys((0, len(measured) - 1)):
    low, high = (measured[row].get(f"eval/accuracy_{side}") for side in ("low", "high"))
    interval = f"{low:.1%} to {high:.1%}" if is_number(low) and is_number(high) else ""
    lines.append(f"| {measured[row]['step']:,} | {measured[row]['eval/accuracy']:.1%} | {interval} |")
  return [*lines, ""]


def _settings(config: Mapping[str, Any]) -> list[str]:
  """Lists the fields that differ from the defaults; the file beside the card has all of them."""
  defaults = json.loads(json.dumps({path: field.default for path, field in FIELDS.items()}))
  changed = {path: x for path, x in config.items() if defaults.get(path) != x}
  lines = ["## Config", "", "Fields that differ from jaxrl_llm's defaults; `run_config.json` has all:", ""]
  return [*lines, "| field | value |", "| --- | --- |", *(f"| `{path}` | `{_cell(x)}` |" for path, x in sorted(changed.items())), ""]


def _licence(exported: Exported) -> list[str]:
  if exported.base is None:
    return ["## Licence", "", "Not stated: the weights began at random, so that there is no licence of a base model.", ""]
  licence = licence_of(exported.base)
  known = f"`{licence}`, by the card of the base model." if licence else "Not stated here: the licence of the base model applies."
  return ["## Licence", "", known, ""]


def _without_folders(value: Any) -> Any:
  """Returns a path without its folders, or each path of a list."""
  if isinstance(value, list | tuple):
    return [_without_folders(x) for x in value]
  if not isinstance(value, str) or "/" not in value:
    return value
  name, mark, path = value.partition("=")
  return f"{name}={Path(path).name}" if mark else Path(value).name


def commit_of_package() -> str | None:
  """Returns the commit of the checkout that runs; None if the package is installed elsewhere."""
  root = Path(__file__).resolve().parents[4]
  if not (root / ".git").exists():
    return None
  try:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=True)
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()
