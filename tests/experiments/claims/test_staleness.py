"""The staleness ladder: its rules on handmade results, its arms, and a smoke run."""

import jax
import numpy as np
import pytest

from experiments.claims.staleness import __main__ as run
from experiments.claims.staleness import rules
from experiments.results import from_json
from experiments.studies.forecast import protocol
from jaxrl_llm import objectives


def trials(accuracies, *, kl_late=0.1, curve=(0.3, 0.6, 0.7), seeds=rules.SEEDS):
  """Makes trials of 40 problems with 10 samples each.

  Args:
    accuracies: Accuracies of each objective with 1 update and with more, 0.0 to 0.9. The seeds
      differ a little.
    kl_late: Divergence late in a rollout batch, in nats a token.
    curve: Held-out accuracies of every trial.
    seeds: Seeds of the trials.
  """
  rng, rows = np.random.default_rng(0), []
  for name, (fresh, stale) in accuracies.items():
    for count in rules.LADDER:
      for seed in seeds:
        right = rng.integers(0, 2, size=40) + round(10 * (fresh if count == 1 else stale))
        row = {"objective": name, "per_rollout": count, "seed": seed, "samples": 10, "right": "".join(map(str, np.minimum(right, 9)))}
        rows.append(row | {"curve": list(curve), "kl_late": kl_late})
  return {"trials": rows}


def test_verdicts_of_handmade_results():
  verdicts = rules.judge(trials({"vespo": (0.8, 0.8), "grpo": (0.8, 0.3), "sapo": (0.8, 0.3), "gspo": (0.8, 0.3)}, seeds=range(5)))
  assert verdicts["E20, VESPO above all three at 64"]["verdict"] == "reproduced"
  assert verdicts["E20, VESPO above GRPO at 64"]["verdict"] == verdicts["E20, VESPO stands 64 updates"]["verdict"] == "reproduced"
  assert verdicts["E20, SAPO stands 4 updates"]["verdict"] == "contradicted"
  assert verdicts["E20, SAPO loses at 64"]["verdict"] == "reproduced"
  assert verdicts["E20, GSPO collapses at 4"]["verdict"] == "inconclusive", "none of five: the exact interval reaches 52 %"
  assert verdicts["E20, every objective loses at 64"]["fail"] == ["vespo"]
  assert all(name.startswith("E20, ") and x["rule"] for name, x in verdicts.items())
  verdicts = rules.judge(trials({"vespo": (0.8, 0.3), "grpo": (0.8, 0.8), "gspo": (0.8, 0.3)}, curve=(0.3, 0.8, 0.1), seeds=range(8)))
  assert verdicts["E20, VESPO above GRPO at 64"]["verdict"] == verdicts["E20, VESPO stands 64 updates"]["verdict"] == "contradicted"
  assert verdicts["E20, GSPO collapses at 4"]["verdict"] == "reproduced"
  assert "E20, VESPO above all three at 64" not in verdicts, "SAPO was not run"


def test_the_contrasts_of_tuned_objectives_are_judged_by_the_second_run():
  first = trials({"vespo": (0.8, 0.8), "grpo": (0.8, 0.3), "sapo": (0.8, 0.3), "gspo": (0.8, 0.3)}, seeds=range(5))
  level = dict.fromkeys(rules.TUNED, (0.8, 0.6)) | {"sapo": (0.8, 0.3), "reinforce": (0.8, 0.2)}
  second = [row for row in trials(level, seeds=rules.SECOND_SEEDS)["trials"] if row["per_rollout"] == 64]
  verdicts = rules.judge(first | {"second_trials": second})
  assert verdicts["E20, VESPO above all three at 64"]["verdict"] == "reproduced", "the first run's verdict stays"
  assert verdicts["E20, tuned: VESPO above SAPO at 64"]["verdict"] == "reproduced"
  assert verdicts["E20, tuned: SAPO above GSPO at 64"]["verdict"] == "contradicted"
  claim = verdicts["E20, tuned: VESPO above all three at 64"]
  assert claim["of"] == 3 and "SAPO" not in claim["fail"] and claim["held"] < 3
  assert claim["verdict"] != "reproduced"


def test_every_tuned_objective_runs_with_the_widths_and_rates_of_one_list():
  assert {names["objective"] for names, _ in rules.second_arms()} == set(rules.TUNED) <= set(rules.MAIN)
  pairs = protocol.draws()
  for name, arm in rules.TUNED.items():
    (factor,) = [factor for rate, factor in pairs if rate == arm.learning_rate]
    assert arm.settings == protocol.settings(name, factor, 8), name


def test_data_that_is_never_stale_decides_nothing():
  verdicts = rules.judge(trials({"vespo": (0.8, 0.8), "grpo": (0.8, 0.3)}, kl_late=0.0))
  waiting = rules.CONFIRMATORY["E20"]  # Of the second run, which these trials are not.
  assert {x["verdict"] for name, x in verdicts.items() if x["verdict"] != "calibration" and name != waiting} == {"mechanism not engaged"}


def test_the_noise_is_that_of_objectives_with_one_gradient():
  results = trials({"grpo": (0.5, 0.5), "gspo": (0.5, 0.5), "vespo": (0.2, 0.2)}, seeds=range(5))
  noise = rules.judge(results)["E20, A/A"]
  assert noise["pairs"] == 5 and 0 < noise["rms"] <= noise["largest"] < 0.2, "VESPO takes the token mean, so its gradient is different"


@pytest.mark.exhaustive
def test_objectives_of_the_a_a_comparison_have_the_same_gradient_on_fresh_data():
  rng = np.random.default_rng(0)
  old, mask = -rng.random((6, 5)).astype(np.float32), (np.arange(5) < np.array([5, 4, 3, 5, 2, 4])[:, None]).astype(np.float32)
  advantages = np.array([1, -1, 0.5, -0.5, 2, -2], np.float32)[:, None] * mask

  def gradient(name):
    objective = objectives.make(rules.ARMS[name].objective, **dict(rules.ARMS[name].settings))
    return jax.grad(lambda x: objectives.value(objective, x, old, advantages, mask, sampler_logprobs=old)[0])(jax.numpy.asarray(old))

  for names in rules.SAME_AT_ONE:
    assert len({rules.ARMS[name].advantages for name in names}) == 1
    for name in names[1:]:
      np.testing.assert_allclose(gradient(name), gradient(names[0]), atol=1e-6)


def test_every_policy_objective_is_on_the_ladder_once():
  left_out = {"sft", "custom", "gspo_token"}
  estimators = {"maxrl", "gtpo", "rae", "top_entropy"}  # Other advantages, or a part of the tokens.
  assert set(rules.ARMS) - estimators == set(objectives.OBJECTIVES) - left_out
  assert len(rules.ARMS) == len(rules.MAIN) + len(rules.OTHERS)
  for arm in rules.ARMS.values():
    assert objectives.make(arm.objective, **dict(arm.settings)).needs <= {"old_logprobs", "sampler_logprobs"}
  assert len({arm.learning_rate for arm in rules.ARMS.values()}) == 1


def test_bands_of_the_sequence_ratio_are_scaled_by_one_factor():
  assert dict(rules.BAND)["clip_low"] / 3e-4 == pytest.approx(dict(rules.LUSPO_BAND)["clip_low"] / 2e-3, rel=1e-3)


@pytest.mark.exhaustive
def test_a_smoke_run_writes_verdicts_and_figures_that_can_be_drawn_again(tmp_path):
  argv = ["--smoke", f"--folder={tmp_path}"]
  run.main(argv)
  results = from_json((tmp_path / "results.json").read_text())
  assert {row["objective"] for row in results["trials"]} == set(run.SMOKE)
  assert "E20, VESPO above GRPO at 64" in results["verdicts"] and results["processor_seconds"] > 0
  assert (tmp_path / "figures" / "ladder.png").stat().st_size > 10_000
  (tmp_path / "figures" / "curves.png").unlink()
  run.main(["--plot_only", f"--folder={tmp_path}", "--format", "pdf"])
  assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["curves.pdf", "ladder.pdf", "ladder.png"]


def test_a_smoke_run_without_a_folder_and_a_plot_without_results_are_refused(tmp_path):
  with pytest.raises(SystemExit, match="expected another --folder=DIR"):
    run.main(["--smoke"])
  with pytest.raises(SystemExit, match="run it once without --plot_only"):
    run.main(["--plot_only", f"--folder={tmp_path}"])
