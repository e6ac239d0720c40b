"""Noise and bias of the gradients of stale data: `python -m experiments.gradients --config=FILE`

Draws responses with a policy, trains the policy for a few RL steps, and measures for each objective
what one of those old responses tells the new policy: how noisy its gradient is, how much of it is
signal, and how far their mean is from the policy gradient of fresh responses.

  --config        experiment, as for training; --config.FIELD=VALUE changes a field. Its model, task
                  and sampling settings draw the responses, and its objective trains between
  --objectives    names, settings in parentheses, or import paths: "grpo,gspo(clip_high=0.01),
                  my_module:my_objective". Default: grpo,gspo,sapo
  --checkpoint    weights that draw the responses: WORKDIR or WORKDIR@NUMBER of a run of the same
                  model. Default: the policy after the config's warm start
  --steps         RL steps between drawing and measuring, each with learner.updates_per_rollout
                  updates. Default: 1
  --responses     responses to measure, at least; whole rollout batches are drawn. Default: 256
  --parts         splits of the tokens to measure as well: halves (early and late in a response),
                  frequency (rare and frequent tokens), clip (the gradient without a ratio of the
                  tokens that an objective leaves out, and of the others)
  --project       dimensions of random projections of the mean gradients, for large models. Default:
                  0, no projection
  --at_once       responses whose gradients are computed at a time. Default: 1
  --json          file for the rows
A KL penalty is off unless an objective sets kl_coef. Exit code: 0, or 2 for bad input.
"""

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.config import check, command_line
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.messages import did_you_mean, refuse
from jaxrl_llm.run.setup import source

FLAGS = {"objectives": "grpo,gspo,sapo", "checkpoint": "", "steps": "1", "responses": "256", "parts": "", "project": "0"}
FLAGS |= {"at_once": "1", "json": ""}
LEAST = {"steps": 0, "responses": 2, "project": 0, "at_once": 1}
PARTS = ("halves", "frequency", "clip")
READ = frozenset({"old_logprobs", "sampler_logprobs", "entropy", "groups"})
"""What objectives may read whatever the config computes."""


class Request(NamedTuple):
  """Checked command line; the other attributes are its flags.

  Attributes:
    config: Checked config of a run that keeps nothing.
  """

  config: ConfigDict
  objectives: list[str]
  checkpoint: str
  steps: int
  responses: int
  parts: list[str]
  project: int
  at_once: int
  json: str


def main(argv: Sequence[str]) -> int:
  """Runs a command line and returns its exit code."""
  if {"-h", "--help"} & set(argv):
    print(__doc__)
    return 0
  try:
    report(run(parse(argv)))
  except (UsageError, ValueError) as error:
    return refuse(error)
  return 0


def parse(argv: Sequence[str]) -> Request:
  """Parses and checks a command line, before JAX starts.

  Raises:
    UsageError: If a flag, a file, a field or a value is wrong.
  """
  path, overrides, rest = command_line.split(argv)
  given: dict[str, Any] = dict(FLAGS)
  for argument in rest:
    match = re.fullmatch(r"--?(\w+)=(.*)", argument)
    if not match or match[1] not in FLAGS:
      name = argument.lstrip("-").partition("=")[0]
      known = ", ".join(f"--{flag}" for flag in FLAGS)
      hint = did_you_mean(name, FLAGS)
      raise UsageError(f"unknown argument {argument!r}{hint}; expected --config, --config.FIELD or {known}, as in --steps=2")
    given[match[1]] = match[2]
  if not path:
    raise UsageError("--config is missing, expected one as in --config=configs/gspo.py:tiny")
  for name, least in LEAST.items():
    if not given[name].isdecimal() or int(given[name]) < least:
      raise UsageError(f"--{name}: found {given[name]!r}, expected a whole number of at least {least}")
    given[name] = int(given[name])
  given["objectives"], given["parts"] = split(given["objectives"]), split(given["parts"])
  if not given["objectives"]:
    raise UsageError("--objectives: found none, expected names as in grpo,gspo,sapo")
  for part in given["parts"]:
    if part not in PARTS:
      raise UsageError(f"--parts: found {part!r}, expected some of {','.join(PARTS)}")
  config = command_line.override(command_line.load(path), overrides)
  config.log.tensorboard, config.log.trackers = False, ()
  config.learner.skip_zero_advantages = False  # Responses without a gradient count, too.
  if config.rollout.staleness or config.rollout.spare_prompts or config.rollout.samplers:
    wrong = next(field for field in ("samplers", "spare_prompts", "staleness") if config.rollout[field])
    apart = "the policy that draws and the one that is measured are --steps apart"
    raise UsageError(f"config.rollout.{wrong}: found {config.rollout[wrong]}, expected 0: {apart}")
  if problems := check.config_problems(config):
    raise UsageError("\n".join(problems))
  if given["checkpoint"] and source.find(given["checkpoint"]).kind != "run":
    text = given["checkpoint"]
    raise UsageError(f"--checkpoint: found {text!r}, expected WORKDIR or WORKDIR@NUMBER of a run; --config.model.path names other weights")
  return Request(config, **given)


def split(text: str) -> list[str]:
  """Splits a list at the commas outside parentheses.

  Example:
    >>> split("grpo,gspo(clip_low=0.1, clip_high=0.2),sapo")
    ['grpo', 'gspo(clip_low=0.1, clip_high=0.2)', 'sapo']
  """
  parts, depth = [""], 0
  for character in text:
    depth += {"(": 1, ")": -1}.get(character, 0)
    if character == "," and depth == 0:
      parts.append("")
    else:
      parts[-1] += character
  return [part.strip() for part in parts if part.strip()]


def run(request: Request) -> list[dict[str, Any]]:
  """Measures, and writes the rows to `--json`.

  Raises:
    ValueError: If an objective does not exist or reads what the config does not compute.
  """
  import jax

  from experiments.gradients import measure, names
  from jaxrl_llm.decoding.sampler import make_filter
  from jaxrl_llm.devices.mesh import num_row_shards
  from jaxrl_llm.learner.gradient_noise import Projection, make_moments
  from jaxrl_llm.learner.programs import outputs_fn
  from jaxrl_llm.learner.train_step import map_micro_batches
  from jaxrl_llm.run.setup.start import start_run
  from jaxrl_llm.run.steps.grading import assess
  from jaxrl_llm.run.steps.learn import end_imitation, learn_from, prepare
  from jaxrl_llm.run.steps.sample import launch, wait
  from jaxrl_llm.train import warm_start

  losses = {text: names.named(text) for text in request.objectives}
  with tempfile.TemporaryDirectory() as folder:
    job = start_run(request.config, Path(folder), command="experiments.gradients")
    config, learner = job.config, job.experiment.learner
    if num_row_shards(job.experiment.mesh) > 1 or job.experiment.mesh.size > 1:
      raise UsageError(f"config.mesh: found {job.experiment.mesh.size} devices, expected one")
    for text, objective in losses.items():
      if lacking := sorted(objective.needs - READ - job.experiment.needs):
        expected = "expected a config whose objective reads it, too"
        raise UsageError(f"--objectives: {text} reads {lacking[0]}, which a run of this config does not compute; {expected}")
    needs = frozenset().union(*(objective.needs for objective in losses.values()))
    job.experiment = job.experiment._replace(needs=job.experiment.needs | (needs & READ) | {"groups"})

    note = job.progress.note
    with job.phases, job.experiment.drawing.queue, job.grader, job.progress, job.writer, job.samples:
      if request.checkpoint:
        job.state = learner.restart(checkpoint_params(job, request.checkpoint))
      else:
        warm_start(job)
        end_imitation(job)

      def draw(first: int, count: int) -> list[Any]:
        return [assess(job, wait(job, first, launch(job, first, draw=draw))[0]) for draw in range(count)]

      count = -(-request.responses // (config.rollout.num_prompts * config.rollout.group_size))
      note(f"drawing {count} rollout batches, then {request.steps} RL steps")
      job.phases.begin_step(1, "rollout")
      old = [x for batch in draw(0, count) for x in prepare(job, batch, 0).placed]
      for step in range(1, request.steps + 1):
        job.phases.begin_step(step + 1, "rollout")
        job.record.rl_steps = step
        learn_from(job, draw(step, 1)[0], step)
      job.record.rl_steps, step = request.steps + 1, request.steps + 1
      job.phases.begin_step(step + 1, "rollout")
      fresh = [x for batch in draw(step, count) for x in prepare(job, batch, step).placed]

      filter_logits = make_filter(temperature=config.rollout.temperature, top_k=config.rollout.top_k, top_p=config.rollout.top_p)
      outputs_of = outputs_fn(config, learner.model, filter_logits, learns_entropy="entropy" in needs)
      in_rows = jax.jit(lambda params, batch: map_micro_batches(partial(outputs_of, params), batch, 1))
      projection = Projection(request.project) if request.project else None
      moments_fn = make_moments(outputs_of, trainable=learner.trainable, at_once=request.at_once, projection=projection)
      options = dict(outputs_fn=in_rows, moments_fn=moments_fn)
      note(f"measuring {2 * count} rollout batches, half of them fresh")
      measured = measure.measure(old, job.state.params, losses, parts=[measure.PARTS[name] for name in request.parts], **options)
      of_fresh = measure.measure(fresh, job.state.params, losses, only_plain=True, **options)
    rows = measure.rows_of(measured, of_fresh)
  about = {"config": str(config.objective.name), "steps": request.steps, "updates": request.steps * config.learner.updates_per_rollout}
  about["projection_error"] = projection and projection.error
  if request.json:
    Path(request.json).parent.mkdir(parents=True, exist_ok=True)
    Path(request.json).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
  return rows


def checkpoint_params(job: Any, text: str) -> Any:
  """Reads the weights of `--checkpoint`."""
  from jaxrl_llm.run.jobs.evaluate.restored import restore

  return restore(job.experiment, source.find(text))[0]


def report(rows: Sequence[dict[str, Any]]) -> None:
  """Prints a table."""
  columns = {"inflation": ".3f", "ratio": ".2e", "cosine": ".3f", "length": ".3f", "error": ".3f", "clipped": ".1%", "effective": ".1%"}
  widths = max(len(row["objective"]) for row in rows), max(len(row["part"]) for row in rows)
  print(f"{rows[0]['responses']} responses")
  print("  ".join([f"{'objective':{widths[0]}}", f"{'part':{widths[1]}}", *(f"{name:>10}" for name in columns)]))
  for row in rows:
    cells = [format(row[name], form) if name in row else "" for name, form in columns.items()]
    print("  ".join([f"{row['objective']:{widths[0]}}", f"{row['part']:{widths[1]}}", *(f"{cell:>10}" for cell in cells)]))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
