"""The study of the gradient's noise: its rules on made-up trials, and a small trial."""

import json

import numpy as np
import pytest

from experiments import judging
from experiments.claims.bed import SMOKE
from experiments.studies.noise import __main__ as command
from experiments.studies.noise import bed, figures, protocol, rules

NAMES = tuple(protocol.measured(8))


def trials(exponents=None, seeds=protocol.SEEDS, along=None):
  """Makes trials in which each objective's inflation is a power of the length, with some noise."""
  rng, made = np.random.default_rng(0), []
  for length in protocol.LENGTHS:
    for seed in seeds:
      rows = [
        {"k": k, "objective": name, "part": "all", "inflation": length ** (exponents or {}).get(name, 0.0) * np.exp(0.01 * rng.normal()),
         "along": (along or {}).get(name, 1.0), "std_token": 0.1}
        for k in protocol.STALENESS for name in NAMES
      ]  # fmt: skip
      made.append({"length": length, "seed": seed, "rows": rows})
  return made


def verdicts_of(made):
  return {name: row["verdict"] for name, row in rules.judge({"trials": made, "failed": []}).items()}


def test_slopes_decide_the_rules_of_length():
  rising = verdicts_of(trials({"grpo": 0.5, "token": 0.5, "product": 2.0}))
  assert rising["slope: GRPO's noise over GSPO's grows with length"] == judging.REPRODUCED
  assert rising["slope: product ratio"] == judging.REPRODUCED and rising["slope: equal clips"] == judging.INCONCLUSIVE
  falling = verdicts_of(trials({"grpo": -0.5}))
  assert falling["slope: GRPO's noise over GSPO's grows with length"] == judging.CONTRADICTED
  exponents = {(row["objective"], row["k"]): row["exponent"]["mean"] for row in rules.laws(trials({"grpo": 0.5}))}
  assert exponents["grpo", 7] == pytest.approx(0.5, abs=0.01) and len(exponents) == len(NAMES) * len(protocol.STALENESS)


def test_exponents_are_those_at_equal_drift():
  """An inflation T^a·drift^b, with drifts that fall with length and differ between seeds."""
  made = trials()
  for trial in made:
    scale = (trial["seed"] % 5 + 3) / 5 * (8 / trial["length"]) ** 0.4
    for row in trial["rows"]:
      row["std_token"] = 0.1 * scale * row["k"] ** 0.6
      row["inflation"] = trial["length"] ** 0.3 * row["std_token"] ** 2.0
  at_drift = {(row["objective"], row["drift"]): row for row in rules.equal_drift(made)}
  assert {drift for _, drift in at_drift} == set(rules.DRIFTS) and len({name for name, _ in at_drift}) == len(NAMES)
  for row in at_drift.values():
    assert row["exponent"]["mean"] == pytest.approx(0.3) and 3 <= row["seeds"] <= 12
  assert rules.laws(made)[0]["exponent"]["mean"] == pytest.approx(0.3 - 0.8)


def test_conditions_decide_the_others():
  level = verdicts_of(trials({"gspo 15 %": -0.2, "gspo_token 15 %": -0.2}, along={"gspo 15 %": 2.0, "sequence": 3.0}))
  assert level["along: GSPO above GRPO"] == judging.REPRODUCED and level["along: GSPO above no clip"] == judging.CONTRADICTED
  assert level["sequence ratio is no ratio"] == judging.REPRODUCED and level["clip lowers GSPO's noise"] == judging.REPRODUCED
  assert verdicts_of(trials({"sequence": 0.2}))["sequence ratio is no ratio"] == judging.CONTRADICTED
  assert verdicts_of(trials({"sapo": 0.2}))["SAPO"] == judging.CONTRADICTED
  still = trials()
  for trial in still:
    for row in trial["rows"]:
      row["std_token"] = 1e-4
  assert set(verdicts_of(still).values()) == {judging.NOT_ENGAGED}


@pytest.mark.parametrize(("exponent", "verdict"), [(-1.0, judging.REPRODUCED), (1.0, judging.CONTRADICTED), (0.0, judging.INCONCLUSIVE)])
def test_noise_is_held_against_the_end_of_training(exponent, verdict):
  """The ends are those of the forecast's trials; the noise is made to go with them or against."""
  forecast = command.study.read_trials(command.FORECAST)
  rows = [row for row in forecast if (row["length"], row["updates"], row["stage"]) == (8, 64, "main")]
  ends = {name: np.mean([row["end"] for row in rows if row["objective"] == name]) for name in rules.OUTCOME}
  made = trials({own: exponent * ends[name] * 10 for name, own in rules.OUTCOME.items()})
  row = rules.outcome(made, forecast)
  assert row["verdict"] == verdict and len(row["of"]) == 9
  if exponent:
    assert row["spearman"] == pytest.approx(exponent)


def test_verdicts_wait_for_all_trials():
  part = trials(seeds=protocol.SEEDS[:-1])
  (row,) = rules.judge({"trials": part, "failed": []}).values()
  assert row == {"rule": "trials: 44 of 48 done", "verdict": judging.CALIBRATION}
  # A seed whose imitation fails at one length has no slope, but keeps no one waiting.
  failed = [(64, protocol.SEEDS[-1])]
  kept = [trial for trial in trials() if (trial["length"], trial["seed"]) not in failed]
  judged = rules.judge({"trials": kept, "failed": failed})
  assert judged["SAPO"]["seeds"] == len(protocol.SEEDS) - 1


def test_the_figure_is_drawn_of_complete_trials_alone(tmp_path, capsys):
  made = trials({"grpo": 0.5, "token": 0.5, "product": 2.0, "sapo": -0.2})
  figures.draw(made, rules.laws(made), tmp_path, ["png"])
  assert (tmp_path / "noise_by_length.png").stat().st_size > 10_000
  lines = [json.dumps(command.packed(trial)) for trial in made]
  (tmp_path / "trials.jsonl").write_text("\n".join(lines[:-1]) + "\n")
  command.main(["--judge", "--folder", str(tmp_path)])
  assert "47 of 48" in capsys.readouterr().out and not (tmp_path / "figures").exists()
  (tmp_path / "trials.jsonl").write_text("\n".join(lines) + "\n")
  command.main(["--judge", "--folder", str(tmp_path)])
  assert (tmp_path / "figures" / "noise_by_length.png").exists() and "slope: token ratio" in capsys.readouterr().out


def test_constants_are_of_papers_or_calibrated():
  for length in protocol.LENGTHS:
    own, widths = protocol.measured(length), json.loads(protocol.CALIBRATION.read_text())[str(length)]
    assert own["gspo 15 %"].settings["clip_high"] / own["gspo 15 %"].settings["clip_low"] == pytest.approx(4 / 3)
    assert own["grpo 15 %"].settings["clip_low"] == widths["grpo"] and own["grpo"].settings["clip_low"] == 0.2
    assert own["sapo"].settings == {"tau_pos": 1.0, "tau_neg": 1.05}


def test_a_calibrated_band_leaves_out_its_share():
  rng = np.random.default_rng(1)
  gap, advantages = rng.normal(scale=0.3, size=20_000), rng.choice([-1.0, 0.0, 0.5], size=20_000)
  factor = bed.widths(gap, advantages, 3e-4, 4e-4)
  out = np.where(advantages > 0, np.exp(gap) > 1 + 4e-4 * factor, np.exp(gap) < 1 - 3e-4 * factor)
  assert np.mean(out[advantages != 0]) == pytest.approx(protocol.CLIPPED, abs=1e-3)


@pytest.mark.exhaustive
def test_a_small_trial_has_a_row_for_each_objective_and_policy():
  row = bed.run(8, 1, sizes=SMOKE._replace(digits=(8, 8), num_prompts=1), num_prompts=4)
  whole = {(x["k"], x["objective"]): x for x in row["rows"] if x["part"] == "all"}
  assert set(whole) == {(k, name) for k in protocol.STALENESS for name in NAMES}
  assert np.isfinite(whole[1, "grpo"]["inflation"]) or row["accuracy"] == 0
  assert command.unpacked(command.packed(row)) == row
  assert whole[15, "grpo"]["std_token"] > whole[1, "grpo"]["std_token"] > 0
