"""Where two runs part: differences of each kind, in tiny runs and in copies of their files."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from jaxrl_llm.report.__main__ import main
from jaxrl_llm.report.comparison.diff import describe, read_pair
from jaxrl_llm.workdir.metrics import MetricWriter, read_rows
from tests.runs import VARIED, cached_runs

# Every rollout of its two RL steps is a sample, and each step has a checkpoint: 1, 2 and 3.
SHORT = VARIED | {
  "num_steps": 2, "warm_start.num_steps": 1, "warm_start.batch_size": 8, "warm_start.cache": False, "eval.every": 2,
  "eval.num_prompts": 8, "eval.batch_prompts": 8, "checkpoint.every": 1, "checkpoint.keep": 3, "log.samples_every": 1,
  "log.num_samples": 64, "log.tensorboard": False, "learner.learning_rate": 1e-2,
}  # fmt: skip
HASHES = ("prompts", "sequences", "logprobs", "rewards", "loss_mask", "advantages")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
  return cached_runs(tmp_path_factory, "gspo", SHORT)


def by_chance(completion, example):
  """Returns a reward that no two runs agree on."""
  return os.urandom(1)[0] / 255


def changed(run, folder, *, rows=None, samples=None, summary=None):
  """Copies a run to a folder, with functions applied to its rows and samples, and other facts."""
  shutil.copytree(run, folder)
  for name, change in (("metrics", rows), ("samples", samples)):
    if change is not None:
      kept = change(read_rows(folder / f"{name}.jsonl"))
      (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
  facts = json.loads((folder / "summary.json").read_text())
  for name, value in (summary or {}).items():
    facts[name] = facts[name] | value if isinstance(value, dict) and facts[name] else value
  (folder / "summary.json").write_text(json.dumps(facts))
  return folder


def at(step, change, phase="rl"):
  """Makes a function that changes the rows of a step."""

  def of_rows(rows):
    for row in rows:
      if (row["phase"], row["step"]) == (phase, step):
        row |= change if isinstance(change, dict) else change(row)
    return rows

  return of_rows


def diff(a, b):
  """Returns the verdict and the lines below it."""
  first, other, notes = read_pair([a, b])
  assert notes == []
  verdict, *lines = describe(first, other)
  return verdict, lines


def test_equal_runs_are_equal_in_what_is_recorded(run_of, tmp_path):
  base = run_of()
  again = changed(base, tmp_path / "again")
  config = json.loads((again / "config.json").read_text())
  config["log"]["num_table_rows"] = 1
  (again / "config.json").write_text(json.dumps(config))
  verdict, lines = diff(base, again)
  num_samples = len(read_rows(base / "samples.jsonl"))
  assert verdict == f"equal in all that is recorded: 5 rows of metrics and {num_samples} samples"
  assert (
    "  equal weights: checkpoints 1, 2, 3" in lines
    and "  differ without effect on a number: log.num_table_rows" in lines
  )
  assert num_samples == 64


@pytest.mark.parametrize(
  ("changes", "part", "cause"),
  [
    ({"seed": 1}, "updates differ from step 1 of the warm start (actor/loss", "likely config.seed: 0 and 1"),
    (
      {"learner__learning_rate": 2e-2}, "learning rates differ from RL step 1 (actor/lr",
      "where all before them in the step is equal: likely config.learner.learning_rate: 0.01 and 0.02",
    ),
    ({"model__sampler_dtype": "bfloat16"}, "differ from ", "likely config.model.sampler_dtype: none and 'bfloat16'"),
  ],
  ids=["seed", "learning rate", "dtype"],
)  # fmt: skip
def test_a_setting_and_where_it_acts_first(run_of, changes, part, cause):
  verdict, lines = diff(run_of(), run_of(**changes))
  assert verdict.startswith(part) or part == "differ from " and part in verdict, verdict
  assert verdict.endswith(cause), verdict
  assert any(line.startswith("  config: ") for line in lines)


@pytest.mark.exhaustive  # A planted difference of a reward has the same verdict, without two runs.
def test_a_reward_that_depends_on_chance(run_of):
  """The config has nothing to do with it, so what is equal before it says what the cause is."""
  terms = {"reward__terms": (f"{__name__}:by_chance=0.5",)}
  verdict, lines = diff(run_of(**terms), run_of(**terms, log__num_table_rows=1))
  assert verdict.startswith("rewards differ from RL step 1 (problem '") and ", sample 1: " in verdict
  assert (
    "where prompts, tokens and sampler's log-probabilities are equal: the reward function is not deterministic"
    in verdict
  )
  assert not any(line.startswith(("  config", "  machine")) for line in lines)


def one_bit(rows):
  logprobs = rows[5]["logprobs"]
  logprobs[2] = float(np.nextafter(np.float32(logprobs[2]), np.float32(-100)))
  return rows


def other_reward(rows):
  rows[5]["reward"] += 1.0
  return rows


def permuted(rows):
  second = [row for row in rows if row["step"] == 2]
  return [row for row in rows if row["step"] != 2] + second[4:] + second[:4]


def other_problem(row):
  return {
    "rollout/prompts_sha256": "0" * 64,
    "rollout/sequences_sha256": "1" * 64,
    "rollout/tokens_sha256": "2" * 64,
  }


PLANTED = {
  "prompt": (
    dict(
      rows=at(2, other_problem), samples=at(2, {"prompt": "1+1\n"}), summary={"data_fingerprint": "0123456789abcdef"},
    ),
    "prompts differ from RL step 2 (prompt '", "likely data_fingerprint: none and '0123456789abcdef'",
  ),
  "log-probability": (
    dict(samples=one_bit), "sampler's log-probabilities differ from RL step 1 (problem '",
    "samples.jsonl was changed after the run, for rollout/logprobs_sha256 of the step is equal",
  ),
  "reward": (
    dict(samples=other_reward, rows=at(1, {"rollout/rewards_sha256": "0" * 64, "critic/rewards/mean": 0.5})),
    "rewards differ from RL step 1 (problem '",
    "where prompts, tokens and sampler's log-probabilities are equal: the reward function is not deterministic",
  ),
  "version": (
    dict(rows=at(1, {"actor/loss": 1.0}, "warm_start"), summary={"versions": {"jax": "0.0.1"}}),
    "updates differ from step 1 of the warm start (actor/loss: ", f"likely jax: {jax.__version__} and 0.0.1",
  ),
  "mask": (
    dict(rows=at(2, {"rollout/loss_mask_sha256": "0" * 64, "rollout/counted": 0.75})),
    "loss masks differ from RL step 2 (rollout/counted: 1.0 and 0.75)",
    "where prompts, tokens, sampler's log-probabilities and rewards are equal: other responses or tokens count in the loss",
  ),
  "order": (
    dict(
      samples=permuted, rows=at(2, {"rollout/tokens_sha256": "0" * 64, "rollout/prompts_sha256": "1" * 64, "actor/grad_norm": 1.0}),
    ),
    "orders of the groups differ from RL step 2 (problem '", "groups arrive in another order",
  ),
  "flag": (
    dict(rows=at(1, {"actor/loss": 5.5}, "warm_start"), summary={"environment": {"XLA_FLAGS": "--xla_another=1"}}),
    "updates differ from step 1 of the warm start (actor/loss: ", " and --xla_another=1",
  ),
  "refused update": (
    dict(rows=at(1, {"train/skipped_steps": 1.0, "actor/grad_norm": None, "nonfinite": {"actor/grad_norm": "nan"}})),
    "refused updates differ from RL step 1 (train/skipped_steps: 0.0 and 1.0), where all before them in the step is equal",
    "a gradient that was not finite",
  ),
  "missing row": (
    dict(rows=lambda rows: [row for row in rows if (row["phase"], row["step"]) != ("rl", 1)]),
    "rows of metrics differ from RL step 1 (none in other)", "its line of metrics.jsonl was removed",
  ),
  "resumed": (
    dict(rows=at(2, {"rollout/tokens_sha256": "0" * 64, "rollout/sequences_sha256": "1" * 64}), summary={"resumed_at": [2]}),
    "tokens differ from RL step 2 (rollout/tokens_sha256: ",
    "where prompts are equal: other was resumed there, from a checkpoint of other weights or of another run",
  ),
  "advantages": (
    dict(rows=at(2, {"rollout/advantages_sha256": "0" * 64})), "advantages differ from RL step 2 (rollout/advantages_sha256: ",
    "where all before them in the step is equal: another estimator",
  ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_difference(run_of, tmp_path, kind):
  changes, part, cause = PLANTED[kind]
  verdict, _ = diff(run_of(), changed(run_of(), tmp_path / "other", **changes))
  assert verdict.startswith(part) and cause in verdict, verdict
  if kind == "log-probability":
    assert ", token 3 '" in verdict and ", 1 unit of float32 rounding apart)" in verdict


def test_weights_of_another_checkpoint(run_of, tmp_path):
  other, place = changed(run_of(), tmp_path / "other"), "checkpoints/2"
  shutil.rmtree(other / place)
  shutil.copytree(run_of(learner__learning_rate=2e-2) / place, other / place)
  verdict, lines = diff(run_of(), other)
  assert (
    verdict.startswith("saved weights differ from RL step 1 (checkpoint 2: params.")
    and "of another run" in verdict
  )
  assert "  equal weights: checkpoint 1" in lines


def test_a_damaged_checkpoint_is_told_from_another_one(run_of, tmp_path):
  other = changed(run_of(), tmp_path / "other")
  manifest = other / "checkpoints" / "2" / "manifest.json"
  manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3', 1))
  shutil.rmtree(other / "checkpoints" / "2" / "arrays")
  shutil.copytree(
    run_of(learner__learning_rate=2e-2) / "checkpoints" / "2" / "arrays",
    other / "checkpoints" / "2" / "arrays",
  )
  assert "checkpoints/2 is damaged: manifest.json is not as it was written" in diff(run_of(), other)[0]


def test_a_setting_that_acts_later_is_not_the_cause(run_of, tmp_path):
  other = changed(
    run_of(learner__learning_rate=2e-2), tmp_path / "other", rows=at(1, {"rollout/logprobs_sha256": "0" * 64})
  )
  verdict, _ = diff(run_of(), other)
  assert verdict.startswith("sampler's log-probabilities differ from RL step 1")
  assert verdict.endswith("the compiler) (not config.learner.learning_rate, which acts later in the loop)")


def test_a_branch_parts_after_its_fork(run_of, tmp_path):
  fork = {"workdir": str(run_of().resolve()), "step": 1}
  other = changed(
    run_of(), tmp_path / "other", rows=at(2, {"actor/loss": 1.0}), summary={"branched_from": fork}
  )
  config = json.loads((other / "config.json").read_text())
  config["objective"]["name"] = "sapo"
  (other / "config.json").write_text(json.dumps(config))
  verdict, lines = diff(run_of(), other)
  assert verdict.endswith("likely config.objective.name: 'gspo' and 'sapo', in the first step after the fork")
  assert any(
    line.startswith("  branch: other branches ") and line.endswith(" after RL step 1") for line in lines
  )


def test_a_run_of_an_earlier_version_lacks_hashes(run_of, tmp_path):
  """Samples are then what shows that rewards are equal, and says of how many responses."""

  def without_hashes(rows):
    return [
      {name: x for name, x in row.items() if name not in [f"rollout/{part}_sha256" for part in HASHES]}
      for row in rows
    ]

  change = lambda rows: at(2, {"actor/loss": 1.0})(without_hashes(rows))
  other = changed(
    run_of(), tmp_path / "other", rows=change, samples=lambda rows: [row for row in rows if row["step"] == 1]
  )
  verdict, lines = diff(run_of(), other)
  assert verdict.startswith("updates differ from RL step 2 (actor/loss: ")
  assert (
    "where tokens, packed rows, learner's log-probabilities, refused updates and learning rates are equal"
    in verdict
  )
  assert any(line.startswith("  only in ") and "rollout/advantages_sha256" in line for line in lines)
  other = changed(run_of(), tmp_path / "with samples", rows=change)
  assert ", rewards of 32 samples, advantages of 32 samples, packed rows" in diff(run_of(), other)[0]


def test_a_run_that_ends_earlier_is_equal_until_there(run_of, tmp_path):
  other = changed(run_of(), tmp_path / "other", rows=lambda rows: rows[:3])
  verdict, lines = diff(run_of(), other)
  assert verdict.startswith("equal in all that is recorded: 3 rows of metrics")
  assert any(line.startswith("  other ends before RL step 2") for line in lines)


def test_the_command_prints_and_refuses(run_of, tmp_path, capsys):
  a, empty, nowhere = str(run_of()), tmp_path / "empty", str(tmp_path / "nowhere")
  empty.mkdir()
  (empty / "config.json").write_text("{}")
  with MetricWriter(tmp_path / "model", tensorboard=False) as writer:
    writer.write(1, "reward_model", {"reward_model/loss": 0.5})
  assert main([a, str(run_of(seed=1)), "--diff"]) == 0
  assert capsys.readouterr().out.startswith("updates differ from step 1 of the warm start")
  for folders, expected in (
    ([a], ["--diff: found 1 run ("]),
    ([a, a], [f"{a}: given more than once, counted once", "--diff: found 1 run ("]),
    ([a, str(run_of(seed=1)), str(tmp_path / "model")], ["--diff: found 3 runs ("]),
    ([a, nowhere], [f"{nowhere}: found nothing, expected the folder of a run", "--diff: found 1 run ("]),
    ([a, str(empty)], [f"{empty}: found no rows in metrics.jsonl, expected at least one step"]),
    ([a, str(tmp_path / "model")], [f"--diff: found a policy in {a} and a reward model in "]),
    ([a, str(run_of(seed=1)), "--x=step"], ["--x: found with --diff, which prints text"]),
  ):
    assert main([*folders, "--diff"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(expected) and all(
      line.startswith(f"error: {x}") for line, x in zip(lines, expected, strict=True)
    ), lines
