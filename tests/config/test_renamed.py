"""Fields that are gone: each place that may still set one names the new field and its value."""

import json

import pytest

from configs import reward_model
from jaxrl_llm import main
from jaxrl_llm.config import check, command_line, fields, recorded, renamed
from jaxrl_llm.run.jobs.reward_model.check import job_problems
from tests.runs import ROOT, tiny_config

OLD = "config.learner.micro_batches"


def test_old_fields_are_gone_and_new_ones_exist():
  for path, new in renamed.RENAMED.items():
    assert path not in fields.FIELDS | fields.REWARD_MODEL_FIELDS and new.path in fields.FIELDS


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    # The mesh of a command counts, wherever it stands.
    (["learner.micro_batches=2", "mesh.data=2"], f"{OLD}: found 2, expected config.learner.rows_per_device=2, the rows that a device"),
    (["mesh.data=4", "learner.micro_batches=2"], f"{OLD}: found 2, expected config.learner.rows_per_device=1, "),
    (["learner.micro_batches=1"], f"{OLD}: found 1, expected config.learner.rows_per_device=None, "),
    (["learner.micro_batches=2"], "the largest of row_buckets / (micro_batches x devices of mesh data x fsdp x expert), or None for"),
    (["mesh.data=1", "learner.micro_batches=3"], "the largest of row_buckets / (micro_batches x devices"),
    (["rollout.queue=True"], "config.rollout.queue: found True, expected config.rollout.driver='loop', which says what draws"),
    (["rollout.queue=False"], "config.rollout.queue: found False, expected config.rollout.driver='auto', "),
    (["rollout.queue=True", "rollout.staleness=2"], "config.rollout.driver='loop' and config.rollout.update_in_flight='wait', which"),
    (["rollout.queue=maybe"], "'loop' for True, with update_in_flight='wait' if it was None and there is a lag, and 'auto' for False"),
    (["rollout.report_every=16"], "found 16, expected config.rollout.driver='loop', because the loop has responses graded as they finish"),
    (["learner.micro_batches=two"], f"{OLD}: found 'two', expected config.learner.rows_per_device, the rows that a device takes at a "),
  ],
)
def test_a_flag_of_an_old_field_is_one_line(flags, words, capsys, monkeypatch):
  monkeypatch.chdir(ROOT)
  assert main.main(["main", "--config=configs/gspo.py:tiny", *(f"--config.{flag}" for flag in flags)]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert words in line


@pytest.mark.parametrize("setting", ["config.learner.micro_batches = 4", "config.update({'learner': {'micro_batches': 4}})"])
def test_a_config_file_with_an_old_field_is_one_line(setting, tmp_path):
  path = tmp_path / "mine.py"
  lines = ("from configs import common", "def get_config():", "  config = common.laptop('gspo', 'tiny')", f"  {setting}", "  return config")
  path.write_text("\n".join(lines))
  with pytest.raises(command_line.UsageError) as error:
    command_line.load(str(path))
  (line,) = str(error.value).splitlines()
  assert "learner.micro_batches is now learner.rows_per_device" in line and "row_buckets / (micro_batches x devices" in line


@pytest.mark.parametrize(
  ("config", "problems_of"), [(tiny_config(), check.config_problems), (reward_model.get_config("tiny"), job_problems)]
)
def test_an_old_config_of_any_origin_has_one_problem(config, problems_of):
  with config.unlocked():
    del config.learner.rows_per_device
    config.learner.micro_batches = 1
  assert problems_of(config) == [f"{OLD}: found 1, expected config.learner.rows_per_device=None, the rows that a device takes at a time"]


@pytest.mark.parametrize("number", [1, 8])
def test_a_recorded_config_is_read_in_the_new_fields(number):
  """Only updates depend on the number, and 1 had the same meaning as None."""
  saved = {"seed": 0, "learner": {"b1": 0.9, "micro_batches": number}}
  new = {"seed": 0, "learner": {"b1": 0.9, "rows_per_device": None}}
  assert renamed.current(saved) == (new if number == 1 else saved)
  assert renamed.current(saved, updates=False) == new and renamed.current(new) == new and renamed.current({}) == {}
  assert saved["learner"]["micro_batches"] == number


@pytest.mark.parametrize(
  ("saved", "new"),
  [
    ({"queue": True, "staleness": 2, "update_in_flight": None}, {"driver": "loop", "staleness": 2, "update_in_flight": "wait"}),
    ({"queue": True, "staleness": 2, "update_in_flight": "keep"}, {"driver": "loop", "staleness": 2, "update_in_flight": "keep"}),
    ({"queue": True, "staleness": 0, "update_in_flight": None}, {"driver": "loop", "staleness": 0, "update_in_flight": None}),
    ({"queue": False, "report_every": 16}, {"driver": "auto"}),
    ({"report_every": 0}, {"driver": "auto"}),  # Before there was a queue.
  ],
)
def test_what_drew_a_recorded_run_draws_it_still(saved, new):
  assert renamed.current({"rollout": saved}) == {"rollout": new} == renamed.current({"rollout": new})


def test_a_run_with_the_old_field_can_be_evaluated(tmp_path, capsys):
  saved = tiny_config().to_dict()
  del saved["learner"]["rows_per_device"]
  saved["learner"]["micro_batches"] = 4
  (tmp_path / "config.json").write_text(json.dumps(saved))
  assert recorded.run_config(tmp_path).learner.rows_per_device is None and "earlier version" not in capsys.readouterr().out
