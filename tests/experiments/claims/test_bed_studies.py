"""The studies of the bed: the rules of E15 to E17 and E23 to E25, and their commands."""

import json

import jax
import numpy as np
import pytest

from experiments import provenance
from experiments.claims import bed as beds
from experiments.claims import running_sums, study
from experiments.claims.gate_asymmetry import __main__ as gate_asymmetry
from experiments.claims.gate_asymmetry import rules as gate_rules
from experiments.claims.long_responses import __main__ as long_responses
from experiments.claims.long_responses import rules as length_rules
from experiments.claims.long_tolerance import rules as long_rules
from experiments.claims.mismatch import __main__ as mismatch
from experiments.claims.mismatch import rules as mismatch_rules
from experiments.claims.precision import __main__ as precision
from experiments.claims.precision import distortion
from experiments.claims.precision import rules as precision_rules
from experiments.claims.tolerance import __main__ as tolerance
from experiments.claims.tolerance import divergence
from experiments.claims.tolerance import rules as tolerance_rules
from experiments.results import from_json

SMALL = {"entropy": [0.7, 0.4], "grad_norm": [1.0, 2.0], "kl": 0.1, "gap": 0.1, "curve": [0.3, 0.6, 0.7], "samples": 8}


def about(count, seed):
  """Returns sixteen problems' numbers of right samples, as a row of trials stores them.

  Each is `count` of 8. In odd seeds, the last one is higher by 1.
  """
  return f"{count}" * 15 + f"{count + seed % 2}"


def gate_trials(accuracy, **other):
  """Makes trials in which each pair of gates has `accuracy` right samples of 8."""
  return {"trials": [
    SMALL | {"gates": gates, "rate": rate, "seed": seed, "right": about(accuracy[gates], seed + place)} | other
    for place, gates in enumerate(gate_rules.PAIRS) for rate in gate_rules.RATES for seed in range(5)
  ]}  # fmt: skip


def verdict_of(rules, results, name):
  """Returns the verdict of one rule."""
  return rules.judge(results)[name]["verdict"]


def test_the_rules_distinguish_the_gates():
  name = "E15, accuracy above pos sharper, mild rate"
  better, worse = {"neg sharper": 7, "equal": 6, "pos sharper": 3}, {"neg sharper": 3, "equal": 6, "pos sharper": 7}
  assert verdict_of(gate_rules, gate_trials(better), name) == "reproduced"
  assert verdict_of(gate_rules, gate_trials(worse), name) == "contradicted"
  assert verdict_of(gate_rules, gate_trials(dict.fromkeys(better, 5)), name) == "inconclusive"
  assert verdict_of(gate_rules, gate_trials(better, kl=1e-4), name) == "mechanism not engaged"
  assert verdict_of(gate_rules, gate_trials(better, curve=[0.3, 0.3, 0.3]), name) == "mechanism not engaged", "no arm has learnt anything"


def test_collapses_of_the_gates_are_counted():
  name, results = "E15, collapses, hot rate", gate_trials(dict.fromkeys(gate_rules.PAIRS, 5))
  assert verdict_of(gate_rules, results, name) == "mechanism not engaged", "none collapses"
  fallen = lambda falls: {"trials": [row | {"curve": [0.3, 0.7, 0.1] if falls(row) else row["curve"]} for row in results["trials"]]}
  assert verdict_of(gate_rules, fallen(lambda row: row["gates"] == "pos sharper"), name) == "inconclusive", "5 to 0: p is 1/16"
  assert verdict_of(gate_rules, fallen(lambda row: row["seed"] < 2), name) == "inconclusive"


def test_the_second_run_of_the_gates_is_judged_by_its_own_seeds():
  name, first = "E15, second run: falls, hot rate", gate_trials(dict.fromkeys(gate_rules.PAIRS, 5))
  assert gate_rules.judge(first)[name]["rule"].startswith("waits for its trials")
  curves = {"pos sharper": [0.3, 0.1, 0.1], "neg sharper": [0.3, 0.6, 0.7]}
  second = [
    SMALL | names | {"seed": seed, "right": about(5, seed), "curve": curves[names["gates"]]}
    for names, _ in gate_rules.second_arms() for seed in range(10, 17)
  ]  # fmt: skip
  verdicts = gate_rules.judge(first | {"second_trials": second})
  assert verdicts[name]["verdict"] == "reproduced" and (verdicts[name]["first"], verdicts[name]["of"]) == (7, 7)
  assert verdicts["E15, second run: collapses, hot rate"]["first"] == 7
  assert verdicts["E15, both runs: falls, hot rate"]["of"] == 12, "five seeds of the first run"
  assert verdicts["E15, collapses, hot rate"] == gate_rules.judge(first)["E15, collapses, hot rate"]
  near = gate_rules.judge(first | {"second_trials": [row | {"kl": 1e-4} for row in second]})
  assert near[name]["verdict"] == "mechanism not engaged"


def mismatch_trials(accuracy, **other):
  """Makes trials in which each way to train has `accuracy` right samples of 8."""
  return {"trials": [
    SMALL | {"way": way, "sampler": sampler, "seed": seed, "right": about(accuracy[way], seed + place)} | other
    for sampler in mismatch_rules.SAMPLERS for place, way in enumerate(mismatch_rules.WAYS) for seed in range(5)
  ]}  # fmt: skip


def test_the_rules_detect_the_need_for_a_correction():
  name = "E17, accuracy: IS above none, bfloat16"
  better, worse = {"IS": 7, "none": 3, "length norm": 5}, {"IS": 3, "none": 7, "length norm": 5}
  assert verdict_of(mismatch_rules, mismatch_trials(better), name) == "reproduced"
  assert verdict_of(mismatch_rules, mismatch_trials(worse), name) == "contradicted"
  assert verdict_of(mismatch_rules, mismatch_trials(better, gap=1e-6), name) == "mechanism not engaged"


def distortion_rows(**gspo):
  """Makes rows of distortions: every measure is 0.2, except for the given ones of GSPO."""
  every = {"grpo": {}, "gspo": gspo, "sapo": {}}
  names = dict.fromkeys(("weight", "ratio", "flips", "clipped", "gap", "k3"), 0.2)
  return [
    {"seed": seed, "objective": objective, "error": error} | names | {name: x + 0.001 * seed for name, x in changes.items()}
    for seed in range(5) for error in precision_rules.ERRORS for objective, changes in every.items()
  ]  # fmt: skip


def test_the_rules_detect_the_effect_of_wrong_log_probabilities():
  right = {"recompute": 6, "none": 6, "tis": 7, "mis": 5}
  trials = [
    SMALL | {"objective": objective, "way": way, "seed": seed, "right": f"{right[way]}{right[way]}"}
    for objective in precision_rules.OBJECTIVES for way in precision_rules.WAYS for seed in range(5)
  ]  # fmt: skip
  judged = lambda rows: {name: row["verdict"] for name, row in precision_rules.judge({"trials": trials, "distortion": rows}).items()}
  verdicts = judged(distortion_rows(ratio=0.1, flips=0.3))
  assert verdicts["E16, ratios, error 0.02"] == "reproduced"
  assert verdicts["E16, membership, error 0.02"] == "contradicted"
  assert verdicts["E16, training: gspo needs no recomputation"] == verdicts["E16, training: grpo gains by tis"] == "reproduced"
  assert verdicts["E16, training: sapo gains by mis"] == "contradicted"
  assert judged([row | {"flips": 0.0} for row in distortion_rows()])["E16, membership, error 0.02"] == "mechanism not engaged"
  near = judged([row | {"k3": 1e-6} for row in distortion_rows()])
  assert {verdict for name, verdict in near.items() if "training" in name} == {"mechanism not engaged"}


def test_the_rules_of_what_a_mismatch_costs():
  loses = {"none": 3, "recompute": 6, "tis": 7}
  trials = [
    SMALL | names | {"seed": seed, "right": about(loses[names["way"]] if names["objective"] == "gspo" else 6, seed)}
    for bed in tolerance_rules.MODELS for names, _ in tolerance_rules.arms(bed) for seed in range(5)
  ]  # fmt: skip
  gaps = {"float32": 1e-14, "bfloat16": 1e-7, "int8": 1e-4, "float8": 4e-3}
  known = [(bed, sampler) for bed, of_bed in tolerance_rules.SAMPLERS.items() for sampler in of_bed]
  rows = [{"bed": bed, "sampler": sampler, "seed": 0, "k3": gaps[sampler]} for bed, sampler in known]
  verdicts = {name: row["verdict"] for name, row in tolerance_rules.judge({"trials": trials, "divergence": rows}).items()}
  assert verdicts["E23, short, int8: gspo needs no recomputation"] == verdicts[tolerance_rules.CONFIRMATORY["E23"]] == "contradicted"
  assert verdicts["E23, mixture, float8: gspo gains by tis"] == verdicts["E23, short, float32: sapo needs no recomputation"] == "reproduced"
  assert verdicts["E23, short, bfloat16: gspo needs no recomputation"] == "mechanism not engaged", "a sampler that hardly differs"
  assert "E23, mixture, int8: gspo needs no recomputation" not in verdicts
  waiting = tolerance_rules.judge({"trials": [row for row in trials if row["bed"] == "short"], "divergence": rows})
  assert waiting[tolerance_rules.CONFIRMATORY["E23"]]["rule"].startswith("waits for its trials")


def test_the_rules_of_long_responses_pair_the_samples_of_each_warm_start():
  right = lambda names: {"recompute": 6, "none": 1}[names["way"]] if names["objective"] == "gspo" else 5
  trials = [
    SMALL | names | {"seed": seed, "right": about(right(names), seed + names["draw"])}
    | {"clipped": 0.3 + 0.01 * names["draw"] if names["way"] == "none" else 0.1}
    for names, _ in long_rules.arms() for seed in long_rules.WARM
  ]  # fmt: skip
  rows = [{"sampler": long_rules.SAMPLER, "k3": long_rules.TARGET}]
  verdicts = long_rules.judge({"trials": trials, "divergence": rows})
  assert verdicts[long_rules.CONFIRMATORY["E24"]]["verdict"] == "contradicted"
  assert verdicts[long_rules.CONFIRMATORY["E24"]]["seeds"] == len(long_rules.WARM) * len(long_rules.DRAWS)
  assert verdicts["E24, sapo needs no recomputation"]["verdict"] == "reproduced"
  assert verdicts["E24, gspo clips more without recomputation"]["verdict"] == "reproduced"
  far = long_rules.judge({"trials": trials, "divergence": [row | {"k3": 2 * row["k3"]} for row in rows]})
  assert {row["verdict"] for row in far.values()} == {"mechanism not engaged"}


def test_samplers_of_fewer_bits_are_further_from_the_learner(monkeypatch):
  monkeypatch.setattr(divergence, "PROMPTS", 4)
  rows = divergence.measure(beds.SMOKE, 0, "experts", ("float32", "int8", "float8"))
  exact, int8, float8 = (row["k3"] for row in rows)
  assert abs(exact) < 1e-9 < int8 < float8 and rows[1]["sampler"] == "int8"


def test_the_rules_at_published_mismatches():
  loses = {"recompute": 7, "none": 3}
  trials = [
    SMALL | names | {"seed": seed, "right": about((loses if names["objective"] == "gspo 15 %" else {}).get(names["way"], 6), seed)}
    | {"clipped": 0.3 if names["way"] == "none" else 0.1 + 0.01 * seed}
    for names, _ in precision_rules.second_arms() for seed in range(5)
  ]  # fmt: skip
  rows = [{"seed": seed, "objective": "grpo", "error": k3, "k3": float(k3)} for k3 in precision_rules.MISMATCHES for seed in range(5)]
  judged = lambda rows: {name: row["verdict"] for name, row in precision_rules._second(trials, rows).items()}
  verdicts = judged(rows)
  assert verdicts["E16, k3 1.5e-3: gspo 15 % needs no recomputation"] == "contradicted"
  assert verdicts["E16, k3 1.5e-3: grpo needs no recomputation"] == verdicts["E16, k3 6e-4: sapo needs no recomputation"] == "reproduced"
  assert verdicts["E16, k3 6e-4: gspo 15 % tolerates more than grpo"] == "contradicted"
  assert verdicts["E16, k3 6e-4: grpo 15 % clips more without recomputation"] == "reproduced"
  far = judged([row | {"k3": 2 * row["k3"]} for row in rows])
  assert set(far.values()) == {"mechanism not engaged"}, "the samplers are not at their mismatches"
  assert precision_rules._second([], [])[precision_rules.CONFIRMATORY["E16"]]["rule"].startswith("waits for its trials")


def test_a_sampler_with_a_share_of_the_error_of_float8_lies_on_the_way_to_it():
  bed, params = beds.make_bed(beds.SMOKE), beds.make_bed(beds.SMOKE).init(jax.random.key(0))
  config = beds.model_config(bed.sizes)
  whole, part, none = (beds.lowered(config, dtype)[1](params) for dtype in ("float8", "float8 x 0.25", "float8 x 0.0"))
  for x, full, quarter, exact in zip(*map(jax.tree.leaves, (params, whole, part, none)), strict=True):
    np.testing.assert_allclose(quarter - x, (full - x) / 4, atol=1e-6)
    np.testing.assert_array_equal(exact, x)
  assert any(np.abs(full - x).max() > 1e-3 for x, full in zip(*map(jax.tree.leaves, (params, whole)), strict=True))


def test_an_error_of_one_token_spreads_and_shrinks_over_the_sequence_under_gspo():
  batch = running_sums.rectangle(np.zeros((1, running_sums.PROMPT_TOKENS), np.int32), np.zeros((1, 4), np.int32), np.ones((1, 4), bool))
  wrong = batch._replace(old_logprobs=batch.old_logprobs - 0.2 * (np.arange(batch.mask.shape[1]) == running_sums.PROMPT_TOKENS)[None])
  distortions = {name: distortion.compare(arm, batch.old_logprobs, batch, wrong) for name, arm in precision_rules.OBJECTIVES.items()}
  assert distortions["grpo"]["ratio"] == pytest.approx((np.exp(0.2) - 1) / 4, rel=1e-5)
  assert distortions["gspo"]["ratio"] == pytest.approx(np.exp(0.05) - 1, rel=1e-5)
  # 1.22 is above 1.2; 1.051 is above 1.01 for all four tokens.
  assert distortions["grpo"]["flips"] == 0.25 and distortions["gspo"]["flips"] == 1
  assert distortions["sapo"]["flips"] == 0


@pytest.mark.parametrize(
  ("command", "claim"),
  [
    pytest.param(gate_asymmetry, "E15", marks=pytest.mark.slow, id="E15"),
    pytest.param(precision, "E16", marks=pytest.mark.exhaustive, id="E16"),
    pytest.param(mismatch, "E17", marks=pytest.mark.exhaustive, id="E17"),
    pytest.param(tolerance, "E23", marks=pytest.mark.exhaustive, id="E23"),
    pytest.param(long_responses, "E25", marks=pytest.mark.exhaustive, id="E25"),
  ],
)
def test_a_smoke_run_writes_verdicts_and_a_figure(command, claim, tmp_path, capsys):
  command.main(["--smoke", f"--folder={tmp_path}"])
  results = from_json((tmp_path / "results.json").read_text())
  assert results["verdicts"] and all(name.startswith(claim) for name in results["verdicts"])
  assert not (tmp_path / "trials.jsonl").exists() and list((tmp_path / "figures").glob("*.png"))
  command.main(["--plot_only", f"--folder={tmp_path}", "--format", "pdf"])
  assert list((tmp_path / "figures").glob("*.pdf")) and claim in capsys.readouterr().out


def test_the_rules_of_length_pair_leads_over_seeds():
  """GSPO is ahead at 256 tokens alone, where GRPO has fallen."""
  def right(names):
    return 2 if names["objective"] == "grpo" and names["tokens"] == 256 else 6

  trials = [
    SMALL | names | {"seed": seed, "right": about(right(names), seed), "clipped": 0.01}
    | {"curve": [0.5, 0.5, 0.5, 0.1, 0.1] if right(names) == 2 else [0.5] * 5}
    for names, _ in length_rules.arms() for seed in range(8)
  ]  # fmt: skip
  verdicts = {name: row["verdict"] for name, row in length_rules.judge({"trials": trials}).items()}
  assert verdicts[length_rules.CONFIRMATORY["E25"]] == verdicts["E25, tokens: GSPO's lead over GRPO grows from 16 to 256"] == "reproduced"
  assert verdicts["E25, samples: GRPO collapses more at 256 than at 16"] == "reproduced"
  assert verdicts["E25, samples: GSPO's lead over GRPO at 64"] == "inconclusive"
  assert verdicts["E25, samples: GSPO's lead over SAPO grows from 16 to 256"] == "inconclusive"
  still = length_rules.judge({"trials": [row | {"clipped": 1e-4} for row in trials]})
  assert still[length_rules.CONFIRMATORY["E25"]]["verdict"] == "mechanism not engaged"


def test_the_columns_that_name_an_arm_stay(monkeypatch):
  """A stopped study finds its trials by them; a trial also measures tokens."""
  monkeypatch.setattr(study.trial, "train", lambda *of, **options: {})
  monkeypatch.setattr(study, "summary", lambda history, per_rollout: {"tokens": [3.0, 4.0]})
  row = study.run(beds.SMOKE, {"tokens": 16, "seed": 0}, beds.Arm("grpo"))
  assert row["tokens"] == 16 and list(row) == ["tokens", "seed", "processor_seconds", "wall_seconds"]


def test_arms_of_a_study_may_have_sizes_of_their_own(tmp_path, monkeypatch):
  starts, ran = [], []
  monkeypatch.setattr(beds, "warm_params", lambda sizes, seed, model: starts.append(sizes.digits))
  monkeypatch.setattr(study, "run", lambda sizes, names, arm: ran.append(sizes.digits) or names)
  sized = lambda sizes, names: sizes._replace(digits=(len(names["arm"]),) * 2)
  arms = [({"arm": name}, beds.Arm("reinforce")) for name in ("a", "bb", "cc")]
  list(study.trained((arms,), beds.SMOKE, (0,), tmp_path / "trials.jsonl", sized))
  assert ran == [(1, 1), (2, 2), (2, 2)] and starts[:2] == [(1, 1), (2, 2)]


def a_study(rules=gate_rules):
  """Returns a study of two arms in two blocks, with two seeds."""
  arms = [({"arm": name}, beds.Arm("reinforce")) for name in ("a", "b")]
  return study.Study("experiments.claims.made_up", "A study.", (arms[:1], arms[1:]), (0, 1), rules, lambda *_: None)


def test_a_stopped_study_resumes_where_it_was(tmp_path, monkeypatch):
  ran = []

  def run(sizes, names, arm):
    if len(ran) == 3:
      raise KeyboardInterrupt
    ran.append((names["arm"], names["seed"]))
    return names | {"processor_seconds": 1.0, "wall_seconds": 2.0}

  monkeypatch.setattr(beds, "warm_params", lambda *of: None)
  monkeypatch.setattr(study, "run", run)
  monkeypatch.setattr(gate_rules, "judge", lambda results: {})
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
  assert results["provenance"]["rules"] == provenance.record(gate_rules)["rules"] and not (tmp_path / study.STARTED).exists()


def test_a_study_whose_rules_have_changed_since_its_first_trial_does_not_resume(tmp_path):
  path = tmp_path / study.STARTED
  path.write_text(json.dumps(provenance.record(gate_rules) | {"rules": "of yesterday"}))
  with pytest.raises(SystemExit, match=r"error: .*gate_asymmetry/rules.py: changed since the study was started at 2.*the trials beside it"):
    study.measure(a_study(), beds.SMOKE, (0, 1), tmp_path)


@pytest.mark.parametrize(("row", "shown"), [({"arm": "c", "seed": 0}, "{'arm': 'c', 'seed': 0}"), ({"arm": "a", "seed": 7}, "'seed': 7")])
def test_a_stored_trial_that_is_not_in_the_plan_is_not_lost(row, shown, tmp_path):
  path = tmp_path / "trials.jsonl"
  path.write_text(json.dumps(row) + "\n")
  with pytest.raises(SystemExit, match="expected the arms and seeds of the study; move the file elsewhere first") as error:
    study.measure(a_study(), beds.SMOKE, (0, 1), tmp_path)
  assert shown in str(error.value) and path.read_text() == json.dumps(row) + "\n"


def test_a_second_run_adds_to_the_results_of_the_first(tmp_path, monkeypatch):
  monkeypatch.setattr(beds, "warm_params", lambda *of: None)
  monkeypatch.setattr(study, "run", lambda sizes, names, arm: names | {"processor_seconds": 1.0, "wall_seconds": 2.0})
  monkeypatch.setattr(gate_rules, "judge", lambda results: {"E15": {"rule": "r", "trials": len(results.get("second_trials", ()))}})
  twice = a_study()._replace(second=study.Second(a_study().arms[0], (7, 8, 9), lambda sizes, rows: {"distortion": [{"k3": 1.0}]}))
  with pytest.raises(SystemExit, match="found no such file, expected the results of the first run; run it once without --second"):
    study.measure_second(twice, beds.SMOKE, (7, 8, 9), tmp_path)
  study.measure(twice, beds.SMOKE, (0, 1), tmp_path)
  first = from_json((tmp_path / "results.json").read_text())
  study.measure_second(twice, beds.SMOKE, (7, 8, 9), tmp_path)
  both = from_json((tmp_path / "results.json").read_text())
  assert {name: both[name] for name in first if name != "verdicts"} == {name: first[name] for name in first if name != "verdicts"}
  assert [row["seed"] for row in both["second_trials"]] == both["second"]["seeds"] == [7, 8, 9]
  assert both["second_distortion"] == [{"k3": 1.0}] and both["second"]["processor_seconds"] == both["verdicts"]["E15"]["trials"] == 3
  assert both["second"]["provenance"]["rules"] == provenance.record(gate_rules)["rules"]
  assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
  study.measure(twice, beds.SMOKE, (0, 1), tmp_path)
  again = from_json((tmp_path / "results.json").read_text())
  assert again["second_trials"] == both["second_trials"], "the first run leaves the rows of the second"


def test_a_seed_without_a_policy_to_train_is_left_out_of_every_arm(tmp_path, monkeypatch, capsys):
  """Also one whose control alone has none: no arm of it is trained for nothing."""
  tried, models = [], {"a": "dense", "b": "experts", "c": "all experts"}
  arms = [({"arm": name}, beds.Arm("reinforce", model=model)) for name, model in models.items()]

  def warm_params(sizes, seed, model):
    if seed == 0 or (seed, model) in ((2, "all experts"), (3, "dense")):
      raise beds.StartFailed(f"seed {seed}: found fewer than 30% right")

  def run(sizes, names, arm):
    tried.append((names["arm"], names["seed"]))
    return names | {"processor_seconds": 1.0, "wall_seconds": 2.0}

  monkeypatch.setattr(beds, "warm_params", warm_params)
  monkeypatch.setattr(study, "run", run)
  monkeypatch.setattr(gate_rules, "judge", lambda results: {})
  # The control is in the block of one arm; seed 3 fails in the block after it.
  of_blocks = a_study()._replace(arms=(arms[1:], arms[:1]))
  study.measure(of_blocks, beds.SMOKE, (0, 1, 2, 3), tmp_path)
  assert tried == [("b", 1), ("c", 1), ("b", 3), ("c", 3), ("a", 1)]
  results = from_json((tmp_path / "results.json").read_text())
  assert results["seeds"] == [1] and [row["seed"] for row in results["trials"]] == [1, 1, 1]
  out = [f"seed {seed}: found fewer than 30% right; it is left out\n" for seed in (0, 2, 3)]
  assert capsys.readouterr().out == "".join(out)


def test_a_seed_that_failed_is_not_tried_again(tmp_path, monkeypatch):
  tried, path = [], tmp_path / "trials.jsonl"

  def warm_params(sizes, seed, model):
    tried.append(seed)
    raise beds.StartFailed("found fewer than 30% right")

  monkeypatch.setattr(beds, "warm_params", warm_params)
  for _ in range(2):
    assert list(study.trained(a_study().arms, beds.SMOKE, (0, 1), path))[-1] == ([], [])
  assert tried == [0, 1]


def test_a_smoke_run_in_the_study_s_folder_and_a_plot_without_results_are_refused(tmp_path):
  with pytest.raises(SystemExit, match="error: --smoke: found the folder of the measured results"):
    study.main(a_study(), ["--smoke"], tmp_path)
  with pytest.raises(SystemExit, match="found no such file"):
    study.main(a_study(), ["--plot_only"], tmp_path)


def test_a_trial_whose_line_is_truncated_runs_again(tmp_path):
  path = tmp_path / "trials.jsonl"
  assert study.read_trials(path) == []
  path.write_text('{"seed": 0}\n{"seed": 1}\n{"se')
  assert study.read_trials(path) == [{"seed": 0}, {"seed": 1}]
  assert path.read_text() == '{"seed": 0}\n{"seed": 1}\n', "otherwise the next line would be appended to the rest"
