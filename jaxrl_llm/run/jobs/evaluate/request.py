"""The user's request: arguments, config and metrics, checked before JAX starts."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from jaxrl_llm.config import check, command_line, recorded
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.config.fields import FIELDS, flatten, unread_defaults
from jaxrl_llm.evaluation import MetricName, SampleRow, parse_metric, read_samples
from jaxrl_llm.run.setup import source as source_lib
from jaxrl_llm.run.setup.source import Source, judged_by_the_verifier
from jaxrl_llm.workdir.bucket.address import is_address

_FLAGS = "--config=FILE[:ARGUMENT], --config.FIELD=VALUE, --checkpoint, --metrics, --samples, --out and --regrade"


class EvaluationRequest(NamedTuple):
  """A requested evaluation.

  Attributes:
    config: Resolved config; `eval.samples` is the number of samples that the metrics need.
    source: Source of the weights.
    metrics: Metrics to report, in this order; None for those that a run logs, and a majority if the
      verifier reads answers.
    samples: File of samples to write.
    out: File of results to write.
    regrade: Rows to grade again; None to sample.
    regraded: File that these rows come from; None to sample.
    given: Address of the weights if they are in a bucket, to which the results are sent.
  """

  config: ConfigDict
  source: Source
  metrics: tuple[MetricName, ...] | None
  samples: Path
  out: Path
  regrade: list[SampleRow] | None = None
  regraded: Path | None = None
  given: str | None = None


def parse(argv: Sequence[str]) -> EvaluationRequest:
  """Parses a command line, which begins with the program's name.

  Raises:
    UsageError: If it has any error that can be known without devices.
  """
  path, overrides, rest = command_line.split(argv[1:])
  values = flags.FlagValues()
  for name in ("checkpoint", "metrics", "samples", "out", "regrade"):
    flags.DEFINE_string(name, None, "See the usage.", flag_values=values)
  try:
    strays = values([argv[0], *rest])[1:]
  except flags.Error as error:
    raise UsageError(f"{error}; flags are {_FLAGS}") from error
  if strays:
    raise UsageError(f"unknown argument {strays[0]!r}, expected flags only: {_FLAGS}")
  source = source_lib.find(values.checkpoint)
  config = _config(path, overrides, source)
  rows = None if values.regrade is None else _rows(Path(values.regrade))
  metrics = _metrics(config, values.metrics, overrides, rows)
  if problems := check.config_problems(config):
    raise UsageError("\n".join(problems))
  folder, stem = _folder(config, source, path, overrides), "samples"
  if rows is not None:
    folder, stem = Path(values.regrade).parent, f"{Path(values.regrade).stem}.regraded"
  return EvaluationRequest(
    config=config,
    source=source,
    metrics=None if values.metrics is None else metrics,
    samples=Path(values.samples or folder / f"{stem}.jsonl"),
    out=Path(values.out or folder / ("eval.json" if rows is None else f"{stem}.json")),
    regrade=rows,
    regraded=values.regrade and Path(values.regrade),
    given=re.sub(r"@[0-9]+$", "", values.checkpoint) if is_address(values.checkpoint) else None,
  )


def _config(path: str, overrides: dict[str, list[str]], source: Source) -> ConfigDict:
  if path:
    config = command_line.load(path)
    if missing := [field for field in FIELDS if field not in flatten(config)]:
      raise UsageError(f"--config={path}: found no {missing[0]}, expected the config of a policy, made by configs.common")
  elif source.kind == "run":
    config = recorded.run_config(source.path)
  else:
    raise UsageError(
      f"--config is missing; for instance --config=configs/gspo.py (available: {command_line.available()}); only a "
      "run has its own config"
    )
  config = judged_by_the_verifier(command_line.override(config, overrides))
  if source.kind == "run":
    source_lib.refuse_other_model(config, source.path)
  if source.kind == "files":
    config.model.path = str(source.path)
    config.update_from_flattened_dict(unread_defaults(config))
  return config


def _rows(path: Path) -> list[SampleRow]:
  try:
    rows = read_samples(path)
  except OSError as error:
    raise UsageError(f"--regrade={path}: {error.strerror or error}; expected a file of samples that an evaluation wrote") from error
  except ValueError as error:
    raise UsageError(f"--regrade={error}") from error
  if not rows:
    raise UsageError(f"--regrade={path}: found no samples, expected a file of samples that an evaluation wrote")
  return rows


def _metrics(
  config: ConfigDict, text: str | None, overrides: dict[str, list[str]], rows: list[SampleRow] | None
) -> tuple[MetricName, ...]:
  """Returns the requested metrics, or the config's.

  `config.eval.samples` becomes the largest n that is asked for.
  """
  try:
    metrics = tuple(parse_metric(name.strip()) for name in (text.split(",") if text is not None else config.eval.metrics))
  except ValueError as error:
    problem = error.args[0]._replace(field="config.eval.metrics" if text is None else "--metrics")
    cut = text is not None and "pass@k:k=" in text and "&" not in text
    raise UsageError(f"{problem}; quote the argument, because shells interpret &" if cut else str(problem)) from error
  largest = config.eval.samples if text is None else max(metric.n for metric in metrics)
  if rows is not None:
    there = 1 + max(row.sample for row in rows)
    if text is not None and largest > there:
      raise UsageError(
        f"--metrics: found n={largest}, expected at most {there}, the number of samples per problem in the file"
      )
    metrics, largest = tuple(metric for metric in metrics if metric.n <= there), there
  elif "eval.samples" in overrides and largest != config.eval.samples:
    raise UsageError(
      f"--config.eval.samples: found {config.eval.samples} with --metrics up to n={largest}, expected only one of the "
      "two, because n sets the number of samples"
    )
  config.eval.samples, config.eval.metrics = largest, tuple(map(str, metrics))
  return metrics


def _folder(config: ConfigDict, source: Source, path: str, overrides: dict[str, list[str]]) -> Path:
  """Returns the default folder of the results: beside the run, or in ./evaluations."""
  settings = {field: ",".join(texts) for field, texts in overrides.items() if field not in ("task.test_name", "eval.samples")}
  task = re.sub(r"[^A-Za-z0-9._-]", "_", config.task.test_name or config.task.name)
  tail = f"n{config.eval.samples}{command_line.suffix(settings)}"
  if source.kind == "run":
    return source.path / "evaluations" / f"{task}-checkpoint-{source.step}-{tail}"
  weights = Path(str(source.path).rpartition(":")[2]).name if source.path else Path(path.split(":")[0]).stem
  return Path("evaluations") / f"{task}-{weights}-{tail}"
