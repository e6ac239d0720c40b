"""The bed of the study: sums with a heavy tail of lengths, a warm policy, and its processes."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from configs import dapo
from jaxrl_llm import train
from jaxrl_llm.run.setup.start import Run

ROOT = Path(__file__).resolve().parents[3]
PROBLEMS, LONGEST, BASE = 6000, 12, 10
PATIENCE_S = 600


class Arm(NamedTuple):
  """How a run draws and corrects.

  Attributes:
    staleness: Largest lag η in RL steps.
    update_in_flight: What becomes of responses in progress when new weights come.
    old_logprobs: Source of the old policy's log-probabilities.
    tis: Cap of the weight π_prox/μ; None for no such weight.
  """

  staleness: int
  update_in_flight: str | None = None
  old_logprobs: str = "sampler"
  tis: float | None = None


class Plan(NamedTuple):
  """Sizes of a run.

  Attributes:
    steps: Number of RL steps.
    skipped: Number of first steps that the time leaves out, for compilation and the first fill.
    rows: Rows of the sampler's engine.
    held_out: Share of the problems that is held out.
    evaluated: Number of held-out problems of an evaluation.
    learning_rate: Constant rate of Adam.
    warm_steps: Steps of the imitation with which all runs begin.
  """

  steps: int
  skipped: int = 0
  rows: int = 2
  held_out: float = 0.1
  evaluated: int = 256
  learning_rate: float = 1e-4
  warm_steps: int = 120


def write_problems(folder: Path) -> Path:
  """Writes sums of 2 to 13 digits modulo 10, with a line of work for each addition.

  The number of additions k has the weight k^-2. Most problems with one addition are duplicates
  and left out.
  """
  rng, seen, path = random.Random(0), set(), folder / "sums.jsonl"
  with path.open("w") as file:
    while len(seen) < PROBLEMS:
      count = rng.choices(range(1, LONGEST + 1), [k**-2.0 for k in range(1, LONGEST + 1)])[0]
      digits = [rng.randrange(BASE) for _ in range(count + 1)]
      question, total, lines = "+".join(map(str, digits)), digits[0], []
      for digit in digits[1:]:
        lines.append(f"{total}+{digit}={(total + digit) % BASE}")
        total = (total + digit) % BASE
      if question not in seen:
        seen.add(question)
        file.write(json.dumps({"question": question, "answer": str(total), "solution": "\n".join([*lines, f"#{total}"])}) + "\n")
  return path


def settings(problems: Path, plan: Plan) -> dict[str, Any]:
  """Returns the fields that all runs of a plan share."""
  return {
    "model.preset": "tiny", "task.name": "file", "task.path": str(problems), "task.levels": None, "task.question_column": "question",
    "task.answer_column": "answer", "task.response_column": "solution", "task.test_fraction": plan.held_out, "rollout.max_new_tokens": 96,
    "rollout.num_prompts": 16, "rollout.slots": plan.rows, "rollout.prompt_buckets": (28,),
    "learner.row_tokens": 124, "learner.row_buckets": (24, 64), "learner.updates_per_rollout": 2, "rollout.max_refills": 0,
    "learner.learning_rate": plan.learning_rate, "learner.schedule": "constant",
    "rollout.samplers": 1, "num_steps": plan.steps, "checkpoint.every": plan.steps, "eval.every": plan.steps,
    "eval.num_prompts": plan.evaluated, "eval.batch_prompts": 128, "log.tensorboard": False, "log.num_table_rows": 0,
    "warm_start.num_steps": 0, "warm_start.row_buckets": None,
    "warm_start.learning_rate": 3e-3,
  }  # fmt: skip


def of_arm(arm: Arm, seed: int) -> dict[str, Any]:
  """Returns the fields of an arm and a seed."""
  fields = {"rollout.staleness": arm.staleness, "rollout.update_in_flight": arm.update_in_flight, "seed": seed}
  return fields | {"learner.old_logprobs": arm.old_logprobs, "correction.tis": arm.tis}


def warm_policy(problems: Path, folder: Path, plan: Plan) -> Path:
  """Imitates solutions and keeps the weights, from which all runs begin."""
  config = dapo.get_config()
  fields = settings(problems, plan) | {"rollout.samplers": 0, "warm_start.num_steps": plan.warm_steps, "rollout.staleness": 0}
  config.update_from_flattened_dict(fields)
  (folder / "warm").mkdir(parents=True)
  run = train.start_run(config, folder / "warm")
  with run.phases, run.experiment.drawing.queue, run.grader, run.progress, run.writer, run.samples:
    train.warm_start(run)
  leaves = jax.device_get(jax.tree.leaves(run.state.params))
  np.savez(path := folder / "policy.npz", *leaves)
  return path


def begin_with(run: Run, policy: Path) -> Run:
  """Gives a run that has just started the weights of the warm policy."""
  if run.record.rl_steps == 0:
    held = run.state.params
    with np.load(policy) as stored:
      leaves = [stored[f"arr_{i}"] for i in range(len(stored.files))]
    placed = [jax.device_put(new, old.sharding) for new, old in zip(leaves, jax.tree.leaves(held), strict=True)]
    run.state = run.experiment.learner.restart(jax.tree.unflatten(jax.tree.structure(held), placed))
  return run


def trial(arm: Arm, seed: int, *, problems: Path, policy: Path, folder: Path, plan: Plan, cores: tuple[int, int]) -> dict[str, Any]:
  """Trains once, with a learner and a sampler.

  Args:
    arm: Arm.
    seed: Seed of prompts and draws.
    problems: File of the problems.
    policy: Weights to begin with.
    folder: Folder of the run, which must not exist.
    plan: Sizes of the run.
    cores: Core of the learner and core of the sampler.
  """
  folder.mkdir(parents=True)
  flags = [f"--config.{name}={value}" for name, value in (settings(problems, plan) | of_arm(arm, seed)).items()]
  learner = [sys.executable, "-m", "experiments.studies.asynchrony.learner", str(policy)]
  learner += ["--config=configs/dapo.py", f"--workdir={folder / 'run'}"]
  sampler = [sys.executable, "-m", "experiments.studies.asynchrony.sampler", str(folder / "run")]
  with (folder / "learner.log").open("w") as of_learner, (folder / "sampler.log").open("w") as of_sampler:
    learning = _pinned([*learner, *flags], cores[0], of_learner)
    until = time.monotonic() + PATIENCE_S
    while not (folder / "run" / "config.json").exists() and learning.poll() is None and time.monotonic() < until:
      time.sleep(0.1)
    drawing = _pinned(sampler, cores[1], of_sampler)
    try:
      status = learning.wait(PATIENCE_S + 10 * plan.steps)
    finally:
      learning.kill()
      drawing.terminate()
      drawing.wait(30)
  if status:
    raise RuntimeError(f"the run in {folder} ended with status {status}: {(folder / 'learner.log').read_text()[-500:]}")
  return measured(folder / "run", plan.skipped)


def _pinned(command: list[str], core: int, log: Any) -> subprocess.Popen:
  environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
  return subprocess.Popen(["taskset", "-c", str(core), *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def measured(workdir: Path, skipped: int) -> dict[str, Any]:
  """Returns what counts of a finished run."""
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  steps, evaluated = [row for row in rows if row["phase"] == "rl"], [row["eval/accuracy"] for row in rows if row["phase"] == "eval"]
  timed, mean = steps[skipped:], lambda name: float(np.mean([row.get(name, 0.0) for row in steps[skipped:]]))
  lengths = [int(x) for row in steps for x in (row["response_length/mean"],)]
  return {
    "seconds": round(sum(row["timing_s/step"] for row in timed), 3), "first": evaluated[0], "accuracy": evaluated[-1],
    "rewards": [round(row["critic/rewards/mean"], 4) for row in steps], "step_s": [round(row["timing_s/step"], 3) for row in steps],
    "lag_mean": round(mean("rollout/staleness/mean"), 3), "lag_max": max(row["rollout/staleness/max"] for row in steps),
    "learner_idle": round(mean("perf/learner_idle"), 3), "sampler_idle": round(mean("samplers/idle_mean"), 3),
    "rollout_s": round(mean("timing_s/rollout"), 3), "update_s": round(mean("timing_s/update"), 3), "tokens_mean": float(np.mean(lengths)),
  }  # fmt: skip
