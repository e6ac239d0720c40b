"""The studies of the bed: the rules of E15 and E17 on trials made by hand, and their commands."""

import json

import numpy as np
import pytest

from experiments.claims import bed as beds
from experiments.claims import running_sums, study
from experiments.claims.gate_asymmetry import __main__ as gate_asymmetry
from experiments.claims.gate_asymmetry import rules as gate_rules
from experiments.claims.mismatch import __main__ as mismatch
from experiments.claims.mismatch import rules as mismatch_rules
from experiments.claims.precision import __main__ as precision
from experiments.claims.precision import distortion
from experiments.claims.precision import rules as precision_rules
from experiments.results import from_json

SMALL = {"entropy": [0.7, 0.4], "grad_norm": [1.0, 2.0], "kl": 0.1, "gap": 0.1, "collapse": "", "samples": 8}


def gate_trials(accuracy, **other):
  """Trials in which each pair of gates is right on so many of 8 samples."""
  return [
    SMALL | {"gates": gates, "rate": rate, "seed": seed, "right": f"{accuracy[gates]}{accuracy[gates]}"} | other
    for gates in gate_rules.PAIRS for rate in gate_rules.RATES for seed in range(5)
  ]  # fmt: skip


def test_the_gates_are_told_apart():
  name = "E15, accuracy above pos sharper, hot rate"
  better, worse = {"neg sharper": 7, "equal": 6, "pos sharper": 3}, {"neg sharper": 3, "equal": 6, "pos sharper": 7}
  assert gate_rules.judge(gate_trials(better))[name]["verdict"] == "reproduced"
  assert gate_rules.judge(gate_trials(worse))[name]["verdict"] == "not reproduced"
  assert gate_rules.judge(gate_trials(better, kl=1e-4))[name]["verdict"] == "mechanism not engaged"


def test_collapses_of_the_gates_are_counted():
  name, trials = "E15, collapses, hot rate", gate_trials(dict.fromkeys(gate_rules.PAIRS, 5))
  assert gate_rules.judge(trials)[name]["verdict"] == "mechanism not engaged", "none collapses"
  fallen = [row | {"collapse": "reward" if row["gates"] == "pos sharper" and row["seed"] < 2 else ""} for row in trials]
  assert gate_rules.judge(fallen)[name]["verdict"] == "reproduced"
  fallen = [row | {"collapse": "reward" if row["seed"] < 2 else ""} for row in trials]
  assert gate_rules.judge(fallen)[name]["verdict"] == "not reproduced"


def mismatch_trials(accuracy, **other):
  return [
    SMALL | {"way": way, "sampler": sampler, "seed": seed, "right": f"{accuracy[way]}{accuracy[way]}"} | other
    for sampler in mismatch_rules.SAMPLERS for way in mismatch_rules.WAYS for seed in range(5)
  ]  # fmt: skip


def test_the_need_of_a_correction_is_told():
  name = "E17, accuracy: IS above none, T = 1.4"
  better, worse = {"IS": 7, "none": 3, "length norm": 5}, {"IS": 3, "none": 7, "length norm": 5}
  assert mismatch_rules.judge(mismatch_trials(better))[name]["verdict"] == "reproduced"
  assert mismatch_rules.judge(mismatch_trials(worse))[name]["verdict"] == "not reproduced"
  assert mismatch_rules.judge(mismatch_trials(better, gap=1e-6))[name]["verdict"] == "mechanism not engaged"


def distortion_rows(**gspo):
  """Rows in which GRPO's errors are 0.2 of everything."""
  every = {"grpo": {}, "gspo": gspo, "sapo": {}}
  names = dict.fromkeys(("weight", "ratio", "flips", "clipped", "gap", "k3"), 0.2)
  return [
    {"seed": seed, "objective": objective, "error": error} | names | {name: x + 0.001 * seed for name, x in changes.items()}
    for seed in range(5) for error in precision_rules.ERRORS for objective, changes in every.items()
  ]  # fmt: skip


def test_what_wrong_log_probabilities_do_is_told():
  verdicts = precision_rules.judge_distortion(distortion_rows(ratio=0.1, flips=0.3))
  assert verdicts["E16, ratios, error 0.02"]["verdict"] == "reproduced"
  assert verdicts["E16, membership, error 0.02"]["verdict"] == "not reproduced"
  nobody = [row | {"flips": 0.0} for row in distortion_rows()]
  assert precision_rules.judge_distortion(nobody)["E16, membership, error 0.02"]["verdict"] == "mechanism not engaged"
  right = {"recompute": 6, "none": 6, "tis": 7, "mis": 5}
  trials = [
    SMALL | {"objective": objective, "way": way, "seed": seed, "right": f"{right[way]}{right[way]}"}
    for objective in precision_rules.OBJECTIVES for way in precision_rules.WAYS for seed in range(5)
  ]  # fmt: skip
  found = {name: row["verdict"] for name, row in precision_rules.judge(trials, distortion_rows()).items()}
  assert found["E16, training: gspo needs no recomputation"] == found["E16, training: grpo gains by tis"] == "reproduced"
  assert found["E16, training: sapo gains by mis"] == "not reproduced"
  near = [row | {"k3": 1e-6} for row in distortion_rows()]
  assert {row["verdict"] for row in precision_rules.judge(trials, near).values()} == {"mechanism not engaged"}


def test_an_error_of_one_token_reaches_the_whole_sequence_of_gspo_and_shrinks():
  batch = running_sums.rectangle(np.zeros((1, running_sums.PROMPT_TOKENS), np.int32), np.zeros((1, 4), np.int32), np.ones((1, 4), bool))
  wrong = batch._replace(old_logprobs=batch.old_logprobs - 0.2 * (np.arange(batch.mask.shape[1]) == running_sums.PROMPT_TOKENS)[None])
  found = {name: distortion.compare(arm, batch.old_logprobs, batch, wrong) for name, arm in precision_rules.OBJECTIVES.items()}
  assert found["grpo"]["ratio"] == pytest.approx((np.exp(0.2) - 1) / 4, rel=1e-5)
  assert found["gspo"]["ratio"] == pytest.approx(np.exp(0.05) - 1, rel=1e-5)
  assert found["grpo"]["flips"] == 0.25 and found["gspo"]["flips"] == 1, "1.22 is above 1.2; 1.051 is above 1.01 for all four tokens"
  assert found["sapo"]["flips"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
  ("command", "claim"), [(gate_asymmetry, "E15"), (precision, "E16"), (mismatch, "E17")], ids=["E15", "E16", "E17"]
)
def test_a_smoke_run_writes_verdicts_and_a_figure(command, claim, tmp_path, capsys):
  command.main(["--smoke", f"--folder={tmp_path}"])
  results = from_json((tmp_path / "results.json").read_text())
  assert results["verdicts"] and all(name.startswith(claim) for name in results["verdicts"])
  assert not (tmp_path / "trials.jsonl").exists() and list((tmp_path / "figures").glob("*.png"))
  command.main(["--plot_only", f"--folder={tmp_path}", "--format", "pdf"])
  assert list((tmp_path / "figures").glob("*.pdf")) and claim in capsys.readouterr().out


def a_study(judge=lambda trials: {}):
  arms = [({"arm": name}, beds.Arm("reinforce")) for name in ("a", "b")]
  return study.Study("experiments.claims.made_up", "A study.", (arms[:1], arms[1:]), (0, 1), judge, lambda *_: None)


def test_a_stopped_study_goes_on_where_it_was(tmp_path, monkeypatch):
  ran = []

  def run(sizes, names, arm):
    if len(ran) == 3:
      raise KeyboardInterrupt
    ran.append((names["arm"], names["seed"]))
    return names | {"processor_seconds": 1.0, "wall_seconds": 2.0}

  monkeypatch.setattr(study, "run", run)
  with pytest.raises(KeyboardInterrupt):
    study.measure(a_study(), beds.SMOKE, (0, 1), tmp_path)
  assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 3
  assert len(from_json((tmp_path / "results.json").read_text())["trials"]) == 2, "the first block is judged on its own"
  monkeypatch.setattr(study, "run", lambda sizes, names, arm: ran.append((names["arm"], names["seed"])) or names | json.loads(
    '{"processor_seconds": 1.0, "wall_seconds": 2.0}'))  # fmt: skip
  study.measure(a_study(), beds.SMOKE, (0, 1), tmp_path)
  assert ran == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
  results = from_json((tmp_path / "results.json").read_text())
  assert results["processor_seconds"] == 4 and len(results["trials"]) == 4 and not (tmp_path / "trials.jsonl").exists()


def test_a_study_refuses_what_it_cannot_do(tmp_path):
  with pytest.raises(SystemExit, match="error: --smoke would write over the measured results"):
    study.main(a_study(), ["--smoke"], tmp_path)
  with pytest.raises(SystemExit, match="found no such file"):
    study.main(a_study(), ["--plot_only"], tmp_path)


def test_a_trial_whose_line_was_cut_is_run_again(tmp_path):
  path = tmp_path / "trials.jsonl"
  assert study.read_trials(path) == []
  path.write_text('{"seed": 0}\n{"seed": 1}\n{"se')
  assert study.read_trials(path) == [{"seed": 0}, {"seed": 1}]
  assert path.read_text() == '{"seed": 0}\n{"seed": 1}\n', "or the next line would be glued to it"
