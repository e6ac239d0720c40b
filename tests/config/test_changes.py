"""Resuming with other settings or devices: the user must allow it, and no data is skipped."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from configs import common, reward_model
from jaxrl_llm import main
from jaxrl_llm.config import changes as changes_lib
from jaxrl_llm.config import fields as fields_lib
from jaxrl_llm.run.setup import experiment
from jaxrl_llm.run.setup.saved_state import abstract_arrays
from jaxrl_llm.tasks.pipeline import example_iterator
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.checkpoint import manifest
from tests.runs import VARIED, column, flags, quick, tiny_config

pytestmark = pytest.mark.usefixtures("in_the_checkout")
SHORT = VARIED | {
  "num_steps": 2, "warm_start.num_steps": 2, "warm_start.batch_size": 8, "eval.every": 2, "eval.num_prompts": 8, "eval.batch_prompts": 8,
  "log.num_table_rows": 0, "log.tensorboard": False,
}  # fmt: skip


def fields(name="gspo", changes=None):
  return json.loads(json.dumps(fields_lib.flatten(tiny_config(name, changes))))


def test_the_table_names_existing_fields():
  known = set(fields_lib.flatten(common.base())) | {"model.tokenizer"}
  for path in (*changes_lib.FIXED, *changes_lib.SCHEDULED, *changes_lib.FREE):
    assert path in known or any(field.startswith(path) for field in known if path.endswith(".")), path


REFUSED = {
  "seed": ({"seed": 1}, "config.seed: found 1, expected 0"),
  "preset": ({"model.preset": "tiny"}, "config.model.preset: found 'tiny', expected 'nano'"),
  "task": ({"task.levels": (1,)}, r"config.task.levels: found \[1\], expected \[1, 2\]"),
  "moments": ({"learner.moments_dtype": "bfloat16"}, "moments have that dtype"),
  "a reference": ({"objective.kl_coef": 0.1}, "found a reference in this config, expected no reference"),
  "a critic": ({"objective.name": "ppo", "advantage.estimator": "gae"}, "config.advantage.estimator: found a critic"),
  "warm start": ({"warm_start.num_steps": 3}, "warm_start.num_steps"),
  "updates of a step": ({"learner.updates_per_rollout": 1}, "config.learner.updates_per_rollout: found 1, expected 2 as at the start"),
  "updates without end": ({"learner.updates_per_rollout": 4, "learner.schedule": "constant"}, "would end before or after the run"),
}


def test_carried_conversations_keep_their_rules():
  old = fields("tools", {"rollout.spare_prompts": 2, "rollout.slots": 8})
  changed = {"rollout.slots": 8, "rollout.group_size": 2, "environment.max_turns": 9, "environment.timeout_s": 9.0}
  lines = list(changes_lib.refusals(old, fields("tools", changed | {"rollout.spare_prompts": 2})))
  assert [line.split(":")[0] for line in lines] == ["config.environment.max_turns", "config.rollout.group_size"]
  assert not list(changes_lib.refusals(fields("tools"), fields("tools", changed)))


@pytest.mark.parametrize("case", REFUSED)
def test_changes_that_no_flag_allows(case):
  changes, words = REFUSED[case]
  objective = dict(clip_low=None, clip_high=None) if case == "a critic" else {}
  lines = list(changes_lib.refusals(fields(), fields(changes=changes | {f"objective.{x}": None for x in objective})))
  assert len(lines) == 1 and re.search(words, lines[0]), lines


@pytest.mark.parametrize("order", [1, -1])
def test_a_reward_model_does_not_become_a_policy_or_the_other_way_round(order):
  policy, of_preferences = fields(), json.loads(json.dumps(fields_lib.flatten(reward_model.get_config("tiny"))))
  lines = changes_lib.refusals(*[policy, of_preferences][::order])
  (line,) = (line for line in lines if line.startswith("config.objective.name: "))
  assert line.endswith("because a reward model and a policy are different models")


def test_legal_changes_are_not_refused():
  allowed = {
    "num_steps": 9, "learner.learning_rate": 1e-3, "rollout.num_prompts": 16, "rollout.group_size": 2,
    "mesh.fsdp": 2, "rollout.max_new_tokens": 32, "objective.clip_low": 0.1, "task.data_dir": "elsewhere", "eval.every": 1,
  }  # fmt: skip
  assert not list(changes_lib.refusals(fields(), fields(changes=allowed)))
  # A rate that stays constant needs no count of updates.
  constant = {"learner.schedule": "constant"}
  assert not list(changes_lib.refusals(fields(changes=constant), fields(changes=constant | {"learner.updates_per_rollout": 1})))


@pytest.mark.parametrize(("was", "now"), [(4, 8), (8, 4), (4, 6), (6, 4), (1, 5)])
def test_no_row_is_skipped_when_the_batch_size_changes(was, now):
  rows = [{"i": i} for i in range(24)]
  before, whole = (example_iterator(rows, batch_size=size, seed=0) for size in (was, 1))
  seen = [row["i"] for _ in range(3) for row in next(before)]
  stream = [next(whole)[0]["i"] for _ in range(48)]
  state, line = changes_lib.convert_position(before.get_state(), was=was, now=now, what="prompts")
  after = example_iterator(rows, batch_size=now, seed=0)
  after.set_state(state)
  again = 3 * was % now
  assert [row["i"] for row in next(after)] == stream[3 * was - again :][:now] and seen == stream[: 3 * was]
  assert (line is None) == (again == 0) and (line is None or f"so {again} prompts are drawn again" in line)


def call(workdir, *args, devices=1, **changes):
  with quick(devices):
    return main.main(["main", "--config=configs/gspo.py:tiny", *flags(SHORT | changes), f"--workdir={workdir}", *args])


@pytest.mark.exhaustive
def test_a_finished_run_resumes_with_other_settings(tmp_path, capsys):
  assert call(tmp_path) == 0
  longer = {"num_steps": 3, "rollout.num_prompts": 16, "learner.row_buckets": 16, "learner.learning_rate": 1e-3}
  assert call(tmp_path, **longer) == 2
  assert "or pass --allow_config_change to continue with the new ones" in capsys.readouterr().err
  assert call(tmp_path, "--allow_config_change", **longer, seed=5) == 2
  assert "config.seed: found 5, expected 0 as at the start of the run" in capsys.readouterr().err
  assert call(tmp_path, "--allow_config_change", **longer) == 0
  out = capsys.readouterr().out
  assert "learning rate: 8e-05 in the last update, 0.0005 in the next one" in out
  for words in ("config.num_steps: 2 -> 3", "config.rollout.num_prompts: 8 -> 16", "config.learner.learning_rate: 0.0002 -> 0.001"):
    assert words in out
  assert "resumed" in out and "drawn again" not in out, "16 prompts are whole batches of 8 and of 16"
  assert [json.loads((tmp_path / name).read_text())["num_steps"] for name in ("config.1.json", "config.json")] == [2, 3]
  (line,) = (tmp_path / "config_changes.jsonl").read_text().splitlines()
  assert json.loads(line)["attempt"] == 2 and set(json.loads(line)["changes"]) == set(longer)
  assert len(column(tmp_path, "actor/loss")) == 3
  assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 3


def record_micro_batches(workdir, number):
  """Rewrites the config of a run as an earlier version recorded it."""
  path = workdir / "config.json"
  config = json.loads(path.read_text())
  assert config["learner"].pop("rows_per_device") is None
  config["learner"]["micro_batches"] = number
  path.write_text(json.dumps(config))


@pytest.mark.exhaustive
def test_a_run_of_the_version_with_micro_batches_resumes_with_the_same_bits(tmp_path, capsys):
  assert call(tmp_path / "new") == 0
  shutil.copytree(tmp_path / "new", tmp_path / "old")
  record_micro_batches(tmp_path / "old", 1)
  capsys.readouterr()
  assert call(tmp_path / "old") == 0 and "holds a finished run" in capsys.readouterr().out
  for name in ("new", "old"):
    assert call(tmp_path / name, "--allow_config_change", num_steps=3) == 0
  (line,) = (tmp_path / "old" / "config_changes.jsonl").read_text().splitlines()
  assert json.loads(line)["changes"] == {"num_steps": [2, 3]}
  for name in ("actor/loss", "actor/grad_norm", "rollout/tokens_sha256"):
    assert column(tmp_path / "old", name) == column(tmp_path / "new", name) and len(column(tmp_path / "new", name)) == 3


@pytest.mark.exhaustive
def test_a_run_with_several_micro_batches_is_refused_without_the_flag(tmp_path, capsys):
  assert call(tmp_path, num_steps=0) == 0
  record_micro_batches(tmp_path, 2)
  split = {"num_steps": 1, "learner.rows_per_device": 4}
  assert call(tmp_path, **split) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "learner.micro_batches: 2 -> None" in line and "learner.rows_per_device: None -> 4" in line
  assert "learner.micro_batches is now learner.rows_per_device" in line
  assert call(tmp_path, "--allow_config_change", **split) == 0 and len(column(tmp_path, "actor/loss")) == 1


def test_a_change_needs_a_workdir(capsys):
  assert main.main(["main", "--config=configs/gspo.py:tiny", "--allow_config_change"]) == 2
  assert "--allow_config_change: found no --workdir" in capsys.readouterr().err


def test_other_devices_are_refused_without_the_flag(tmp_path):
  folder = tmp_path / "checkpoints" / "4"
  folder.mkdir(parents=True)
  assert changes_lib.check_devices(tmp_path, 1, allowed=False) is None, "nothing was saved"
  manifest.write(folder, {}, manifest.Save(4, 0.0))
  devices = jax.device_count()
  assert changes_lib.check_devices(tmp_path, devices, allowed=False) is None
  with pytest.raises(
    ValueError, match=f"checkpoint 4 of .* was written on {devices} devices, found 4: .*pass --allow_config_change"
  ):
    changes_lib.check_devices(tmp_path, 4, allowed=False)
  assert "within rounding only" in changes_lib.check_devices(tmp_path, 4, allowed=True)


@pytest.mark.exhaustive
def test_a_run_on_eight_devices_resumes_on_four_and_one(tmp_path, capsys):
  """The restored weights are equal bit for bit, and the losses within rounding."""
  spread = {"mesh.fsdp": -1, "mesh.data": 1}
  assert call(tmp_path / "8", devices=8, **spread) == 0
  losses, first = {}, None
  for devices in (8, 4, 1):
    workdir = tmp_path / f"on-{devices}"
    shutil.copytree(tmp_path / "8", workdir)
    with quick(devices):
      built = experiment.build_experiment(tiny_config("gspo", SHORT | spread))
      arrays, _ = checkpoint.restore_latest(checkpoint.open_checkpoints(workdir / "checkpoints"), abstract_arrays(built))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(arrays["state"])]
    first = first or leaves
    assert all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in zip(first, leaves, strict=True)), devices
    change = {"num_steps": 3, **spread}
    capsys.readouterr()
    assert call(workdir, "--allow_config_change", devices=devices, **change) == 0
    assert ("was written on 8 devices" in capsys.readouterr().out) == (devices != 8)
    losses[devices] = column(workdir, "actor/loss")[-1], column(workdir, "actor/grad_norm")[-1]
  refused = tmp_path / "on-8"
  (refused / "summary.json").unlink()  # As if the run had been killed.
  assert (
    call(refused, devices=4, num_steps=3, **spread) == 2 and "pass --allow_config_change" in capsys.readouterr().err
  )
  for devices in (4, 1):
    np.testing.assert_allclose(losses[devices], losses[8], rtol=1e-4, atol=1e-6, err_msg=str(devices))


@pytest.mark.slow
def test_a_change_that_cannot_start_is_undone(tmp_path, capsys):
  assert call(tmp_path, num_steps=0) == 0
  assert call(tmp_path, "--allow_config_change", **{"mesh.fsdp": 3}) == 2
  assert "mesh.fsdp=3" in capsys.readouterr().err
  assert sorted(path.name for path in tmp_path.glob("config*")) == ["config.json"]
