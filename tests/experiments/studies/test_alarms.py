"""The study of the alarms: collapses, warnings, and what the recorded runs say."""

import json

import numpy as np
import pytest

from experiments import provenance
from experiments.studies.alarms import __main__ as command
from experiments.studies.alarms import bed, curves, figures, rules
from jaxrl_llm.run.observe import alarms

RECORDED = command.HERE / command.RUNS


@pytest.fixture(scope="module")
def recorded():
  return command.read(RECORDED)


def test_a_collapse_is_for_good_and_begins_where_the_last_fall_begins():
  assert rules.outcome([0.3, 0.6, 0.6, 0.6, 0.1, 0.1, 0.6, 0.1, 0.1, 0.1]) == rules.Outcome("collapsed", 35)
  # Two evaluations are not for good.
  assert rules.outcome([0.3, 0.6, 0.6, 0.6, 0.6, 0.6, 0.1, 0.1]).kind == "neither"
  # Below its start, and not by a quarter.
  assert rules.outcome([0.3, 0.3, 0.3, 0.25, 0.25, 0.25]).kind == "neither"


def test_a_warning_comes_before_and_within_the_horizon():
  assert rules.leads([10, 40], 41) == 31 and rules.leads([41, 50], 41) is None and rules.leads([5], 90) is None


@pytest.mark.parametrize("name", [name for name, rule in rules.RULES.items()])
def test_scores_agree_with_the_alarms_of_a_run(recorded, name):
  """The curve must be that of the rules that runs follow."""
  rule = rules.RULES[name]
  field = {"reward_collapse": "reward_sigmas", "policy_kl": "policy_kl_above"}.get(name, rule.field)
  off = dict.fromkeys(("spike_sigmas", "reward_sigmas", "policy_kl_above", "entropy_fraction", "truncation_above", "no_signal_above"))
  fired = 0
  for run in recorded["runs"][::17]:
    for limit in rule.limits[4::4]:
      state, rows = alarms.new_state(), bed.as_rows(run)
      expected = []
      for step, row in enumerate(rows, 1):
        state, flags, _ = alarms.observe(state, row, step=step, limits=alarms.AlarmLimits(**off | {field: limit}))
        if flags.get(f"alarm/{name}"):
          expected.append(step)
      steps = rules.firing(name, rules.scores(name, run[rule.metric]), limit).tolist()
      assert steps == expected
      assert rules.begins(steps) == state["counts"].get(name, 0)
      fired += len(steps)
  assert fired or name == "truncation"


def test_numbers_of_a_rule():
  healthy = [curves.Counted(seed, None, np.array([], int), 100) for seed in (0, 1)]
  sick = [curves.Counted(0, 50, np.array([30, 31]), 100), curves.Counted(1, 50, np.array([60]), 100)]
  row = curves.numbers([*healthy, *sick])
  assert (row["false_alarms"], row["warned"], row["by_chance"], row["gain"], row["lead"], row["warned_by_10"]) == (0, 0.5, 0, 0.5, 20, 0.5)
  noisy = [x._replace(steps=np.array([10, 12, 40])) for x in healthy]
  row = curves.numbers([*noisy, *sick])
  # The alarm at 12 is that of 10.
  assert (row["false_alarms"], row["by_chance"], row["gain"]) == (20, 1, -0.5)


def test_a_rule_that_does_not_separate_is_off():
  good = {"limit": 1.0, "false_alarms": 1.0, "gain_low": 0.2, "warned": 0.5}
  bad, noisy = good | {"gain_low": 0.05}, good | {"false_alarms": 3.0}
  other = good | {"limit": 2.0, "warned": 0.9}
  decide = lambda tuning, confirming: rules.decide({"tuning": tuning, "confirming": confirming}, 1.0)
  assert decide([good], [good]) == ("stays", 1.0)
  assert decide([good, other], [bad, other]) == ("moves", 2.0) and decide([good, other], [noisy, other]) == ("moves", 2.0)
  assert decide([good, other], [bad, other | {"gain_low": 0.0}]) == ("off", None)
  assert decide([noisy], [bad]) == ("off", None)


def test_the_rules_are_older_than_the_runs(recorded):
  doubt = provenance.doubt(recorded["provenance"], command.HERE / "rules.py")
  assert not doubt, doubt  # None without a history.


def test_defaults_are_what_the_study_decided(recorded):
  results = json.loads((command.HERE / "results.json").read_text())
  limits = alarms.AlarmLimits()
  decided = {name: rule["decision"] for name, rule in results["rules"].items()}
  of_limits = {
    "loss_spike": limits.spike_sigmas, "grad_norm_spike": limits.spike_sigmas, "reward_collapse": limits.reward_sigmas,
    "policy_kl": limits.policy_kl_above, "entropy_collapse": limits.entropy_fraction, "truncation": limits.truncation_above,
    "no_signal": limits.no_signal_above,
  }  # fmt: skip
  assert {name for name, limit in of_limits.items() if limit is not None} == {name for name, what in decided.items() if what != "off"}
  for name, limit in of_limits.items():
    if limit is not None:
      assert rules.separates(curves.at(results["rules"][name], limit, "confirming")), name


@pytest.mark.slow
def test_the_recorded_runs_give_the_recorded_numbers(recorded, tmp_path):
  results = json.loads(json.dumps(curves.judge(recorded["runs"])))
  stored = json.loads((command.HERE / "results.json").read_text())
  assert results["runs"] == stored["runs"] and results["arms"] == stored["arms"]
  for name, rule in results["rules"].items():
    assert (rule["decision"], rule["limit"]) == (stored["rules"][name]["decision"], stored["rules"][name]["limit"])
    np.testing.assert_allclose([x["warned"] for x in rule["curve"]["all"]], [x["warned"] for x in stored["rules"][name]["curve"]["all"]])
  figures.draw(results, tmp_path, ["png"])
  assert (tmp_path / "alarms.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_a_smoke_run_records_what_the_alarms_read(tmp_path, monkeypatch):
  monkeypatch.setattr(command.rules, "ARMS", {"grpo": rules.ARMS["grpo"], "lag begins": rules.ARMS["lag begins"]})
  command.measure(tmp_path, smoke=True)
  record = command.read(tmp_path / command.RUNS)
  assert len(record["runs"]) == 4 and {rule.metric for rule in rules.RULES.values()} <= set(record["runs"][0])
  assert not (tmp_path / "trials.jsonl").exists()


def test_bad_input_is_one_line(capsys, tmp_path):
  assert command.main(["x", "--nonsense"]) == 2 and command.main(["x", "--measure", "--smoke"]) == 2
  assert command.main(["x", f"--folder={tmp_path}"]) == 2
  assert capsys.readouterr().err.count("error: ") == 3
