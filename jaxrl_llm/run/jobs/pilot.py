"""The pilot of a run: its reward probed, the untouched model's pass rate, the cost, and advice."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.evaluation import answer_reader, estimate
from jaxrl_llm.evaluation.power import WIDEST, Spread, problems_needed, smallest_difference, spread_of
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.run.jobs.reward_probe import probe_lines
from jaxrl_llm.run.observe.progress import duration, visible
from jaxrl_llm.run.setup.out_of_memory import explained
from jaxrl_llm.run.setup.start import Run, start_run
from jaxrl_llm.run.steps.grading import assess, with_signal
from jaxrl_llm.run.steps.learn import end_imitation, learn_from
from jaxrl_llm.run.steps.sample import launch, move_weights, wait
from jaxrl_llm.tasks.files.report import CAREFUL
from jaxrl_llm.workdir.summary import peak_memory_gb

NUM_GROUPS = 64  # The share of mixed groups is then known to within 12 points.
MAX_SECONDS = 120.0
NUM_SHOWN = 4
HOPED_FOR = 0.05  # Difference in held-out accuracy for which the problems are counted.


class Findings(NamedTuple):
  """Measurements of a pilot; fractions are of responses unless they say otherwise.

  Attributes:
    passed: Mean reward of the task's verifier, with the ends of its 95 % interval over problems.
    num_groups: Number of groups drawn.
    mixed: Fraction of the groups that carry a signal, which RL learns from.
    solved: Fraction of the groups whose samples are all right.
    hopeless: Fraction of the groups whose samples are all wrong.
    stated: Fraction that state an answer that the verifier can read; None if it reads none.
    truncated: Fraction cut at their budget.
    failed: Fraction without a reward.
    response_tokens: Mean length of a response.
    sampling: Seconds to draw and grade the rollout batch of a step.
    learning: Seconds of a step's updates and log-probability passes.
    compiling: Seconds that the first step takes longer.
    decoding: Sampled tokens per second.
    memory_gb: Peak memory of the process or the device.
    spread: Spread of the verifier's rewards.
    held_out: Number of problems of an evaluation.
    faults: Number of faults that the probe of the reward names.
  """

  passed: tuple[float, float, float]
  num_groups: int
  mixed: float
  solved: float
  hopeless: float
  stated: float | None
  truncated: float
  failed: float
  response_tokens: float
  sampling: float
  learning: float
  compiling: float
  decoding: float
  memory_gb: float
  spread: Spread
  held_out: int
  faults: int = 0


def describe_pilot(config: ConfigDict) -> str:
  """Runs a pilot and describes it, for `--pilot`; nothing of it is kept.

  It first prints what prepared responses earn (`reward_probe`). Then it draws rollouts with the
  untouched weights, at least two batches and up to `NUM_GROUPS` groups, and updates twice to
  measure a step. A warm start is left out.

  Args:
    config: Checked config.

  Raises:
    ValueError: What `start_run` raises.
    OutOfMemoryError: If the run does not fit into a device's memory.
    NoRewardError: If the responses have no reward.
  """
  pilot = ConfigDict(config.to_dict())
  pilot.log.tensorboard, pilot.log.trackers = False, ()
  pilot.rollout.samplers = 0  # It draws by itself.
  with tempfile.TemporaryDirectory() as folder:
    run = start_run(pilot, Path(folder), command="pilot")
    explaining, engine = explained(run.config, lambda: run.phases.now), run.experiment.drawing.queue
    with explaining, run.phases, engine, run.grader, run.progress, run.writer, run.samples:
      rewards, rules = run.experiment.rewards, run.experiment.drawing.rules
      asked = dict(call=run.grader, has_turns=rules is not None)
      probed = probe_lines(run.config, run.experiment.task, rewards, **asked)
      for line in probed:
        run.progress.note(line)
      findings, batch = measure(run)
  findings = findings._replace(faults=sum(line.startswith(CAREFUL) for line in probed))
  return "\n".join([*_examples(batch), *findings_lines(findings, run.config)])


def measure(run: Run) -> tuple[Findings, batch_lib.Batch]:
  """Measures a run that has just started; its weights change.

  Returns:
    The measurements and the last graded batch.
  """
  run.progress.note("pilot: drawing with the untouched weights; the first batch compiles the sampler")
  end_imitation(run)
  began, seconds, batches = time.perf_counter(), [], []
  section = run.config.rollout
  while len(batches) < 2 or (len(batches) * section.num_prompts < NUM_GROUPS and time.perf_counter() - began < MAX_SECONDS):
    begun = time.perf_counter()
    run.phases.begin_step(len(batches) + 1, "weight_sync")
    move_weights(run)
    run.phases.begin("rollout")
    drawn, _ = wait(run, 0, launch(run, 0, draw=len(batches)))
    run.phases.begin("reward", waits_for=run.grader.waits_for)
    batches.append(assess(run, drawn))
    seconds.append(time.perf_counter() - begun)
  run.progress.note("pilot: two updates; the first compiles the learner")
  learning = []
  for _ in range(2):
    begun = time.perf_counter()
    learn_from(run, batches[-1], 0)
    learning.append(time.perf_counter() - begun)
  compiling = max(seconds[0] - min(seconds[1:]), 0) + max(learning[0] - learning[1], 0)
  return compute_findings(
    run, batches, sampling=float(np.mean(seconds[1:])), learning=learning[1], compiling=compiling
  ), batches[-1]


def compute_findings(
  run: Run, batches: list[batch_lib.Batch], *, sampling: float, learning: float, compiling: float
) -> Findings:
  """Summarises the rollouts of a pilot; the times are those of a step, in seconds."""
  group_size, verifier = batches[0].group_size, run.experiment.verifier
  joined = lambda read: np.concatenate([read(x) for x in batches])
  valid = joined(lambda x: x.graded.valid)
  verdicts = np.where(valid, joined(lambda x: x.graded.parts[verifier.name]), np.nan).reshape(-1, group_size)
  mixed = joined(lambda x: with_signal(run, x, shaped=True))
  reader, stated = answer_reader(verifier), None
  if reader is not None:
    stated = float(np.mean([reader(*x) is not None for batch in batches for x in zip(batch.completions, batch.examples, strict=True)]))
  lengths = joined(lambda x: x.rollouts.mask.sum(axis=1))
  accuracy = estimate(f"avg@n:n={group_size}", verdicts)
  return Findings(
    passed=(accuracy.value, accuracy.low, accuracy.high),
    num_groups=len(mixed),
    mixed=float(mixed.mean()),
    solved=float(np.mean(~mixed & np.all(verdicts >= 1, axis=1))),
    hopeless=float(np.mean(~mixed & np.all(verdicts <= 0, axis=1))),
    stated=stated,
    truncated=float(1 - joined(lambda x: x.rollouts.stopped).mean()),
    failed=float(1 - valid.mean()),
    response_tokens=float(lengths.mean()),
    sampling=sampling,
    learning=learning,
    compiling=compiling,
    decoding=float(lengths.sum() / len(batches) / sampling),
    memory_gb=peak_memory_gb(),
    spread=spread_of(verdicts),
    held_out=min(run.config.eval.num_prompts, len(run.experiment.task.test)),
  )


def predicted_seconds(findings: Findings, config: ConfigDict) -> float:
  """Predicts the time of a run without its warm start: compilation, RL steps and evaluations."""
  evaluations = 1 + -(-config.num_steps // config.eval.every)
  shares = config.eval.num_prompts * config.eval.samples / (config.rollout.num_prompts * config.rollout.group_size)
  return (
    findings.compiling
    + config.num_steps * (findings.sampling + findings.learning)
    + evaluations * shares * findings.sampling
  )


def findings_lines(findings: Findings, config: ConfigDict) -> list[str]:
  """Describes the findings of a pilot, and what to change, one per line."""
  percent = lambda x: f"{100 * x:.1f} %"
  mean, low, high = findings.passed
  warm = config.warm_start.num_steps
  kept = f"; a warm start of {warm} updates comes first and is not included" if warm else ""
  results = [
    f"pass rate of the untouched model: {percent(mean)} [{percent(low)}, {percent(high)}] on {findings.num_groups} "
    f"training problems x {config.rollout.group_size} samples",
    f"groups: {percent(findings.mixed)} mixed, which RL learns from; {percent(findings.solved)} all right, "
    f"{percent(findings.hopeless)} all wrong",
    f"responses: {findings.response_tokens:.1f} tokens, {percent(findings.truncated)} cut at "
    f"{config.rollout.max_new_tokens}"
    + ("" if findings.stated is None else f", {percent(findings.stated)} with an answer that the verifier can read"),
    f"a step: {findings.sampling:.1f} s to draw and grade ({findings.decoding:,.0f} tokens/s), "
    f"{findings.learning:.1f} s to learn; peak memory {findings.memory_gb:.1f} GB",
    f"the run: {duration(predicted_seconds(findings, config))} for {config.num_steps} steps with their "
    f"evaluations{kept}",
    evaluation_line(findings, config.eval.samples),
  ]
  todo = [f"  {line}" for line in advice(findings, config)]
  return [*results, *(["what to change first:", *todo] if todo else ["nothing stands in the way of learning"])]


def evaluation_line(findings: Findings, samples: int) -> str:
  """Describes which differences in held-out accuracy an evaluation can show; see `power`."""
  sizes = dict(problems=findings.held_out, samples=samples)
  points = [f"{100 * smallest_difference(findings.spread, **sizes, kept=kept):.1f}" for kept in (1.0, 0.0)]
  hoped = dict(difference=HOPED_FOR, samples=samples)
  needed = [f"{problems_needed(findings.spread, **hoped, kept=kept):,}" for kept in (1.0, 0.0)]
  if findings.spread == WIDEST:
    shown, asked = points[0], needed[0]
    given = "if half of each problem's samples are right, because the pilot's are all alike"
  else:
    shown, asked = " to ".join(points), " to ".join(needed)
    given = "the first if all problems gain as much, the last if others become hard"
  return (
    f"an evaluation of {findings.held_out:,} problems, sampled {samples} x, shows a difference of {shown} points "
    f"between two runs, or before and after (80 % power at the 5 % level; {given}); "
    f"{100 * HOPED_FOR:.0f} points need {asked} problems"
  )


def advice(findings: Findings, config: ConfigDict) -> Iterator[str]:
  """Yields changes that give a run more to learn from; the most important comes first."""
  rollout, mean = config.rollout, findings.passed[0]
  percent = lambda x: f"{100 * x:.0f} %"
  if findings.faults:
    lines = f"{findings.faults} line(s) above that begin with {CAREFUL.strip()!r}"
    yield f"the reward does not reward the right thing: see the {lines}"
  if findings.failed > 0.05:
    yield (
      f"{percent(findings.failed)} of the responses have no reward: the verifier fails or is too slow "
      "(reward.timeout_s)"
    )
  if findings.truncated > 0.2:
    yield (
      f"{percent(findings.truncated)} of the responses are cut: raise rollout.max_new_tokens={rollout.max_new_tokens}, "
      "or end them where the answer ends, as in --config.rollout.stop_strings=\"('\\n',)\" for answers of one line"
    )
  if findings.stated is not None and findings.stated < 0.7 and mean < 0.5:
    yield (
      f"{percent(1 - findings.stated)} of the responses state no answer that the verifier can read: show the format "
      f"in solved problems (task.shots={config.task.shots}, task.shot_template) or describe it in task.prompt_template"
    )
    if config.task.shots and config.task.get("chat") is not False:
      yield (
        "if the checkpoint has a chat template, the solved problems are written as a chat: --config.task.chat=False "
        "lets the model continue them"
      )
  if findings.mixed < 0.3 and mean < 0.1:
    yield (
      "most groups are all wrong: begin with easier problems (task.levels), more solved problems in the prompt (task.shots), a larger "
      "model, or solutions to imitate (task.response_column and warm_start.num_steps)"
    )
    yield f"raise rollout.group_size={rollout.group_size}: larger groups contain a right answer more often"
  if findings.mixed < 0.3 and mean > 0.9:
    yield "most groups are all right: take harder problems (task.levels, another file); there is little left to learn here"
  if findings.mixed < 0.6 and 0.1 <= mean <= 0.9:
    yield (
      "many groups carry no signal: rollout.max_refills=2 draws others in their place, task.curriculum prefers "
      "problems with a pass rate near 50 %"
    )


def _examples(batch: batch_lib.Batch) -> Iterator[str]:
  """Yields the first sample of a few problems as lines of text."""
  for row in range(0, min(len(batch.completions), NUM_SHOWN * batch.group_size), batch.group_size):
    prompt, text = batch.examples[row]["prompt"], batch.completions[row].text
    yield f"prompt ...{visible(prompt[-160:])}" if len(prompt) > 160 else f"prompt {visible(prompt)}"
    yield f"  response {visible(text[:300])}"
    yield f"  answer {visible(str(batch.examples[row]['answer']))[:80]}, reward {batch.graded.totals[row]:g}"
