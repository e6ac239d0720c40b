"""Rows: their ids, the functions of a file that make them, and refusals before a trial starts."""

import json
import os
import subprocess
import sys

import pytest

from experiments.launch import hyper, rows
from experiments.launch.rows import SweepError, make_row

TINY = "configs/gspo.py:tiny"


def written(tmp_path, text, name="mine.py"):
  path = tmp_path / name
  path.write_text(text)
  return str(path)


def test_ids_are_the_same_in_every_process():
  code = "import json, sys; from experiments.launch.rows import make_row; print(make_row(json.loads(sys.argv[1])).id)"
  overrides = {"objective.clip_low": 3e-4, "seed": 1, "task.levels": [1, 2], "objective.name": "sapo"}
  turned = dict(reversed(overrides.items()))
  ids = [
    subprocess.run(
      [sys.executable, "-c", code, json.dumps(each)], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    ).stdout.strip()
    for seed, each in (("1", overrides), ("2", turned))
  ]
  # Constants, because a relaunch after an upgrade must still find its workdirs.
  assert ids == ["d8330531", "d8330531"] == [make_row(overrides).id] * 2


def test_ids_distinguish_settings_and_nothing_else():
  assert make_row({"config.seed": 1}).id == make_row({"seed": 1.0}).id
  assert len({make_row({"seed": x}).id for x in (0, 1, True, False, None, "1", (1,))}) == 7


def test_sweep_and_get_hyper_are_equivalent(tmp_path):
  one = written(
    tmp_path, "def sweep(add):\n  for a in (1, 2):\n    for s in (0, 1):\n      add({'num_steps': a}, seed=s)\n", "one.py"
  )
  text = "def get_hyper(h):\n  return h.product([h.sweep('config.num_steps', (1, 2)), h.sweep('seed', range(2))])\n"
  assert rows.read_sweep(one) == rows.read_sweep(written(tmp_path, text, "two.py"))
  assert [row.overrides for row in rows.read_sweep(one)][1] == {"num_steps": 1, "seed": 1}


def test_seeds_multiply_rows(tmp_path):
  multiplied = rows.read_sweep(written(tmp_path, "def sweep(add):\n  add(num_steps=3)\n  add(num_steps=4)\n"), seeds=(5, 7))
  assert [(row.overrides["num_steps"], row.overrides["seed"]) for row in multiplied] == [(3, 5), (3, 7), (4, 5), (4, 7)]


def test_groups_zip_chain_and_stay_fixed():
  zipped = hyper.zipit([hyper.sweep("a", (1, 2)), hyper.fixed("b", 3)])
  assert zipped == [{"a": 1, "b": 3}, {"a": 2, "b": 3}] == hyper.zipit([hyper.sweep("a", (1, 2)), hyper.fixed("b", 3, 2)])
  assert hyper.chainit([zipped, hyper.sweep("c", (4,))]) == [*zipped, {"c": 4}]


@pytest.mark.parametrize(
  "text, message",
  [
    ("x = 1\n", "found neither of sweep"),
    ("def sweep(add): pass\ndef get_hyper(h): pass\n", "found sweep and get_hyper of sweep"),
    ("def sweep(add): pass\n", "sweep made no rows, expected at least one"),
    ("def sweep(add):\n  add(seed=0)\n  add(num_steps=3)\n  add(seed=0)\n", "rows 1 and 3 have the same overrides: seed=0"),
    ("def sweep(add):\n  add(seed=0)\n  add(seed=0.0)\n", "rows 1 and 2 have the same"),
    ("def sweep(add):\n\n  add(seed=1 / 0)\n", r"ZeroDivisionError: division by zero \(line 3\)"),
    ("def sweep(add):\n  add(3)\n", "TypeError: add takes fields by name"),
    ("def sweep(add):\n  add(seed={1})\n", r"seed: found \{1\} \(set\), expected a number"),
    ("def get_hyper(h):\n  return h.zipit([h.sweep('a', (1, 2)), h.sweep('b', (1, 2, 3))])\n", "groups of 2, 3 rows"),
    ("def get_hyper(h):\n  return h.product([h.sweep('a', (1, 2)), h.sweep('a', (3,))])\n", "a: found in two groups"),
    ("def sweep(add)\n", "SyntaxError"),
    ("import no_such_module_at_all\n", r"ModuleNotFoundError: No module named .* \(line 1\)"),
  ],
)
def test_a_file_without_a_valid_sweep_is_refused(tmp_path, text, message):
  with pytest.raises(SweepError, match=message) as caught:
    rows.read_sweep(written(tmp_path, text))
  assert "\n" not in str(caught.value) and "mine.py" in str(caught.value)


def test_a_missing_file_lists_the_existing_ones():
  with pytest.raises(SweepError, match="found no file 'experiments/sweeps/clip.py'.*experiments/sweeps/clip_range.py"):
    rows.read_sweep("experiments/sweeps/clip.py")


def test_every_problem_of_every_row_is_a_line_with_row_and_field():
  good, typo, kind, illegal = (
    make_row(each) for each in ({"seed": 1}, {"objective.clip_lo": 1e-3}, {"seed": "one"}, {"rollout.group_size": 0, "num_steps": -3})
  )
  with pytest.raises(SweepError) as caught:
    rows.check_rows(TINY, {}, [good, typo, kind, illegal])
  lines = str(caught.value).splitlines()
  said = "config.objective.clip_lo: found '0.001', expected None, because objective gspo does not read it and takes clip_low="
  assert lines[0].startswith(f"row {typo.id} (objective.clip_lo=0.001): {said}") and lines[0].endswith("; did you mean 'clip_low'?")
  assert lines[1].startswith(f"row {kind.id} (seed=one): config.seed: found 'one', expected")
  assert len(lines) >= 4 and all(line.startswith(f"row {illegal.id} (") for line in lines[2:])


def test_a_problem_of_all_rows_is_reported_once():
  with pytest.raises(SweepError) as caught:
    rows.check_rows(TINY, {"num_stps": ["3"]}, [make_row({"seed": seed}) for seed in range(3)])
  assert str(caught.value) == "unknown field config.num_stps; did you mean config.num_steps?"


def test_rows_with_the_same_config_collide():
  with pytest.raises(SweepError, match=r"rows \w+ \(seed=0\) and \w+ \(num_steps=4\) give the same config"):
    rows.check_rows(TINY, {}, [make_row({"seed": 0}), make_row({"num_steps": 4})])


def test_a_rows_values_replace_those_of_all_rows():
  configs = rows.check_rows(TINY, {"seed": ["3"], "num_steps": ["7"]}, [row := make_row({"seed": 5, "task.levels": (1, 2, 3)})])
  config = configs[row.id]
  assert (config["seed"], config["num_steps"], config["task.levels"]) == (5, 7, (1, 2, 3))


def test_checking_rows_starts_no_device():
  code = """
import sys
from experiments.launch import rows
rows.check_rows("configs/gspo.py:tiny", {}, rows.read_sweep("experiments/sweeps/clip_range.py"))
assert not {"optuna", "submitit"} & set(sys.modules)
import jax
assert not jax._src.xla_bridge.backends_are_initialized()
"""
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name, config", [("clip_range", "gspo"), ("objectives", "grpo"), ("seeds", "ppo")])
def test_the_sweeps_of_the_repository_are_legal(name, config):
  sweep_rows = rows.read_sweep(f"experiments/sweeps/{name}.py")
  assert len(rows.check_rows(f"configs/{config}.py", {}, sweep_rows)) == len(sweep_rows) >= 5
