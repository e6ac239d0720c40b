"""Branches: runs that continue from the state of another run after a step, with other settings."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from jaxrl_llm import main, objectives
from jaxrl_llm.cli import bundle
from jaxrl_llm.config import fork, recorded
from jaxrl_llm.run.jobs.bundle.opened import open_bundle
from jaxrl_llm.run.setup import experiment
from jaxrl_llm.run.setup.saved_state import abstract_arrays
from jaxrl_llm.workdir import branch as branch_lib
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.metrics import reproducible
from tests.marks import few
from tests.runs import VARIED, break_at, flags, quick, rows, tiny_config

pytestmark = pytest.mark.usefixtures("in_the_checkout")
# Its checkpoints are those of RL steps 0, 4 and 6.
SHORT = VARIED | {
  "num_steps": 6, "warm_start.num_steps": 1, "warm_start.batch_size": 8, "warm_start.cache": False, "checkpoint.every": 4,
  "checkpoint.keep": 5, "eval.every": 3, "eval.num_prompts": 8, "eval.batch_prompts": 8, "learner.learning_rate": 2e-3,
  "log.num_table_rows": 0, "log.tensorboard": False,
}  # fmt: skip
LAG = {"rollout.staleness": 2, "rollout.slots": 8}
ADAPTIVE = {"reward.kl_coef": 0.1, "kl.target": 0.01, "kl.horizon": 500}
IN_FLIGHT = LAG | {"rollout.update_in_flight": "keep"}
PPO = ("--config.objective.name=ppo", "--config.advantage.estimator=gae")
SAPO = "--config.objective.name=sapo"
NEUTRAL = "--config.log.num_table_rows=1"  # A change of no number.
# They depend on what was still cached.
CACHED = ("conversation/computed_tokens", "conversation/cached_tokens")


def call(*args: str) -> int:
  with quick():
    return main.main(["main", *args])


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
  """Makes runs, equal ones only once, that tests must not write to."""

  @functools.cache
  def run(name: str = "gspo", **changes) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("run") / "parent"
    assert call(f"--config=configs/{name}.py:tiny", *flags(SHORT | changes), f"--workdir={workdir}") == 0
    return workdir

  return run


def branch(workdir: pathlib.Path, step: int, new: pathlib.Path, *args: str) -> int:
  return call(f"--branch={workdir}@{step}", f"--workdir={new}", *args)


def numbers(workdir: pathlib.Path, phase: str) -> list[dict]:
  """Returns what a repeated run has again of the rows of a phase."""
  return [{name: x for name, x in reproducible(row).items() if name not in CACHED} for row in rows(workdir, phase)]


def files(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def assert_equal_ends(one: pathlib.Path, other: pathlib.Path, name: str = "gspo", changes: dict | None = None) -> None:
  for phase in ("warm_start", "rl", "eval"):
    assert numbers(one, phase) == numbers(other, phase)
  assert rows(one, "rl")[-1]["actor/grad_norm"] > 0, "without gradients the test would prove little"
  with quick():
    abstract = abstract_arrays(experiment.build_experiment(tiny_config(name, SHORT | (changes or {}))))
    ends = [checkpoint.restore_latest(checkpoint.open_checkpoints(run / "checkpoints"), abstract, moves=False) for run in (one, other)]
  assert ends[0][1]["rl_steps"] == ends[1][1]["rl_steps"] == 6
  for x, y in zip(*(jax.tree.leaves(arrays) for arrays, _ in ends), strict=True):
    assert x.dtype == y.dtype and np.array_equal(x, y)


UNCHANGED = {
  "with a checkpoint": ("gspo", {}, 4, ()),
  "without one": ("gspo", {}, 5, ("--config=configs/gspo.py:tiny", *flags(SHORT))),
  "stopped at the fork": ("gspo", {}, 5, (NEUTRAL,)),
  "after the last checkpoint of the lag": ("gspo", IN_FLIGHT, 5, ()),
  "with a checkpoint of the lag": ("gspo", IN_FLIGHT, 4, ()),
  "a lag, stopped at the fork": ("gspo", LAG, 4, (NEUTRAL,)),
  "a critic and an adaptive coefficient": ("ppo", ADAPTIVE, 5, (NEUTRAL,)),
  "carried groups": ("gspo", {"rollout.spare_prompts": 2, "rollout.slots": 16}, 5, (NEUTRAL,)),
  "a curriculum and beliefs": ("gspo", {"task.curriculum": "level", "advantage.estimator": "spo", "rollout.group_size": 1}, 5, (NEUTRAL,)),
  "conversations": ("tools", {}, 5, (NEUTRAL,)),
  "conversations with lag": ("tools", IN_FLIGHT, 5, ()),
  "recorded rollouts": ("gspo", {}, 4, ("--recorded_steps=2",)),
  "recorded rollouts of a lag": ("gspo", LAG, 4, ("--recorded_steps=1", NEUTRAL)),
  "recorded conversations": ("tools", {}, 5, ("--recorded_steps=1",)),
  "recorded groups that are carried": ("gspo", {"rollout.spare_prompts": 2, "rollout.slots": 16}, 3, ("--recorded_steps=3",)),
}


# The others have the same parts in other pairs.
BY_HAND = [list(UNCHANGED).index(case) for case in (
  "with a checkpoint", "after the last checkpoint of the lag", "with a checkpoint of the lag", "a critic and an adaptive coefficient",
  "carried groups", "a curriculum and beliefs", "conversations", "recorded rollouts", "recorded conversations",
  "recorded groups that are carried", "a lag, stopped at the fork", "conversations with lag",
)]  # fmt: skip


@pytest.mark.parametrize("case", few(list(UNCHANGED), 2, rest="slow", by_hand=BY_HAND))
def test_an_unchanged_branch_equals_the_run(case, parent, tmp_path):
  name, changes, step, args = UNCHANGED[case]
  run, new = parent(name, **changes), tmp_path / "new"
  if changes == LAG:  # Nothing is in flight there, so that the steps up to it can be repeated.
    run = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "5")
  before = files(run)
  assert branch(run, step, new, *args) == 0
  assert files(run) == before
  assert_equal_ends(run, new, name, changes)
  begins = json.loads((new / "summary.json").read_text())["branched_from"]
  assert begins == {"workdir": str(run), "step": step, "recorded": int(args[0][-1]) if "recorded" in case else 0}


def test_a_changed_objective_takes_effect_after_the_fork(parent, tmp_path, capsys):
  run, new = parent(), tmp_path / "new"
  assert branch(run, 5, new, SAPO, "--config.num_steps=7") == 0
  out = capsys.readouterr().out
  assert f"branched from {run} after RL step 5 (replayed from its checkpoint after step 4)" in out
  assert "config.objective.name: 'gspo' -> 'sapo'" in out and "config.num_steps: 6 -> 7" in out
  old, rl = numbers(run, "rl"), numbers(new, "rl")
  assert rl[:5] == old[:5] and len(rl) == 7
  assert rl[5]["rollout/tokens_sha256"] == old[5]["rollout/tokens_sha256"], "the same weights draw it"
  assert rl[5]["actor/loss"] != old[5]["actor/loss"] and "sapo/gate_pos" in rl[5] and "sapo/gate_pos" not in rl[4]
  record, summary = json.loads((new / "config.json").read_text()), json.loads((new / "summary.json").read_text())
  assert record["objective"]["name"] == summary["objective"] == "sapo" and summary["attempts"] == 1
  assert f"--branch={run}@5" in summary["command"]
  page = (new / "report.html").read_text()
  assert "branched from" in page and f'"workdir":"{run}"' in page.replace(": ", ":")


@pytest.mark.parametrize("at", [4, pytest.param(5, marks=pytest.mark.exhaustive)], ids=["before the fork", "after it"])
def test_a_killed_branch_resumes_without_the_other_run(at, parent, tmp_path, capsys):
  run = shutil.copytree(parent(), tmp_path / "run")
  assert branch(run, 5, tmp_path / "whole", SAPO) == 0
  config = recorded.run_config(tmp_path / "whole")
  assert branch_lib.create(fork.Fork(str(run), 5), tmp_path / "new", config.to_dict())
  break_at(config, tmp_path / "new", at)
  shutil.rmtree(run)
  assert branch(run, 5, tmp_path / "new", SAPO) == 0
  assert_equal_ends(tmp_path / "whole", tmp_path / "new")
  assert json.loads((tmp_path / "new" / "summary.json").read_text())["branched_from"]["step"] == 5
  capsys.readouterr()
  assert branch(run, 5, tmp_path / "new", SAPO) == 0 and "holds a finished run" in capsys.readouterr().out


# Other weights after one step, and so other draws in the second.
RATE = "--config.learner.learning_rate=1e-2"


def drawn(workdir: pathlib.Path) -> list[str]:
  return [row["rollout/tokens_sha256"] for row in rows(workdir, "rl")]


def test_recorded_rollouts_are_those_of_the_run(parent, tmp_path, capsys):
  run, new = parent(**{"num_steps": 8}), tmp_path / "new"
  assert branch(run, 5, tmp_path / "own", RATE) == 0
  capsys.readouterr()
  assert branch(run, 5, new, RATE, "--recorded_steps=2") == 0
  assert "RL steps 6 to 7 learn from the rollouts of that run, which is repeated for them first" in capsys.readouterr().out
  old, own, recorded_ones = drawn(run), drawn(tmp_path / "own"), drawn(new)
  assert own[:6] == old[:6] and own[6] != old[6] and own[7] != old[7]
  assert recorded_ones[:7] == old[:7] and recorded_ones[7] != old[7] and len(recorded_ones) == 8
  assert rows(new, "rl")[5]["actor/lr"] != rows(run, "rl")[5]["actor/lr"]


def test_the_first_update_on_recorded_rollouts_has_the_loss_of_its_formula(parent, tmp_path):
  """GSPO's rollouts, learned from by SAPO."""
  run, new = parent(), tmp_path / "new"
  assert branch(run, 4, new, SAPO, "--recorded_steps=1") == 0
  boxes = tmp_path / "gspo.zip", tmp_path / "sapo.zip"
  with quick():
    for workdir, path in zip((run, new), boxes, strict=True):
      assert bundle.main(["bundle", f"{workdir}@5", f"--out={path}"]) == 0
    theirs, ours = map(open_bundle, boxes)
    logprobs = np.float64(ours.programs.logprobs(ours.state.params, jax.device_put(ours.batches[0])).logprobs)
  batch = ours.batches[0]
  for name in ("tokens", "mask", "segments", "advantages"):
    assert np.array_equal(getattr(batch, name), getattr(theirs.batches[0], name)), name
  assert [x["tokens"] for x in ours.responses] == [x["tokens"] for x in theirs.responses]
  arrays = [np.float64(x) for x in (logprobs, batch.old_logprobs, batch.advantages, batch.mask)]
  with jax.enable_x64(True):
    loss = float(objectives.value(objectives.make("sapo"), *arrays, segments=batch.segments)[0])
  assert abs(loss - sapo_loss(*arrays, batch.segments)) < 1e-10 < abs(loss)
  assert abs(loss - ours.about["updates"][0]["actor/loss"]) < 1e-6


def sapo_loss(logprobs, old_logprobs, advantages, mask, segments) -> float:
  """Returns SAPO's loss, by a loop over responses."""
  losses = []
  for row, segment in sorted({(row, int(segments[row, slot])) for row, slot in np.argwhere(mask > 0)}):
    own = (segments[row] == segment) & (mask[row] > 0)
    ratio, advantage = np.exp(logprobs[row] - old_logprobs[row])[own], advantages[row][own]
    tau = np.where(advantage > 0, 1.0, 1.05)
    losses.append(np.mean(-4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantage))
  return float(np.mean(losses))


@pytest.mark.slow
@pytest.mark.parametrize("records", few([True, False], 0), ids=["while it records", "while it learns from them"])
def test_a_killed_branch_with_recorded_rollouts_resumes(records, parent, tmp_path):
  run, begins = shutil.copytree(parent(), tmp_path / "run"), fork.Fork(str(tmp_path / "run"), 3, 2)
  args = (RATE, "--recorded_steps=2")
  assert branch(run, 3, tmp_path / "whole", *args) == 0
  config = recorded.run_config(tmp_path / "whole")
  assert branch_lib.create(begins, tmp_path / "new", config.to_dict())
  break_at(config, tmp_path / "new", 4, only=lambda run: (run.until is not None) == records)
  shutil.rmtree(run)
  assert branch(run, 3, tmp_path / "new", *args) == 0
  assert_equal_ends(tmp_path / "whole", tmp_path / "new", changes={"learner.learning_rate": 1e-2})


@pytest.mark.slow
def test_a_batch_that_the_run_has_not_drawn_is_drawn_and_told(parent, tmp_path, capsys):
  """With another reward the curriculum shows other problems."""
  run, new = parent(**{"task.curriculum": "level"}), tmp_path / "new"
  capsys.readouterr()
  assert branch(run, 3, new, "--recorded_steps=3", "--config.reward.at_random=0.5") == 0
  out = capsys.readouterr().out
  assert "is drawn with the branch's own weights, because it has other prompts than the run had" in out


def test_recorded_rollouts_that_there_are_not_are_refused(parent, tmp_path, capsys):
  run, new = parent(), f"--workdir={tmp_path / 'new'}"
  told = lambda *args, of=run, step=5: error(capsys, f"--branch={of}@{step}", new, *args)
  assert "--recorded_steps: found 2, expected at most 1, the number of RL steps that the run in" in told("--recorded_steps=2")
  line = told("--recorded_steps=1", "--config.rollout.temperature=0.5")
  assert "config.rollout.temperature: found 0.5, expected 1.0 as in the run" in line
  assert "--recorded_steps: found 1 without --branch" in error(capsys, "--config=configs/gspo.py:tiny", new, "--recorded_steps=1")
  assert "0" in told("--recorded_steps=0") and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_rollouts_that_cannot_be_recorded_or_read_are_refused(parent, tmp_path, capsys):
  new = tmp_path / "new"
  line = error(capsys, f"--branch={parent(**IN_FLIGHT)}@4", f"--workdir={new}", "--recorded_steps=1")
  assert "--recorded_steps: found rollout.update_in_flight='keep' in the run in" in line
  run = parent()
  assert branch(run, 4, new, RATE, "--recorded_steps=2") == 0
  assert "expected that of a checkpoint after step 6, because" in error(
    capsys, f"--branch={new}@5", f"--workdir={tmp_path / 'third'}", SAPO, "--config.num_steps=7"
  )
  # A branch without recorded rollouts can be repeated like any run.
  assert branch(run, 4, tmp_path / "plain") == branch(tmp_path / "plain", 5, tmp_path / "fourth", SAPO) == 0
  shutil.rmtree(new / "checkpoints" / "7")
  path = new / "branched_from" / "rollouts.zip"
  path.write_bytes(path.read_bytes()[:200] + b"damaged" + path.read_bytes()[207:])
  (new / "summary.json").unlink()
  assert f"{path}: found" in (line := error(capsys, f"--branch={run}@4", f"--workdir={new}", RATE, "--recorded_steps=2"))
  assert "expected recorded rollouts; begin the branch again" in line


REFUSED = {
  "a later step": ("@9", (), "--branch: found step 9, expected at most 6, the last RL step that the run in"),
  "nothing to do": ("@6", (), "config.num_steps: found 6, expected more than 6, the step of the fork"),
  "no step": ("", (), "expected WORKDIR@STEP, a run and an RL step, as in runs/gspo@412"),
  "a seed": ("@5", ("--config.seed=1",), "config.seed: found 1, expected 0 as at the start of the run, because everything drawn so far"),
  "a model": ("@5", ("--config.model.preset=tiny",), "config.model.preset: found 'tiny', expected 'nano'"),
  "adapters": ("@4", ("--config.model.lora_rank=2",), "config.model.lora_rank: found 2, expected None"),
  "a task": ("@5", ("--config.task.levels=(1,)",), "config.task.levels: found [1], expected [1, 2]"),
  "moments": ("@5", ("--config.learner.moments_dtype=bfloat16",), "the checkpoint's moments have that dtype"),
  "a critic": ("@5", PPO, "config.advantage.estimator: found a critic in this config, expected no critic"),
  "a replay": ("@5", ("--replay=.",), "--branch: found --replay as well, expected one of the two"),
  "a pilot": ("@5", ("--pilot",), "--branch: found --pilot as well, expected one of the two"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_continue_is_refused_in_one_line(case, parent, tmp_path, capsys):
  step, args, message = REFUSED[case]
  run = parent()
  capsys.readouterr()
  assert call(f"--branch={run}{step}", f"--workdir={tmp_path / 'new'}", *args) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
  assert not (tmp_path / "new").exists()


def error(capsys, *args: str) -> str:
  """Returns the one line with which a command is refused."""
  capsys.readouterr()
  assert call(*args) == 2
  (line,) = capsys.readouterr().err.splitlines()
  return line


def test_a_wrong_folder_is_refused_in_one_line(parent, tmp_path, capsys):
  run, new = parent(), f"--workdir={tmp_path / 'new'}"
  assert "--branch: found no --workdir" in error(capsys, f"--branch={run}@5")
  assert "--branch: found no RL run in" in error(capsys, f"--branch={tmp_path / 'none'}@5", new)
  assert "expected a folder: download the run" in error(capsys, "--branch=gs://bucket/run@5", new)
  assert "--branch: found --workdir=gs://bucket/run" in error(capsys, f"--branch={run}@5", "--workdir=gs://bucket/run")
  assert "--workdir: found a run in" in error(capsys, f"--branch={run}@5", f"--workdir={run}")
  (tmp_path / "new").mkdir()
  (tmp_path / "new" / "mine").write_text("")
  assert "found mine but no config.json, expected an empty folder" in error(capsys, f"--branch={run}@5", new)


def test_a_step_without_a_way_to_it_is_refused_in_one_line(parent, tmp_path, capsys):
  run, new = shutil.copytree(parent(), tmp_path / "run"), f"--workdir={tmp_path / 'new'}"
  shutil.rmtree(run / "checkpoints" / "1")
  assert "expected a checkpoint at or before it; those of" in error(capsys, f"--branch={run}@3", new)
  code = json.loads((run / "source.json").read_text())
  (run / "source.json").write_text(json.dumps(code | {"train.py": "0", "gone.py": "1"}))
  line = error(capsys, f"--branch={run}@5", new)
  assert "--branch: found code of jaxrl_llm that has changed since the run (gone.py, train.py), expected the same code" in line
  assert "--anyway: found no --branch" in error(capsys, "--config=configs/gspo.py:tiny", new, "--anyway")
  (run / "config_changes.jsonl").write_text(json.dumps({"attempt": 2}) + "\n")
  assert "expected that of a checkpoint (4, 6), because the settings or the package changed" in error(capsys, f"--branch={run}@5", new)
  shutil.rmtree(tmp_path / "run")
  shutil.copytree(parent(), tmp_path / "run")
  (run / "checkpoints" / "5" / "manifest.json").write_text("{}")
  assert "found none that is complete" in error(capsys, f"--branch={run}@4", new)
  (run / "branched_from").mkdir()
  (run / "branched_from" / "fork.json").write_text(json.dumps({"workdir": "/runs/first", "step": 4}))
  assert "expected 4 or later, since" in (line := error(capsys, f"--branch={run}@3", new)) and "or branch /runs/first" in line
  assert not (tmp_path / "new").exists() and not list(tmp_path.glob("*.branching"))


@pytest.mark.slow
def test_rollouts_in_flight_keep_their_settings(parent, tmp_path, capsys):
  run = parent(**IN_FLIGHT)
  line = error(capsys, f"--branch={run}@5", f"--workdir={tmp_path / 'new'}", SAPO)
  assert "expected a multiple of checkpoint.every=4 or the step of a checkpoint (0, 4, 6)" in line
