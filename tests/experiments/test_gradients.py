"""Noise of gradients: the command, its refusals, and what its rows say."""

import json
import math

import numpy as np
import pytest

from experiments.gradients import __main__ as command
from experiments.gradients import measure, names
from jaxrl_llm import objectives
from jaxrl_llm.learner.gradient_noise import make_moments
from tests.learner.test_gradient_noise import bigram_problem, bigrams
from tests.runs import quick

OWN = """
from jaxrl_llm.objectives import make

def halved(clip: float = 0.2):
  return make("dapo", clip_low=clip / 2, clip_high=clip / 2)

def nothing():
  return 3
"""
CONFIG = "--config=configs/gspo.py:tiny"


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "--config is missing"),
    ([CONFIG, "--step=1"], "unknown argument '--step=1'; did you mean 'steps'?"),
    ([CONFIG, "--responses=1"], "--responses: found '1', expected a whole number of at least 2"),
    ([CONFIG, "--objectives="], "--objectives: found none"),
    ([CONFIG, "--checkpoint=no_such_run"], "--checkpoint: found 'no_such_run', which does not exist"),
    ([CONFIG, "--checkpoint=model.gguf"], "--checkpoint: found 'model.gguf', expected WORKDIR or WORKDIR@NUMBER of a run"),
    ([CONFIG, "--parts=thirds"], "--parts: found 'thirds', expected some of halves,frequency,clip"),
    ([CONFIG, "--config.rollout.staleness=1", "--config.mesh.sampler=1"], "config.rollout.staleness: found 1, expected 0"),
  ],
)
def test_bad_flags_are_refused_before_anything_is_loaded(flags, message, capsys):
  assert command.main(flags) == 2
  assert message in capsys.readouterr().err


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("gsop", "did you mean 'gspo'?"),
    ("gspo(clip_hihg=1)", "did you mean 'clip_high'?"),
    ("gspo(clip_high=", "expected settings by name"),
    ("gspo(**{})", "expected settings by name"),
    ("own_objective:halve", "found no 'halve' in the module, expected one of halved, make, nothing; did you mean 'halved'?"),
    ("own_objective:nothing", "it returned int, expected jaxrl_llm.types.Objective"),
    ("own_objective:halved(width=1)", "calling it raised TypeError"),
    ("no_such_module:f", "is its folder on PYTHONPATH?"),
  ],
)
def test_objectives_that_do_not_exist_are_refused(text, message, tmp_path, monkeypatch):
  (tmp_path / "own_objective.py").write_text(OWN)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match="--objectives") as error:
    names.named(text)
  assert message in str(error.value) and "\n" not in str(error.value)


def measured(losses, seed=0, **options):
  params, batch = bigram_problem(seed=seed, in_groups=True)
  options = dict(outputs_fn=bigrams, moments_fn=make_moments(bigrams, at_once=2)) | options
  return batch, measure.measure([batch], params, losses, **options)


def test_parts_of_tokens_add_up_to_the_whole_gradient(x64):
  losses = {name: objectives.make(name, **settings) for name, settings in (("dapo", {"kl_coef": 0.0}), ("sapo", {}))}
  _, result = measured(losses, parts=list(measure.PARTS.values()))
  assert tuple(measure.PARTS) == command.PARTS
  totals = {loss: result.moments.totals[place] for loss, place in result.places.items()}
  for name in losses:
    for pair in (("early", "late"), ("rare", "frequent")):
      np.testing.assert_allclose(sum(totals[name, part] for part in pair), totals[name, "all"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(totals[name, "clipped"] + totals[name, "kept"], totals[name, "no ratio"], rtol=1e-9, atol=1e-12)
  assert result.clipped["sapo"] == 0 < result.clipped["dapo"] < 1
  assert result.effective["sapo"] > result.effective["dapo"]


def test_rows_compare_noise_with_the_gradient_without_a_ratio(x64):
  losses = {"grpo": objectives.make("grpo", kl_coef=0.0), "reinforce": objectives.make("reinforce")}
  batch, result = measured(losses)
  _, fresh = measured(losses, seed=1, only_plain=True)
  assert len(set(fresh.places.values())) == 2 and len(set(result.places.values())) == 3
  rows = {(row["objective"], row["part"]): row for row in measure.rows_of(result, fresh)}
  assert rows["reinforce", "all"]["inflation"] == pytest.approx(1, rel=1e-12) and rows["reinforce", "all"]["effective"] == 1
  grpo, plain = rows["grpo", "all"], rows["grpo", "no ratio"]
  assert grpo["inflation"] == pytest.approx(grpo["noise"] / plain["noise"]) and grpo["responses"] == 7
  assert {"cosine", "length", "error"} <= grpo.keys() and ("grpo", "clipped") not in rows
  assert len(np.unique(np.asarray(batch.groups))) == 2


@pytest.mark.slow
def test_a_run_measures_an_objective_of_a_file(tmp_path, monkeypatch, capsys):
  (tmp_path / "own_objective.py").write_text(OWN)
  monkeypatch.syspath_prepend(tmp_path)
  flags = [
    CONFIG, "--objectives=gspo,own_objective:halved(clip=0.01)", "--responses=32", "--steps=1", "--at_once=4",
    f"--json={tmp_path / 'out.json'}",
    "--config.reward.overlong_buffer=16", "--config.warm_start.num_steps=4", "--config.learner.learning_rate=3e-3",
    "--config.learner.warmup_steps=1", "--parts=halves,clip",
  ]  # fmt: skip
  with quick():
    assert command.main(flags) == 0
  out = capsys.readouterr().out
  result = json.loads((tmp_path / "out.json").read_text())
  rows = {(row["objective"], row["part"]): row for row in result["rows"]}
  assert result["updates"] == 2 and result["projection_error"] is None
  own = rows["own_objective:halved(clip=0.01)", "all"]
  assert own["responses"] >= 32 and own["noise"] > 0 and 0 < own["clipped"] < 1 and math.isfinite(own["inflation"])
  assert {part for name, part in rows if name == "gspo"} == {"all", "no ratio", "early", "late", "clipped", "kept"}
  assert "own_objective:halved(clip=0.01)" in out and "inflation" in out
