"""Searches: draws, relaunches and the results that Optuna is told. The trials are small scripts."""

import csv
import json
import subprocess
import sys

import pytest

from experiments.launch import __main__ as launcher
from experiments.launch import hyper, local, rows, searching, trial
from experiments.launch.rows import SweepError

SPACE = {"learner.learning_rate": hyper.log_uniform(1e-4, 1e-2), "task.levels": hyper.choice(((1, 2), (1, 3))), "num_steps": 60}


def draw(folder, count, **more):
  search = searching.open_search(folder, SPACE, **more)
  drawn = []
  for _ in range(count):
    drawn.append(searching.ask(search))
    searching.tell(search, drawn[-1], -abs(drawn[-1].overrides["learner.learning_rate"] - 1e-3))
  return drawn


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_the_nth_draw_is_the_same_after_a_relaunch(kind, tmp_path):
  whole = draw(tmp_path / "a", 14, kind=kind)
  assert draw(tmp_path / "b", 6, kind=kind) + draw(tmp_path / "b", 8, kind=kind) == whole
  assert draw(tmp_path / "c", 3, kind=kind, seed=1) != whole[:3]
  rates = [row.overrides["learner.learning_rate"] for row in whole]
  assert len(set(rates)) == 14 and min(rates) >= 1e-4 and max(rates) <= 1e-2 and all(float(f"{x:.4g}") == x for x in rates)
  assert {row.overrides["task.levels"] for row in whole} == {(1, 2), (1, 3)} and {row.overrides["num_steps"] for row in whole} == {60}


def test_tpe_learns_from_what_it_is_told(tmp_path):
  distance = lambda drawn: sum(abs(row.overrides["learner.learning_rate"] - 1e-3) for row in drawn)
  assert distance(draw(tmp_path / "tpe", 40, kind="tpe")[20:]) < 0.5 * distance(draw(tmp_path / "random", 40)[20:])


def test_a_space_is_exhausted(tmp_path):
  search = searching.open_search(tmp_path, {"seed": hyper.choice((0, 1)), "num_steps": hyper.integers(3, 4)})
  assert len({searching.ask(search).id for _ in range(4)}) == 4
  with pytest.raises(SweepError, match="the space has no more rows than these 4"):
    searching.ask(search)


def test_failures_are_told_as_failures(tmp_path):
  search = searching.open_search(tmp_path, SPACE)
  for value in (0.5, None, float("nan"), 0.25):
    searching.tell(search, searching.ask(search), value)
  states = [(one.state.name, one.value) for one in search.study.trials]
  assert states == [("COMPLETE", 0.5), ("FAIL", None), ("FAIL", None), ("COMPLETE", 0.25)]
  row = searching.ask(search)
  assert searching.asked(searching.open_search(tmp_path, SPACE))[-1] == (row, False)
  searching.tell(search, row, 1.0)
  searching.tell(search, row, 2.0)  # Has no effect, because the row has a result already.
  assert search.study.best_value == 1.0


@pytest.mark.parametrize(
  "space, message",
  [({}, "found nothing to draw"), ({"seed": 1}, "found nothing to draw"), ([hyper.choice((1, 2))], "found nothing to draw")],
)
def test_a_space_with_nothing_to_draw_is_refused(space, message, tmp_path):
  with pytest.raises(SweepError, match=message):
    searching.open_search(tmp_path, space)


def test_a_changed_space_is_refused(tmp_path):
  searching.ask(searching.open_search(tmp_path, {"seed": hyper.choice((0, 1))}))
  with pytest.raises(SweepError, match="it differs from the space with which this folder's search began"):
    searching.ask(searching.open_search(tmp_path, {"seed": hyper.choice((0, 1, 2))}))


@pytest.mark.parametrize("make", [lambda: hyper.uniform(2, 1), lambda: hyper.log_uniform(0, 1), lambda: hyper.choice(())])
def test_invalid_distributions_are_refused(make):
  with pytest.raises(ValueError, match="expected"):
    make()


FILE = """
def space(h):
  return {"learner.learning_rate": h.log_uniform(1e-4, 1e-2), "seed": h.choice((0, 1, 2))}
"""
TRAIN = """
import json, os, pathlib, sys
flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
workdir.mkdir(parents=True, exist_ok=True)
count = len(list(workdir.iterdir()))
(workdir / str(count)).touch()
rate = float(flags["config.learner.learning_rate"])
if rate > 2e-3: sys.exit(1)
if rate < 3e-4 and not count: os.kill(os.getpid(), 9)
(workdir / "summary.json").write_text(json.dumps({"status": "finished", "accuracy_final": rate}))
"""


def test_a_search_with_failed_and_killed_trials_is_resumed(tmp_path, monkeypatch, capsys):
  (tmp_path / "space.py").write_text(FILE)
  (tmp_path / "train.py").write_text(TRAIN)
  monkeypatch.setattr(local, "command", lambda one, own: [sys.executable, str(tmp_path / "train.py"), *one.command[3:]])
  folder = tmp_path / "f"
  args = ["--config=configs/gspo.py:tiny", f"--sweep={tmp_path / 'space.py'}", f"--folder={folder}", "--search=random", "--max_parallel=2"]
  assert launcher.main([*args, "--num_trials=8"]) == 1
  first = states(folder)
  assert set(first.values()) == {"finished", "failed", "stopped"} and len(first) == 8
  assert launcher.main([*args, "--num_trials=10"]) == 1
  second = states(folder)
  assert list(second)[:8] == list(first) and len(second) == 10
  # Killed trials were resumed, failures count, and two rows were drawn anew.
  assert all(second[row] == ("finished" if state == "stopped" else state) for row, state in first.items())
  search = searching.open_search(folder, searching.read_space(str(tmp_path / "space.py")))
  told = {one.user_attrs["row"]: one.state.name for one in search.study.trials}
  assert all(told[row] == {"finished": "COMPLETE", "failed": "FAIL", "stopped": "RUNNING"}[state] for row, state in second.items())
  best = max(json.loads(path.read_text())["accuracy_final"] for path in folder.glob("*/summary.json"))
  assert f"best accuracy_final: {best:.6g}, " in capsys.readouterr().out.splitlines()[-1]


def states(folder):
  with open(folder / "summary.csv", newline="") as file:
    return {row["id"]: row["state"] for row in csv.DictReader(file)}


def test_fields_of_a_space_are_checked_before_anything_starts(tmp_path, capsys):
  text = 'def space(h):\n  return {"learner.learning_rat": h.uniform(0, 1), "seed": h.choice((0, "one")), "num_steps": h.uniform(3, 4)}\n'
  (tmp_path / "space.py").write_text(text)
  args = ["--config=configs/gspo.py:tiny", f"--sweep={tmp_path / 'space.py'}", f"--folder={tmp_path / 'f'}", "--search=tpe"]
  assert launcher.main([*args, "--num_trials=2"]) == 2
  lines = capsys.readouterr().err.splitlines()
  assert "did you mean config.learner.learning_rate?" in lines[0] and "config.seed: found 'one'" in lines[1]
  assert "config.num_steps" in lines[2] and not (tmp_path / "f").exists()


def test_every_choice_of_the_repositorys_space_is_legal():
  for field, each in searching.read_space("experiments/sweeps/learning_rate.py").items():
    values = each.values if isinstance(each, hyper.Choice) else (each.low, each.high)
    for config in ("configs/gspo.py", "configs/gspo.py:tiny"):
      rows.check_rows(config, {"seed": ["3"]}, [rows.make_row({field: value}) for value in values])


def test_draws_that_cannot_run_are_drawn_again(tmp_path, capsys):
  sweep = trial.Sweep("mine", "configs/gspo.py:tiny", {}, tmp_path, str(tmp_path))
  request = type("Request", (), {"sweep": sweep})
  search = searching.open_search(tmp_path, {"rollout.group_size": hyper.choice((-1, 4)), "seed": hyper.integers(0, 10**6)})
  drawn = [searching._ask_possible(request, search) for _ in range(4)]
  assert {row.overrides["rollout.group_size"] for row in drawn} == {4}
  assert "note: a drawn row was refused, rollout.group_size=-1" in capsys.readouterr().out


def test_without_optuna_the_extra_is_named():
  code = """
import pathlib, sys
sys.modules["optuna"] = None
from experiments.launch import hyper, searching
try:
  searching.open_search(pathlib.Path("nowhere"), {"seed": hyper.choice((0, 1))})
except ImportError as error:
  print(error)
"""
  text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
  assert text.startswith('--search needs Optuna: pip install "jaxrl-llm[sweeps]"')
