"""Tests of entries to the leaderboard: files, and objects of modules outside of the package."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from experiments.claims import bed as beds
from experiments.claims import study
from experiments.studies.forecast import __main__ as command
from experiments.studies.forecast import board, entry, protocol
from jaxrl_llm import objectives
from tests.runs import ROOT
from tests.test_from_anywhere import CORRECTION, ESTIMATOR, OBJECTIVE

FILE = """
from jaxrl_llm import objectives
ADVANTAGES = "centred"
def objective(*, factor, length):
  slots = dict(ratio="sequence", gate="soft", weights="sequence_mean")
  return objectives.make("custom", **slots, tau_pos=factor, tau_neg=factor)
"""
ENTERED = {
  "enter": "far_objective:scaled:width=0.3&kind=upper", "scaled": "width",
  "estimator": "far_estimator:middle:scale=2&by_median=True", "correction": "far_correction:constant:weight=0.5&above=1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
  """Makes three modules and removes what they enter from the registry after each test."""
  monkeypatch.setattr(objectives, "OBJECTIVES", dict(objectives.OBJECTIVES))
  monkeypatch.syspath_prepend(str(tmp_path))
  for name, text in (("far_objective", OBJECTIVE), ("far_estimator", ESTIMATOR), ("far_correction", CORRECTION)):
    (tmp_path / f"{name}.py").write_text(text)
  yield
  for name in [name for name in sys.modules if name.startswith("far_")]:
    del sys.modules[name]


def flags(tmp_path, **changed):
  return [f"--folder={tmp_path}", *(f"--{name}={value}" for name, value in (ENTERED | changed).items() if value)]


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("gone.py", None, "--enter: found no file .*gone.py, expected a Python file with `objective"),
    ("gspo.py", FILE, "--name: found 'gspo', expected letters, digits and _ . -, and no name of an objective of the package"),
    ("mine.py", "x = 1", "mine.py: found no `objective"),
    ("mine.py", "import nothing_of_that_name", "importing .*mine.py raised ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    ("mine.py", "def objective(width): pass", "mine.py: found no `objective"),
    ("mine.py", "def objective(*, factor, length): pass", "mine.py: it returned NoneType, expected jaxrl_llm.types.Objective"),
    ("mine.py", FILE.replace('"centred"', '"centered"'), r"found 'centered' \(did you mean 'centred'\?\), expected one of group"),
    ("mine.py", FILE.replace("tau_neg=factor", "tau_neg=factor, kl_coef=0.1"), "an objective without need of ref_logprobs"),
  ],
)
def test_a_bad_file_is_refused_in_one_line(name, text, message, tmp_path):
  path = tmp_path / name
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError, match=message) as error:
    entry.enter(str(path))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("changed", "line"),
  [
    ({"enter": "far_away:scaled"}, "--enter: objective.name 'far_away:scaled': importing 'far_away' raised ModuleNotFoundError: No module "
     "named 'far_away'; is its folder on PYTHONPATH?"),
    ({"enter": "far_objective:scalde"}, "--enter: objective.name 'far_objective:scalde': found no 'scalde' in the module, "),
    ({"enter": "far_objective:scaled:widht=0.3"}, "--enter.widht: found 0.3, expected None, because objective far_objective:scaled "
     "does not read it and takes width=0.2, kind='both'; did you mean 'width'?"),
    ({"enter": "far_objective:scaled:width=x", "scaled": None}, "--enter.width: found 'x', expected a number"),
    ({"enter": "far_objective:nothing", "scaled": None}, "it returned NoneType, expected jaxrl_llm.types.Objective"),
    ({"enter": "gsop", "scaled": None}, "--enter: found no file gsop, expected a Python file with `objective(*, factor, length)`, "),
    ({"enter": "gspo", "scaled": None, "estimator": None, "correction": None}, "--enter: found 'gspo', expected an --estimator or a "
     "--correction beside it, because it has a row already"),
    ({"enter": "gspo"}, "--scaled: found width, expected none, because gspo scales its own width"),
    ({"scaled": "kind"}, "--scaled.kind: found 'upper', expected a number that the tuning can multiply"),
    ({"scaled": "widht"}, "--scaled: found 'widht', expected settings of objective far_objective:scaled: width, kind; did you mean "
     "'width'?"),
    ({"estimator": "far_estimator:middle:scal=2"}, "--estimator.scal: found 2, expected None, because estimator far_estimator:middle does "
     "not read it and takes scale=1.0, by_median=False; did you mean 'scale'?"),
    ({"estimator": "far_estimator:nothing"}, "--estimator: advantage.estimator 'far_estimator:nothing': it returned NoneType, expected "),
    ({"estimator": "gae"}, "--estimator: found 'gae', expected an estimator without need of values, which the bed does not have"),
    ({"correction": "far_correction:constant:weigt=2"}, "--correction: far_correction:constant:weigt=2: weigt: found 2, expected None, "),
    ({"correction": "top_entropy:share=0.2"}, "expected an objective without need of old_entropy, which the bed does not have"),
    ({"name": "grpo again"}, "--name: found 'grpo again', expected letters, digits and _ . -, and no name of an objective of the package"),
  ],
)  # fmt: skip
def test_what_cannot_be_entered_is_one_line(changed, line, tmp_path):
  with pytest.raises(SystemExit, match="^error: ") as refused:
    command.main(flags(tmp_path, **changed))
  assert line in str(refused.value) and "\n" not in str(refused.value)
  assert not (tmp_path / "entries").exists()


def test_a_refusal_starts_no_jax(tmp_path):
  code = f"""
from experiments.studies.forecast import __main__ as command
try:
  command.main({[*flags(tmp_path, estimator="far_estimator:middle:scal=2")]!r})
except SystemExit as refused:
  print(refused)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
  env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
  assert done.returncode == 0 and done.stdout.startswith("error: --estimator.scal: found 2"), done.stderr


def test_choices_of_an_entry_need_an_entry(tmp_path, capsys):
  with pytest.raises(SystemExit):
    command.main(["--status", "--estimator=opo", f"--folder={tmp_path}"])
  assert "--estimator: expected --enter beside it" in capsys.readouterr().err


def test_the_tuning_scales_the_width_alone():
  entered = entry.enter(ENTERED["enter"], scaled=["width"])
  assert entered[:3] == ("scaled", "group", "none") and entered.outside == f"objective `{ENTERED['enter']}`, scaled `width`"
  wide, own = objectives.make("scaled", factor=2.0, length=8), objectives.factory("far_objective:scaled")(width=0.6, kind="upper")
  log_ratio, ones = np.log(np.array([[0.3, 1.5, 1.7]], np.float32)), np.ones((1, 3), np.float32)
  values = [objectives.value(objective, log_ratio, 0 * ones, ones, ones)[0] for objective in (wide, own)]
  assert values[0] == values[1] != objectives.value(objectives.make("scaled", factor=1.0, length=8), log_ratio, 0 * ones, ones, ones)[0]


def test_the_bed_takes_an_estimator_by_its_import_path():
  rewards, batch = np.array([1.0, 0, 0, 1], np.float32), beds.rectangle(np.ones((4, 2), int), np.ones((4, 3), int), np.ones((4, 3)))
  taken, _ = beds.credit(beds.Arm("grpo", advantages=ENTERED["estimator"]), rewards, batch, 2, 0.0)
  np.testing.assert_array_equal(taken, 2 * (rewards - 0.5)[:, None] * batch.mask)
  of_package, _ = beds.credit(beds.Arm("grpo", advantages="opo"), rewards, batch, 2, 0.0)
  np.testing.assert_allclose(of_package, beds.credit(beds.Arm("grpo", advantages="centred"), rewards, batch, 2, 0.0)[0])


@pytest.mark.slow  # Compiles an objective and two samplers.
@pytest.mark.usefixtures("small")
def test_an_entry_from_outside_is_tuned_trained_and_shown(tmp_path, capsys):
  own = protocol.main_trials([*protocol.OBJECTIVES, protocol.AGAIN])
  done = [row | {"area": 0.5, "rate": 1e-3, "factor": 1.0, "processor_seconds": 1.0} for row in own]
  (tmp_path / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in done))
  stored, mine = (tmp_path / "trials.jsonl").read_text(), tmp_path / "entries" / "mine.jsonl"
  command.main([*flags(tmp_path, name="mine"), "--seconds=0"])
  assert "mine" not in (tmp_path / board.PAGE).read_text() and not mine.exists()
  command.main(flags(tmp_path, name="mine"))
  printed, rows = capsys.readouterr().out, study.read_trials(mine)
  assert "objective mine, seed 601" in printed and [row["stage"] for row in rows] == 4 * ["tune"] + 4 * ["main"]
  assert (tmp_path / "trials.jsonl").read_text() == stored, "its rows are stored apart"
  terms = f"objective `{ENTERED['enter']}`, scaled `width`, estimator `{ENTERED['estimator']}`, correction `{ENTERED['correction']}`"
  page = (tmp_path / board.PAGE).read_text()
  assert "| mine (from outside) | " in page and page.endswith(f"\nFrom outside:\n\n- mine: {terms}; 4 of 4 trials\n")
  command.main(flags(tmp_path, name="mine"))
  assert "area" not in capsys.readouterr().out.partition("tune:")[0], "nothing is left to run"
  mine.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
  page = board.write(tmp_path, done).read_text()
  assert "| mine (from outside) | " not in page and "; 3 of 4 trials" in page, "a condition waits for all seeds"
  with pytest.raises(SystemExit, match="--name: found 'mine', expected another name, because this one has trials with objective `far"):
    command.main(flags(tmp_path, name="mine", estimator=None))
  (tmp_path / "far_estimator.py").write_text(ESTIMATOR + "# Changed.\n")
  with pytest.raises(SystemExit, match="expected another name, because this one has trials of its code before a change"):
    command.main(flags(tmp_path, name="mine"))


@pytest.mark.exhaustive  # Compiles one more objective.
@pytest.mark.usefixtures("small")
def test_a_file_trains_as_before(tmp_path):
  (tmp_path / "mine.py").write_text(FILE)
  entered = entry.enter(str(tmp_path / "mine.py"))
  row = command.run(protocol.tuning(["mine"])[1], entered)
  assert row["objective"] == "mine" and row["outside"] == f"objective `{tmp_path / 'mine.py'}`" and np.isfinite(row["area"])
