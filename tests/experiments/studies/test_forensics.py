"""The study of remedies after an alarm: choice of the collapses, continuations, statistics."""

import itertools
import json
import sys

import jax
import numpy as np
import pytest

from experiments import provenance
from experiments.claims import bed as claims
from experiments.results import from_json
from experiments.studies.alarms import bed
from experiments.studies.alarms.rules import ARMS
from experiments.studies.forensics import __main__ as command
from experiments.studies.forensics import branches, rules
from jaxrl_llm import objectives
from jaxrl_llm.learner.train_step import make_losses
from jaxrl_llm.run.jobs.blame.shares import decompose

FALLEN, WELL = [0.3, 0.6, 0.6, 0.6, 0.6, 0.1, 0.1, 0.1], [0.3] + [0.6] * 7


def run_of(arm, seed, above, accuracy=FALLEN):
  """Returns a run that collapses at step 25, with the KL above its limit at some steps."""
  kl = [0.1 if step in above else 0.0 for step in range(1, 36)]
  metrics = {"actor/ppo_kl_k3": kl, "critic/rewards/mean": [0.5] * 35}
  return {"arm": arm, "seed": seed, "accuracy": accuracy} | metrics


def test_the_first_alarm_in_time_decides():
  assert rules.warning(run_of("grpo", 1, (8, 20))) == ("grpo", 1, "policy_kl", 8, 25)
  assert rules.warning(run_of("grpo", 1, (7, 8, 24))).step == 24  # At 8 an earlier alarm goes on.
  assert rules.warning(run_of("grpo", 1, (7, 25, 26))) is None  # Too early, and too late.
  assert rules.warning(run_of("grpo", 1, (20,), WELL)) is None


def test_arms_take_turns():
  first, second = list(ARMS)[:2]
  runs = [run_of(second, 3, (9,)), run_of(second, 2, (30,)), run_of(second, 1, (9,))]
  runs += [run_of(first, seed, (9,)) for seed in (5, 4, 6)]
  expected = [(first, 4), (second, 1), (first, 5), (second, 3), (first, 6)]
  assert [at[:2] for at in rules.choose(map(rules.warning, runs))] == expected


def test_the_second_run_has_no_collapse_of_the_first():
  pairs = rules.to_repeat(command.records())
  assert len(pairs) == len(set(pairs)) == 61 - rules.SEEN
  first = from_json((command.HERE / "first_run.json").read_text())["runs"]
  assert {(row["arm"], row["seed"]) for row in first}.isdisjoint(pairs)
  assert all(ARMS[arm].objective in rules.CHANGED for arm, _ in pairs)


def rows_of(saved):
  """Returns rows of ten collapses with three draws, by the collapses that each remedy saves."""
  pairs = [(remedy, seed, draw) for remedy in rules.REMEDIES for seed in range(10) for draw in rules.DRAWS]
  well = lambda remedy, seed: seed in saved.get(remedy, ())
  row = lambda remedy, seed, draw: {"arm": "grpo", "seed": seed, "remedy": remedy, "draw": draw}
  return [row(*pair) | {"accuracy": WELL if well(*pair[:2]) else FALLEN} for pair in pairs]


def test_a_remedy_must_save_many_of_several_collapses():
  rows = rows_of({"none": [0], "rate": range(10), "clip": [0, 1, 2, 3], "sapo": [0, 1, 2, 3, 4]})
  judged = rules.judge(rows)
  rate, clip, sapo, drop = (judged[remedy] for remedy in rules.REMEDIES[1:])
  counts = {"saved": 3, "healthy": 3, "neither": 0, "collapsed": 27, "of": 30}
  assert judged["none"] == counts | {"end": pytest.approx(0.15)}
  assert (rate["saved"], rate["more"], rate["fewer"], rate["gain"]) == (30, 27, 0, 0.9)
  assert rate["verdict"] == "saves more"
  assert rate["p"] == 2 * 0.5**27 and rate["p_holm"] == 4 * rate["p"]
  assert sapo["p_holm"] == 3 * 2 * 0.5**12 and sapo["verdict"] == "saves more" and sapo["low"] > 0
  # Nine pairs of three collapses: the sign test alone would believe it.
  assert clip["p_holm"] == 2 * 2 * 0.5**9 < 0.05 and clip["low"] == 0 and clip["verdict"] == "cannot tell"
  assert (drop["more"], drop["fewer"], drop["p"], drop["verdict"]) == (0, 3, 0.25, "cannot tell")


def test_repeats_are_compared_with_the_records():
  row = {"arm": "grpo", "seed": 1, "accuracy": FALLEN, "alarm": "policy_kl"}
  others = [row | {"seed": 2, "alarm": None, "accuracy": WELL}]
  others.append(row | {"seed": 3, "alarm": None, "accuracy": [*FALLEN[:-1], 0.0]})
  records = [{"arm": "grpo", "seed": seed, "accuracy": FALLEN} for seed in (1, 2, 3)]
  assert rules.judge_repeats([row, *others], records) == {"of": 3, "equal": 1, "collapsed": 2, "warned": 1}


def test_the_rules_are_older_than_the_run():
  recorded = from_json((command.HERE / "results.json").read_text())["provenance"]
  doubt = provenance.doubt(recorded, command.HERE / "rules.py")
  assert not doubt, doubt  # None without a history.


def test_the_recorded_rows_give_the_recorded_verdicts():
  stored = from_json((command.HERE / "results.json").read_text())
  assert json.loads(json.dumps(command.judged(stored["provenance"], stored["runs"]))) == stored
  originals = {(row["arm"], row["seed"]): row for row in stored["runs"] if row["remedy"] == "original"}
  warned = [rules.Collapse(*list(row.values())[:5]) for row in originals.values() if row["step"]]
  chosen = {at[:2] for at in rules.choose(warned)[: rules.COUNT]}
  assert chosen == {(row["arm"], row["seed"]) for row in stored["runs"] if row["draw"]}
  for row in stored["runs"]:  # A continuation has the run's own past.
    own, known = originals[row["arm"], row["seed"]], 1 + (row["step"] or 0) // bed.EVERY
    assert row["accuracy"][:known] == own["accuracy"][:known] and row["step"] == own["step"]


TINY = claims.SMOKE._replace(num_layers=1)


@pytest.mark.slow
def test_a_run_in_two_parts_is_the_run_unless_its_draws_are_others():
  arm = bed.Arm("reinforce", lag=2, rate_end=1e-2)
  point, head = bed.advance(bed.start(TINY, 1), TINY, 1, arm, 6, until=3)
  _, tail = bed.advance(point, TINY, 1, arm, 6)
  whole = bed.train(TINY, 1, arm, 6)
  assert {name: head[name] + tail[name] for name in whole} == whole
  losses = [bed.advance(point, TINY, 1, arm, 6, draws=draws)[1]["actor/loss"] for draws in (1, 2)]
  assert tail["actor/loss"] != losses[0] != losses[1]


@pytest.mark.slow
def test_the_group_that_agrees_least_is_left_out():
  arm, at = ARMS["grpo"], bed.start(TINY, 1)
  chosen = np.random.default_rng(1).integers(0, 10, (4, 8))
  batch, _ = bed.draw(claims.make_bed(TINY), at.state.params, chosen, jax.random.key(0), arm)
  rng = np.random.default_rng(0)
  batch = batch._replace(advantages=rng.normal(size=(16, 1)).astype(np.float32) * batch.mask)
  losses = make_losses(claims.make_bed(TINY).score, objectives.make(arm.objective, **dict(arm.settings)))
  parts = [[(row, 1) for row in range(first, first + 4)] for first in range(0, 16, 4)]
  expected = decompose(losses, at.state.params, batch, parts, at_once=4).agreement
  shares = branches.make_shares(TINY, arm.objective, arm.settings)(at.state.params, batch)
  np.testing.assert_allclose(shares.agreement, expected, atol=1e-4)
  edit = branches.without_the_loner(TINY, arm.objective, arm.settings)
  left = np.flatnonzero(edit(at.state, batch).kept.min(axis=1) == 0).tolist()
  worst = int(np.argmin(expected))
  assert left == list(range(4 * worst, 4 * worst + 4))
  # Without a gradient nothing is left out.
  assert edit(at.state, batch._replace(advantages=0 * batch.advantages)).kept.all()


@pytest.mark.exhaustive
def test_a_smoke_run_resumes_and_judges(tmp_path, capsys, monkeypatch):
  with monkeypatch.context() as patched:
    continued = branches.continued
    patched.setattr(branches, "continued", lambda *of: itertools.islice(continued(*of), 2))
    patched.setattr(command, "judged", lambda *of: sys.exit("stopped"))
    with pytest.raises(SystemExit, match="stopped"):
      command.measure(tmp_path, smoke=True)
  assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 6
  assert command.main(["x", "--measure", "--smoke", f"--folder={tmp_path}"]) == 0
  results = from_json((tmp_path / "results.json").read_text())
  assert len(results["runs"]) == 12 and results["repeats"]["of"] == 2 and results["all"]["none"]["of"] == 2
  assert (tmp_path / "figures" / "forensics.png").exists() and "all, drop: " in capsys.readouterr().out
  assert not (tmp_path / "trials.jsonl").exists()


def test_bad_input_is_one_line(capsys, tmp_path):
  assert command.main(["x", "--nonsense"]) == 2 and command.main(["x", "--measure", "--smoke"]) == 2
  assert command.main(["x", f"--folder={tmp_path}"]) == 2
  assert capsys.readouterr().err.count("error: ") == 3
