"""Bed of the study: arithmetic from a rambling teacher, then DAPO's rungs from a warm start.

The problems are those of the laptop job (levels 1 and 2). The demonstrations of that job have no
long mode, so a length penalty and token weights would have nothing to act on. The teacher of this
bed may copy the last line several times before the answer, and does so more often after a slip.
With a tight token budget some responses are cut, and wrong responses are longer than right ones.
Each seed has one warm start, from which all its rungs begin.
"""

import json
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import dapo
from experiments.ablations.dapo_ladder import measures
from jaxrl_llm import train
from jaxrl_llm.config import check
from jaxrl_llm.rewards.final_answer import final_answer
from jaxrl_llm.run.setup import start as start_lib
from jaxrl_llm.run.setup.saved_state import abstract_arrays
from jaxrl_llm.tasks.files.storage import split_of
from jaxrl_llm.tasks.sets import arithmetic
from jaxrl_llm.workdir import checkpoint, claim
from jaxrl_llm.workdir.metrics import read_rows

LEVELS = (1, 2)
DEMONSTRATIONS = 4  # Number of demonstrations per problem.
RAMBLES = {True: 0.5, False: 0.1}
"""Probability that the teacher rambles: with a slip in the working (True), without one (False)."""
GOES_ON = 0.75  # Probability that another copy of the last line follows a copy.
MOST_COPIES = 6
WARM_BUDGET = 96  # In tokens. The longest demonstration fits.


class Sizes(NamedTuple):
  """Sizes of the bed.

  Attributes:
    preset: Preset of the model.
    warm_steps: Number of imitation steps of the warm start.
    warm_batch: Number of demonstrations per imitation step.
    warm_rate: Learning rate of the imitation.
    steps: Number of RL steps, each with one rollout batch.
    num_prompts: Number of prompts in a rollout batch.
    group_size: Number of samples per prompt (G).
    updates: Number of policy updates per rollout batch.
    rate: Learning rate of RL.
    budget: Budget of a response, in tokens.
    eval_every: Number of RL steps between evaluations.
    eval_prompts: Number of held-out problems.
    log_every: Number of RL steps between rollout batches whose responses are all logged.
  """

  preset: str = "tiny"
  warm_steps: int = 300
  warm_batch: int = 64
  warm_rate: float = 3e-3
  steps: int = 24
  num_prompts: int = 32
  group_size: int = 8
  updates: int = 8
  rate: float = 2e-4
  budget: int = 32
  eval_every: int = 6
  eval_prompts: int = 256
  log_every: int = 2


SMOKE = Sizes(preset="nano", warm_steps=2, warm_batch=8, steps=2, num_prompts=4, group_size=4, updates=2, eval_every=1, eval_prompts=8)
"""Tiny sizes that show that everything runs. The measurements are meaningless."""

RUNGS = ("base", "filter", "clip_higher", "soft", "token", "dynamic")
"""Rungs, in the order of the paper's table 1.

Each rung keeps the switches of the rungs below it, except that "soft" replaces the filter.
"""

SIDES = ("clip_wide", "punish")
"""Arms beside the ladder, each a variant of "clip_higher".

"clip_wide" has a band up to 0.4. "punish" gives -1 to a truncated response instead of filtering it.
"""


def write_problems(folder: Path) -> None:
  """Writes `demonstrations.jsonl`, and the problems `train.jsonl` and `test.jsonl`.

  The split of a problem is that of the laptop job.
  """
  folder.mkdir(parents=True, exist_ok=True)
  rows: dict[str, list] = {"train": [], "test": [], "demonstrations": []}
  for level in LEVELS:
    for question in arithmetic.questions_of(level):
      row = {"question": question, "terms": question, "answer": str(arithmetic.evaluate(question)), "level": level}
      # Only the demonstrations' response is read, but both files of a task have the same columns.
      row |= {"response": arithmetic.working(question)}
      rows[split := split_of(question)].append(row)
      if split == "train":
        # The questions of a file are unique, so the number of the attempt is part of the question.
        # The prompt is made of the terms.
        attempts = ({"question": f"{question}/{seed}", "response": rambling(question, seed=seed)} for seed in range(DEMONSTRATIONS))
        rows["demonstrations"] += [row | attempt for attempt in attempts]
  for name, rows_of_file in rows.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))


def rambling(question: str, *, seed: int) -> str:
  """Writes a demonstration as the rambling teacher.

  The demonstration is a working of the laptop job's unreliable teacher. Its last line before the
  answer may be copied up to `MOST_COPIES` times.

  Example:
    >>> [rambling("7+8", seed=seed) for seed in range(3)]
    ['7+8=15\\n#15', '7+8=15\\n#15', '7+8=15\\n#15']
  """
  text = arithmetic.working(question, error_rate=arithmetic.ERROR_RATE, seed=seed)
  rng = random.Random(f"{question}/{seed}")
  *lines, answer = text.split("\n")
  if rng.random() < RAMBLES[text != arithmetic.working(question)]:
    copies = 1
    while copies < MOST_COPIES and rng.random() < GOES_ON:
      copies += 1
    lines += [lines[-1]] * copies
  return "\n".join([*lines, answer])


def base_config(sizes: Sizes, folder: Path, seed: int) -> ConfigDict:
  """Makes the config that all runs of a seed share."""
  config = dapo.get_config()
  config.seed, config.model.preset = seed, sizes.preset
  config.task.name, config.task.levels, config.task.data_dir = "file", None, str(folder / "data")
  config.task.prompt_template, config.task.reward, config.task.level_column = "{terms}\n", "final_answer", "level"
  config.task.test_path = str(folder / "test.jsonl")
  config.rollout.num_prompts, config.rollout.group_size = sizes.num_prompts, sizes.group_size
  config.learner.updates_per_rollout, config.learner.learning_rate = sizes.updates, sizes.rate
  config.eval.every, config.eval.num_prompts, config.eval.samples = sizes.eval_every, sizes.eval_prompts, 2
  config.eval.batch_prompts = min(config.eval.batch_prompts, sizes.eval_prompts)
  config.checkpoint.keep, config.log.tensorboard, config.log.num_table_rows = 1, False, 0
  return config


def warm_config(sizes: Sizes, folder: Path, seed: int) -> ConfigDict:
  """Makes the config of the warm start, which is imitation alone."""
  config = base_config(sizes, folder, seed)
  config.task.path, config.task.response_column = str(folder / "demonstrations.jsonl"), "response"
  config.num_steps = 0
  config.warm_start.num_steps, config.warm_start.batch_size = sizes.warm_steps, sizes.warm_batch
  config.warm_start.learning_rate, config.warm_start.row_buckets = sizes.warm_rate, (sizes.warm_batch // 3, sizes.warm_batch)
  config.rollout.max_new_tokens = WARM_BUDGET
  config.learner.row_buckets = (sizes.num_prompts * sizes.group_size // sizes.updates,)
  config.eval.num_prompts = config.eval.batch_prompts = min(32, sizes.eval_prompts)
  return config


def rung_config(sizes: Sizes, folder: Path, seed: int, rung: str) -> ConfigDict:
  """Makes the config of RL with the switches of a rung.

  The last rung has the switches of `configs/dapo.py`.
  """
  config = base_config(sizes, folder, seed)
  config.task.path = str(folder / "train.jsonl")
  config.num_steps = sizes.steps
  config.warm_start.num_steps = 0
  config.rollout.max_new_tokens = sizes.budget
  sequences = sizes.num_prompts * sizes.group_size // sizes.updates
  most = -(-sequences // (config.learner.row_tokens // (max(config.rollout.prompt_buckets) + sizes.budget)))
  config.learner.row_buckets = (-(-2 * most // 3), most)
  config.checkpoint.every = sizes.steps
  config.log.samples_every, config.log.num_samples = sizes.log_every, sizes.num_prompts * sizes.group_size
  height = RUNGS.index("clip_higher" if rung in SIDES else rung)
  on = lambda switch: height >= RUNGS.index(switch)
  config.reward.overlong_filter = on("filter") and not on("soft") and rung != "punish"
  config.objective.clip_high = 0.4 if rung == "clip_wide" else 0.28 if on("clip_higher") else 0.2
  # A ramp of one token is a step: 0 before the last token of the budget, -1 at that token.
  config.reward.overlong_buffer = sizes.budget // 5 if on("soft") else int(rung == "punish")
  config.objective.weights = "token_mean" if on("token") else "sequence_mean"
  config.rollout.max_refills = config.rollout.max_refills if on("dynamic") else 0
  return config


def warm_start(sizes: Sizes, folder: Path, seed: int) -> None:
  """Trains the policy that all rungs of a seed begin with.

  An interrupted warm start resumes. A finished one is kept.
  """
  if claim.is_finished(folder / f"warm-{seed}"):
    return
  _checked(config := warm_config(sizes, folder, seed))
  train.run(config, _made(folder / f"warm-{seed}"))


def climb(sizes: Sizes, folder: Path, seed: int, rung: str) -> dict[str, list[dict]]:
  """Trains with the switches of a rung, from the seed's warm start.

  Returns:
    Rows of the trial by table: `steps`, `evals` and `looks` as returned by the functions of
    `measures`, and one row of `ends`.
  """
  _checked(config := rung_config(sizes, folder, seed, rung))
  workdir = folder / f"{rung}-{seed}"
  # A trial takes about a minute, so it starts over rather than resumes.
  shutil.rmtree(workdir, ignore_errors=True)
  run = start_lib.start_run(config, _made(workdir))
  arrays = abstract_arrays(run.experiment)
  warm = checkpoint.restore_latest(checkpoint.open_checkpoints(folder / f"warm-{seed}" / "checkpoints", keep=1), arrays)
  run.state = run.experiment.learner.restart(warm[0]["state"].params)
  train.proceed(run)
  at = {"seed": seed, "rung": rung}
  rows, samples = read_rows(run.workdir / "metrics.jsonl"), read_rows(run.workdir / "samples.jsonl")
  right = "".join(map(str, grades(run)))
  tables = {
    "steps": measures.steps(rows, num_sequences=sizes.num_prompts * sizes.group_size),
    "evals": measures.evals(rows),
    "looks": measures.looks(samples, group_size=sizes.group_size),
    "ends": [{"right": right, "samples": 2 * config.eval.samples, "seconds": measures.seconds(rows)}],
  }
  return {table: [at | row for row in rows] for table, rows in tables.items()}


def grades(run: start_lib.Run) -> list[int]:
  """Counts the right ones among four samples of each held-out problem, at the end of a trial."""
  test, config = run.experiment.task.test, run.config
  # All rungs and seeds have the same problems. The samples differ from the run's own evaluations.
  order = np.random.default_rng(0).permutation(len(test))[: config.eval.num_prompts]
  problems, size, right = [test[i] for i in order], config.eval.batch_prompts, np.zeros(len(order), int)
  for half in range(2):
    for start in range(0, len(problems), size):
      batch = problems[start : start + size]
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 2**20 + half), start)
      _, responses = run.experiment.drawing.samples(run.state.params, run.record.rl_steps)(batch, key)
      k = len(responses) // len(batch)
      of = lambda i, batch=batch, k=k: batch[i // k]
      graded = np.array([final_answer(response, of(i)) for i, response in enumerate(responses)])
      right[start : start + size] += graded.reshape(-1, k).sum(axis=1).astype(int)
  return right.tolist()


def _checked(config: ConfigDict) -> None:
  if problems := check.config_problems(config):
    raise ValueError("\n".join(problems))


def _made(workdir: Path) -> Path:
  workdir.mkdir(parents=True, exist_ok=True)
  return workdir
