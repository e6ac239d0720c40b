"""Sampler and learner, compared in bits: `python -m experiments.mismatch --config=FILE`

Draws the first rollout batch of a config after its warm start, scores it with the same weights, and
says in which layer and which part of it the numbers begin to differ, if they do. Each part of each
layer has a share: how many of the vectors that the learner computes the sampler has computed, too.

  --config        experiment, as for training; --config.FIELD=VALUE changes a field
  --run           instead: workdir of a finished run, perhaps asynchronous and perhaps killed and
                  resumed. It is repeated, and every token that it has learned from is scored by the
                  learner with the weights that drew it
  --json          file for the numbers
Exit code: 0, 1 if anything differs with config.numerics.exact=True, or 2 for bad input.
"""

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.config import check, command_line, recorded
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.devices import xla_flags
from jaxrl_llm.messages import did_you_mean, refuse

FLAGS = ("run", "json")
_THREADS = 64


class Request(NamedTuple):
  """Checked command line.

  Attributes:
    config: Config of a run that keeps nothing.
    run: Workdir of the run to repeat; None for the first step of the config.
    json: File for the numbers; None for none.
  """

  config: ConfigDict
  run: Path | None
  json: Path | None


def main(argv: Sequence[str]) -> int:
  """Runs a command line and returns its exit code."""
  if {"-h", "--help"} & set(argv):
    print(__doc__)
    return 0
  try:
    request = parse(argv)
    xla_flags.set_flags(exact=request.config.numerics.exact)
    lines, numbers, is_equal = _of_config(request.config) if request.run is None else _of_run(request.config, request.run)
  except (UsageError, ValueError) as error:
    return refuse(error)
  print("\n".join(lines))
  if request.json is not None:
    request.json.write_text(json.dumps(numbers, indent=1) + "\n")
  return 0 if is_equal or not request.config.numerics.exact else 1


def parse(argv: Sequence[str]) -> Request:
  """Parses and checks a command line, before JAX starts.

  Raises:
    UsageError: If a flag, a file, a field or a value is wrong.
  """
  path, overrides, rest = command_line.split(argv)
  given: dict[str, str] = {}
  for argument in rest:
    match = re.fullmatch(r"--?(\w+)=(.+)", argument)
    if not match or match[1] not in FLAGS:
      name = argument.lstrip("-").partition("=")[0]
      known = ", ".join(f"--{flag}" for flag in FLAGS)
      raise UsageError(f"unknown argument {argument!r}{did_you_mean(name, FLAGS)}; expected --config, --config.FIELD or {known}")
    given[match[1]] = match[2]
  if bool(path) == ("run" in given):
    both = "both" if path else "neither"
    raise UsageError(f"--config and --run: found {both}, expected one, as in --config=configs/gspo.py:tiny or --run=runs/gspo")
  file = Path(given["json"]) if "json" in given else None
  if file is not None and not file.absolute().parent.is_dir():
    raise UsageError(f"--json: found no folder {file.absolute().parent}, expected an existing one")
  if "run" in given:
    if overrides:
      raise UsageError(f"config.{next(iter(overrides))}: found with --run, expected none: the run has its own config")
    return Request(_config_of(workdir := Path(given["run"])), workdir, file)
  config = command_line.override(command_line.load(path), overrides)
  config.log.tensorboard, config.log.trackers = False, ()
  for field in ("samplers", "spare_prompts", "staleness"):
    if config.rollout[field]:
      expected = "expected 0 for the first step of a config; --run=WORKDIR compares the steps of a finished run"
      raise UsageError(f"config.rollout.{field}: found {config.rollout[field]}, {expected}")
  if problems := check.config_problems(config):
    raise UsageError("\n".join(problems))
  return Request(config, None, file)


def _config_of(workdir: Path) -> ConfigDict:
  if recorded.saved_config(workdir) is None:
    raise UsageError(f"--run: found no RL run in {workdir}, expected the workdir of one, as in --run=runs/gspo")
  if not (workdir / "summary.json").is_file():
    raise UsageError(f"--run: found a run in {workdir} that has not ended, expected a finished one")
  config = recorded.run_config(workdir)
  if config.rollout.update_in_flight == "keep":
    why = "its keys and values stay those of earlier weights, which no pass of the learner has"
    raise UsageError(f"config.rollout.update_in_flight: found 'keep' in {workdir}, expected 'recompute' or None: {why}")
  # Processes of their own draw the same tokens, and the repetition must not reach a tracker.
  config.rollout.samplers, config.log.trackers = 0, ()
  return config


def _of_config(config: ConfigDict) -> tuple[list[str], dict[str, Any], bool]:
  if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
    # With a thread for each core, devices that wait for each other keep taps from running.
    os.environ.setdefault("PJRT_NPROC", str(_THREADS))
  from experiments.mismatch.first_step import measure  # Late: bad input is refused without JAX.

  numbers = measure(config)
  equal = f"{_share(numbers['equal'])} equal in bits, {_share(numbers['in_update'])} in the first update"
  lines = [
    f"{numbers['responses']} responses, {numbers['tokens']} tokens; log-probabilities: {equal}",
    f"gap in nats: mean {numbers['mean']:.1e}, 99 % below {numbers['p99']:.1e}, largest {numbers['largest']:.1e}",
    *table(numbers["shares"]),
  ]
  return lines, numbers, numbers["equal"] == numbers["in_update"] == 1


def _of_run(config: ConfigDict, workdir: Path) -> tuple[list[str], dict[str, Any], bool]:
  from experiments.mismatch.versions import repeat  # Late: bad input is refused without JAX.

  numbers = repeat(config, workdir)
  equal = lambda row: f"log-probabilities {_share(row['equal'])} equal in bits, largest gap {row['largest']:.1e} nats"
  lines = [f"lag {row['lag']}: {row['tokens']} tokens, {equal(row)}" for row in numbers["lags"]]
  lines.append(f"responses drawn by several versions of the weights: {numbers['several']}")
  lines.append(f"rows, samples and weights that differ from those of {workdir}: {numbers['differing']}")
  return lines, numbers, not numbers["differing"] and all(row["equal"] == 1 for row in numbers["lags"])


def table(shares: Sequence[dict[str, Any]]) -> list[str]:
  """Returns lines that say where the first vector differs, and a table with a row for each layer.

  Args:
    shares: Shares in the order of their computation; see `vectors.Share`.

  Example:
    >>> share = lambda part, layer, equal: {"part": part, "layer": layer, "equal": equal, "count": 200}
    >>> behind = [share("last norm", 1, 0.5), share("logits of equal states", 1, 1.0)]
    >>> print(*table([share("norm 1", 0, 1.0), share("attention", 0, 0.995), *behind]), sep="\\n")
    first difference: attention of layer 0, in 0.50 % of 200 vectors
    layer norm 1 attention
        0    100     99.50
    last norm 50.00, logits of equal states 100
  """
  *of_layers, last, logits = shares
  differing = [x for x in shares if x["equal"] < 1]
  lines = ["first difference: none"]
  if differing:
    first = differing[0]
    where = first["part"] + (f" of layer {first['layer']}" if first in of_layers else "")
    lines = [f"first difference: {where}, in {_share(1 - first['equal'])} of {first['count']} vectors"]
  parts = list(dict.fromkeys(x["part"] for x in of_layers))
  lines.append(" ".join(["layer", *parts]))
  for layer in dict.fromkeys(x["layer"] for x in of_layers):
    own = {x["part"]: _number(x["equal"]) for x in of_layers if x["layer"] == layer}
    lines.append(" ".join([f"{layer:5}", *(f"{own.get(part, ''):>{len(part)}}" for part in parts)]))
  return [*lines, f"last norm {_number(last['equal'])}, {logits['part']} {_number(logits['equal'])}"]


def _number(share: float) -> str:
  """Returns percents, with 100 for nothing but all of them, and - for a share of nothing."""
  if math.isnan(share):
    return "-"
  return "100" if share == 1 else f"{min(100 * share, 99.99):.2f}"


def _share(share: float) -> str:
  return f"{_number(share)} %"


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
