"""The updates of an RL step of a run, reached as a branch is, and written to a bundle."""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.config import recorded
from jaxrl_llm.config.fork import Fork, num_warm_steps, parse
from jaxrl_llm.learner.programs import teaches_itself
from jaxrl_llm.messages import UsageError
from jaxrl_llm.models.params import partition
from jaxrl_llm.rollouts.batch import transcript, written_mask
from jaxrl_llm.run.jobs.bundle import box
from jaxrl_llm.run.jobs.bundle.contents import ABOUT, FORMAT, RESPONSES, digest, named, to_json
from jaxrl_llm.run.setup.start import Run, recorded_player, start_run
from jaxrl_llm.run.steps.learn import Learned
from jaxrl_llm.types import Params, TrainBatch, TrainState
from jaxrl_llm.workdir import branch
from jaxrl_llm.workdir.claim import WorkdirError
from jaxrl_llm.workdir.machine import machine, versions
from jaxrl_llm.workdir.metrics import read_rows
from jaxrl_llm.workdir.source import source_digest
from jaxrl_llm.workdir.summary import combine

NOT_TAKEN = ("timing_s/", "perf/")


class _Captured(Exception):
  """Ends the run that is repeated, once it has taken the step."""


def capture(text: str, out: Path, *, proceed: Callable[[Run], Any], form: str = "included") -> list[str]:
  """Repeats a run up to a step and writes the updates of that step to a bundle.

  The run is only read. A temporary folder gets its nearest earlier checkpoint, from which the steps
  are taken once more with the run's own settings.

  Args:
    text: WORKDIR@STEP, a run and an RL step, from 1.
    out: File to write.
    proceed: The training loop, `train.proceed`.
    form: What the bundle holds of the state before the step, and by checksum and origin if not:
      "included" (all of it), "adapters" (all but the frozen weights, of a run with adapters) or
      "reference" (nothing; there must be a checkpoint of the step before).

  Returns:
    Lines about the bundle.

  Raises:
    UsageError: If the step cannot be reached, or its updates read what a bundle does not hold. One
      line for each problem.
    OSError: If the file cannot be written.
  """
  fork, config = _check(text, form)
  with tempfile.TemporaryDirectory() as folder:
    workdir = Path(folder) / "repeated"
    try:
      branch.create(fork, workdir, config.to_dict())
    except WorkdirError as error:
      raise UsageError(str(error)) from error
    run = start_run(config, workdir, until=fork.step + 1)
    run.player = recorded_player(Path(fork.workdir), run.progress.note)
    recorder = _Recorder(run, fork.step)
    run.experiment = run.experiment._replace(learner=run.experiment.learner._replace(rl_step=recorder.update))
    run.witness = recorder.end
    with contextlib.suppress(_Captured):
      proceed(run)
    if not recorder.batches:
      what = "a step that trains the critic alone (critic.value_warmup_steps)"
      raise UsageError(f"{text}: found {what}, expected one that updates the policy")
    return _write(out, fork, run, recorder, form)


def _check(text: str, form: str) -> tuple[Fork, ConfigDict]:
  """Returns the state before a step as a fork, and the config of the run."""
  try:
    asked = parse(text)
  except ValueError as error:
    raise UsageError(str(error).replace("--branch", "WORKDIR@STEP", 1)) from error
  workdir = Path(asked.workdir)
  if recorded.saved_config(workdir) is None:
    raise UsageError(f"WORKDIR@STEP: found no RL run in {workdir}, expected one, as in runs/gspo@412")
  config, fork = recorded.run_config(workdir), asked._replace(step=asked.step - 1)
  reached = max((row["step"] for row in read_rows(workdir / "metrics.jsonl") if row["phase"] == "rl"), default=0)
  if not 1 <= asked.step <= reached:
    expected = f"1 to {reached}, the last RL step that the run in {workdir} has taken"
    raise UsageError(f"WORKDIR@STEP: found step {asked.step}, expected {expected}")
  try:
    # Other code needs no refusal: a line says whether the repeated step equals the run's row.
    branch.check(fork, workdir / "a bundle", config.to_dict(), anyway=True)
  except WorkdirError as error:
    begins = f"WORKDIR@STEP: step {asked.step} begins with the state after step {fork.step}"
    raise UsageError("\n".join(line.replace("--branch", begins, 1) for line in str(error).splitlines())) from error
  number = branch.checkpoint_of(fork, config.to_dict())
  if form == "reference" and number != num_warm_steps(config.to_dict()) + fork.step:
    what = f"no checkpoint of the state before step {asked.step}, which alone holds its weights"
    raise UsageError(f"--weights: found {what}, expected a step after a checkpoint, or no --weights=reference")
  if form == "adapters" and not config.model.lora_rank:
    what = "adapters for a run without any (config.model.lora_rank)"
    raise UsageError(f"--weights: found {what}, expected 'included', or 'reference' for a step after a checkpoint")
  if config.teacher.gkd_coef and not teaches_itself(config):
    raise UsageError(f"config.teacher.gkd_coef: found {config.teacher.gkd_coef}, expected 0: the updates read a teacher's weights, too")
  if config.rollout.samplers:
    raise UsageError(f"config.rollout.samplers: found {config.rollout.samplers}, expected 0: the steps are repeated in one process")
  if jax.process_count() > 1:
    raise UsageError(f"WORKDIR@STEP: found {jax.process_count()} processes, expected one")
  if config.log.trackers:
    if config.rollout.update_in_flight is not None:
      why = "a run with weights in flight repeats with its whole config only, and the repetition must not reach a tracker"
      raise UsageError(f"config.log.trackers: found {config.log.trackers}, expected (): {why}")
    config.log.trackers = ()
  return fork, config


class _Recorder:
  """The run's update, which keeps what it reads in one step."""

  def __init__(self, run: Run, step: int):
    self.run, self.step, self.inner = run, step, run.experiment.learner.rl_step
    self.state: TrainState | None = None
    self.batches: list[TrainBatch] = []
    self.learned: Learned | None = None

  def update(self, state: TrainState, batch: TrainBatch, *others: Params) -> Any:
    """Updates the policy as the run does."""
    if self.run.record.rl_steps == self.step:
      # Copies: the state is donated, and on CPUs a view would see the memory's next use.
      self.state = self.state or jax.tree.map(lambda x: np.array(x), state)
      self.batches.append(jax.tree.map(lambda x: np.array(x), batch))
    return self.inner(state, batch, *others)

  def end(self, learned: Learned, step: int) -> None:
    """Keeps what a step's updates have learned from, and ends the run after the step."""
    if step == self.step:
      self.learned = learned
      raise _Captured


def _write(out: Path, fork: Fork, run: Run, recorder: _Recorder, form: str) -> list[str]:
  learned, config, state = recorder.learned, run.config, recorder.state
  before, after, weights, kept = digest(state.params), digest(run.state.params), {}, state
  if form == "adapters":
    weights, kept = {"base": config.model.path}, state._replace(params=partition(state.params, run.experiment.learner.trainable)[0])
  elif form == "reference":
    number = num_warm_steps(config.to_dict()) + fork.step
    weights, kept = {"workdir": fork.workdir, "checkpoint": number, "state_sha256": digest(state)}, ()
  about = {
    "format": FORMAT, "run": Path(fork.workdir).name, "step": fork.step + 1, "config": config.to_dict(),
    "model": to_json(run.experiment.learner.model.config),
    "keys": {"seed": config.seed, "folded_in": fork.step}, "rows": [len(batch.mask) for batch in recorder.batches],
    "weights": {"sha256": before} | weights,
    "updates": learned.updates, "weights_after": after, "stack": stack(),
  }  # fmt: skip
  responses = list(_responses(learned, run.experiment.task.tokenizer.decode))
  arrays = named(kept, "state")
  for number, batch in enumerate(recorder.batches):
    arrays |= named(batch, f"batch/{number}")
  box.write(out, {ABOUT: about, RESPONSES: responses}, arrays)
  size = out.stat().st_size
  holds = f"{len(recorder.batches)} updates, {len(responses)} responses, {size:,} bytes"
  return [f"{out}: RL step {fork.step + 1} of {fork.workdir}, {holds}", _compared(fork, learned)]


def _compared(fork: Fork, learned: Learned) -> str:
  """Returns a line that compares the repeated step with the run's own row of metrics."""
  rows = [row for row in read_rows(Path(fork.workdir) / "metrics.jsonl") if (row["phase"], row["step"]) == ("rl", fork.step + 1)]
  own, again = rows[-1], combine(learned.updates) | learned.metrics
  own |= {name: float(x) for name, x in own.get("nonfinite", {}).items()}
  names = [name for name in again if name in own and not name.startswith(NOT_TAKEN)]
  is_nan = lambda *values: all(isinstance(x, float) and math.isnan(x) for x in values)
  differing = [name for name in names if again[name] != own[name] and not is_nan(again[name], own[name])]
  if not differing:
    return f"the repeated step equals the run's own row in each of its {len(names)} metrics"
  return f"the repeated step differs from the run's own row in {len(differing)} of {len(names)} metrics ({', '.join(differing[:3])}, ...)"


def _responses(learned: Learned, token_text: Callable[[list[int]], str]) -> Iterator[dict[str, Any]]:
  """Yields what is known of each response of a step, and its place in the rows of an update."""
  batch, written = learned.batch, written_mask(learned.batch.rollouts)
  places = iter([(u, row, own[0]) for u, x in enumerate(learned.layouts) for row, own in zip(x.rows, x.segments, strict=True)])
  for i, completion in enumerate(batch.completions):
    ids = batch.rollouts.tokens[i][batch.rollouts.mask[i]].tolist()
    advantages = batch.advantages[i][written[i]]
    yield {
      "response": i,
      "group": i // batch.group_size,
      "place": list(next(places)) if learned.taken[i] else None,
      "reward": float(batch.graded.totals[i]),
      "advantage": float(advantages.mean()) if len(advantages) else 0.0,
      "prompt": batch.examples[i]["prompt"],
      "text": transcript(completion),
      "tokens": [token_text([token]) for token in ids],
    }


def stack() -> dict[str, Any]:
  """Returns all that the bits of an update depend on besides the bundle, as JSON values."""
  return to_json(machine() | {"versions": versions(), "source": source_digest()})
