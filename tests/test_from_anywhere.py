"""An objective, an estimator and a correction of a module outside of the package, with settings."""

import json
import os
import sys

import pytest

from experiments.launch import rows as launch
from jaxrl_llm import evaluate, main
from jaxrl_llm.config import check, command_line
from jaxrl_llm.config.recorded import run_config
from jaxrl_llm.workdir import claim
from tests.runs import ROOT, VARIED, call, quick, rows

OBJECTIVE = '''
from jaxrl_llm.objectives.base import policy_objective
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.segments import token_mean


def scaled(*, width: float = 0.2, kind: str = "both"):
  """Clips.

  Args:
    width: Half-width of the band,
      in units of the ratio.
    kind: Side of the clip.
  """
  low, high = {"both": (width, width), "upper": (1.0, width)}[kind]
  return policy_objective(ratio=token_ratio, gate=hard_clip(low, high), weigh=token_mean)


def gate(log_ratio, advantages, context=None):
  return log_ratio * advantages, {}


def nothing():
  return None


NUMBER = 3
'''
ESTIMATOR = '''
import jax.numpy as jnp

from jaxrl_llm.advantages.estimators import Credit, Estimator


def middle(*, scale: float = 1.0, by_median: bool = False) -> Estimator:
  """Compares with the middle of the batch.

  Args:
    scale: Factor of the advantages.
    by_median: Whether the middle is the median.
  """

  def estimate(evidence, group_size):
    middle = jnp.median(evidence.rewards) if by_median else jnp.mean(evidence.rewards)
    return Credit(scale * (evidence.rewards - middle))

  return Estimator(estimate, compares_groups=False)


def nothing():
  return None
'''
CORRECTION = '''
import jax.numpy as jnp

from jaxrl_llm.objectives.base import require_correctable


def constant(objective, *, weight: float = 1.0, above: int = 0):
  """Weighs every token alike.

  Args:
    weight: Weight of a token.
    above: Number added to it.
  """
  require_correctable(objective)

  def token_loss(outputs, batch):
    importance = jnp.full_like(batch.mask, weight + above)
    return objective.token_loss(outputs, batch._replace(importance=importance))

  return objective._replace(token_loss=token_loss)


def nothing(objective):
  return None
'''
CHOSEN = {
  "objective.name": "far_objective:scaled", "objective.width": "0.3", "objective.kind": "upper",
  "advantage.estimator": "far_estimator:middle", "advantage.scale": "2", "advantage.by_median": "True",
  "correction.terms": "('far_correction:constant:weight=0.5&above=1',)",
}  # fmt: skip
SHORT = {path: str(value) for path, value in VARIED.items()} | {
  "num_steps": "2", "warm_start.num_steps": "2", "eval.every": "2", "checkpoint.every": "1", "log.num_table_rows": "0",
}  # fmt: skip
TINY = "configs/gspo.py:tiny"


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.syspath_prepend(str(tmp_path))
  for name, text in (("far_objective", OBJECTIVE), ("far_estimator", ESTIMATOR), ("far_correction", CORRECTION)):
    (tmp_path / f"{name}.py").write_text(text)
  (tmp_path / "far_broken.py").write_text("import nothing_of_that_name\n")
  yield
  for name in [name for name in sys.modules if name.startswith("far_")]:
    del sys.modules[name]


def override(**fields):
  return command_line.override(command_line.load(TINY), {path.replace("__", "."): [text] for path, text in fields.items()})


def flags(fields):
  return [f"--config.{path}={text}" for path, text in fields.items()]


def test_they_train_resume_sweep_and_evaluate(tmp_path, in_the_checkout):
  args = (f"--config={TINY}", *flags(SHORT | CHOSEN), f"--workdir={tmp_path / 'run'}")
  run = lambda *more: call(*args, *more, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
  first = run()
  assert first.returncode == 0, first.stderr
  longer = run("--config.num_steps=3")
  assert longer.returncode == 2 and "config (num_steps: 2 -> 3)" in longer.stderr
  wider = run("--config.num_steps=3", "--config.objective.width=0.4", "--allow_config_change")
  assert wider.returncode == 0 and "config.objective.width: 0.3 -> 0.4" in wider.stdout, wider.stderr
  saved = json.loads((tmp_path / "run" / "config.json").read_text())
  assert saved["objective"] == {"name": "far_objective:scaled", "width": 0.4, "kind": "upper"}
  assert saved["advantage"] == {"estimator": "far_estimator:middle", "scale": 2.0, "by_median": True, "whiten": False}
  steps = rows(tmp_path / "run", "rl")
  assert [row["step"] for row in steps] == [1, 2, 3] and all(row["actor/grad_norm"] > 0 for row in steps)
  assert run_config(tmp_path / "run").objective.width == 0.4
  with quick():
    assert evaluate.main(["evaluate", f"--checkpoint={tmp_path / 'run'}", "--config.eval.num_prompts=8"]) == 0
  trials = [launch.make_row({"objective.width": width, "advantage.scale": 0.5}) for width in (0.1, 0.2)]
  configs = launch.check_rows(TINY, {path: [text] for path, text in (SHORT | CHOSEN).items()}, trials)
  assert [configs[row.id]["objective.width"] for row in trials] == [0.1, 0.2]


@pytest.mark.parametrize(
  ("fields", "line"),
  [
    ({"objective.widht": "0.3"}, "config.objective.widht: found '0.3', expected None, because objective far_objective:scaled does not read "
     "it and takes width=0.2, kind='both'; did you mean 'width'?"),
    ({"objective.width": "x"}, "config.objective.width: found 'x', expected a number; the file has None"),
    ({"advantage.scal": "2"}, "config.advantage.scal: found '2', expected None, because estimator far_estimator:middle does not read it "
     "and takes scale=1.0, by_median=False; did you mean 'scale'?"),
  ],
)  # fmt: skip
def test_a_setting_that_they_do_not_have_is_one_line(fields, line):
  with pytest.raises(command_line.UsageError) as refused:
    override(**CHOSEN | fields)
  assert str(refused.value) == line


WRONG = {
  "objective.name": ("objective", "far_objective"),
  "advantage.estimator": ("advantage", "far_estimator"),
  "correction.terms": ("correction.terms", "far_correction"),
}


@pytest.mark.parametrize("field", WRONG)
def test_what_cannot_be_made_is_one_line(field):
  section, module = WRONG[field]
  written = (lambda name: f"('{name}',)") if field == "correction.terms" else str
  problem = lambda name: check.config_problems(override(**{field: written(name)}))
  kind = {"advantage": "advantages.estimators.Estimator"}.get(section, "types.Objective")
  for name, part in (
    ("far_away:scaled", "importing 'far_away' raised ModuleNotFoundError: No module named 'far_away'; is its folder on PYTHONPATH?"),
    ("far_broken:scaled", "importing 'far_broken' raised ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    (f"{module}:nothin", "found no 'nothin' in the module, expected one of "),
    (f"{module}:nothing", f"it returned NoneType, expected jaxrl_llm.{kind}"),
  ):
    (line,) = problem(name)
    assert line.startswith(f"config.{section}: ") and part in line and name in line, line
  if section == "objective":
    (line,) = problem("far_objective:NUMBER")
    assert line == "config.objective: objective.name 'far_objective:NUMBER': found int, expected a function of settings by keyword"


def test_a_misspelt_setting_of_a_correction_gets_its_suggestion():
  (line,) = check.config_problems(override(**{"correction.terms": "('far_correction:constant:weigt=2',)"}))
  assert line.startswith("config.correction.terms: far_correction:constant:weigt=2: weigt: found 2, expected None, because correction ")
  assert line.endswith("; did you mean 'weight'?")


def test_a_gate_is_an_objective():
  config = override(**{"objective.name": "far_objective:gate", "objective.weights": "token_mean", "objective.ratio": "sequence"})
  assert check.config_problems(config) == []
  config.objective.clip_low = 0.1
  (line,) = check.config_problems(config)
  assert line.startswith("config.objective.clip_low: found 0.1, expected None, because objective far_objective:gate does not read it")


def test_help_shows_settings_from_the_module(capsys):
  assert main.main(["main", f"--config={TINY}", *flags(CHOSEN), "--help_fields", "objective"]) == 0
  assert "config.objective.width = 0.2; expects a number\n      Half-width of the band, in units of the ratio.\n" in capsys.readouterr().out


def test_a_workdir_of_earlier_versions_opens(tmp_path):
  """They recorded all settings, None for a default, and corrections by their names."""
  config = override(**{"objective.clip_low": "0.01", "correction.tis": "2.0", "learner.old_logprobs": "learner"})
  saved = config.to_dict()
  saved["objective"] |= {"tau_pos": None, "kl_coef": None}
  saved["advantage"] |= {"normalize_std": None, "gamma": None}
  saved["correction"] = {"tis": 2.0, "mis": None, "level": None, "icepop": None, "bypass": False, "off_policy_anchor": None}
  (tmp_path / "config.json").write_text(json.dumps(saved))
  assert claim.changes(tmp_path, config.to_dict()) == {}
  opened = run_config(tmp_path)
  assert opened.objective.to_dict() == {"name": "gspo", "clip_low": 0.01, "clip_high": 0.008}
  assert opened.correction.terms == ("tis:cap=2.0",) and check.config_problems(opened) == []
