"""The staleness ladder: its rules on results made by hand, its arms, and a smoke run."""

import numpy as np
import pytest

from experiments.claims.staleness import __main__ as run
from experiments.claims.staleness import rules
from experiments.results import from_json
from jaxrl_llm import objectives


def trials(accuracies, *, kl_late=0.1, collapse="", seeds=rules.SEEDS):
  """Trials of 40 problems with 10 samples: `accuracies` of an objective at 1 and at more updates, 0.0 to 0.9; each seed a little apart."""
  rng, found = np.random.default_rng(0), []
  for name, (fresh, stale) in accuracies.items():
    for count in rules.LADDER:
      for seed in seeds:
        right = rng.integers(0, 2, size=40) + round(10 * (fresh if count == 1 else stale))
        found.append(
          {"objective": name, "per_rollout": count, "seed": seed, "samples": 10, "right": "".join(map(str, np.minimum(right, 9)))}
          | {"collapse": collapse, "kl_late": kl_late}
        )
  return found


def test_verdicts_of_results_made_by_hand():
  good = trials({"vespo": (0.8, 0.8), "grpo": (0.8, 0.3)})
  found = rules.judge(good)
  assert found["E20, VESPO above GRPO at 64"]["verdict"] == "reproduced"
  assert found["E20, VESPO stands 64 updates"]["verdict"] == "reproduced"
  assert found["E20, GRPO collapses at 4"]["verdict"] == "not reproduced"
  assert found["E20, every objective loses at 64"]["others"] == ["vespo"]
  assert all(name.startswith("E20, ") and x["rule"] for name, x in found.items())
  found = rules.judge(trials({"vespo": (0.8, 0.3), "grpo": (0.8, 0.3)}, collapse="reward"))
  assert found["E20, VESPO above GRPO at 64"]["verdict"] == "not reproduced"
  assert found["E20, VESPO stands 64 updates"]["verdict"] == "not reproduced"
  assert found["E20, GRPO collapses at 4"]["verdict"] == "reproduced"
  assert found["E20, every objective loses at 64"]["verdict"] == "reproduced"


def test_data_that_were_never_stale_decide_nothing():
  found = rules.judge(trials({"vespo": (0.8, 0.8), "grpo": (0.8, 0.3)}, kl_late=0.0))
  assert {x["verdict"] for x in found.values()} == {"mechanism not engaged"}


def test_every_policy_objective_is_on_the_ladder_and_none_twice():
  left_out = {"sft", "custom", "gspo_token"}
  assert set(rules.ARMS) == set(objectives.OBJECTIVES) - left_out
  assert len(rules.ARMS) == len(rules.MAIN) + len(rules.OTHERS)
  for arm in rules.ARMS.values():
    assert objectives.make(arm.objective, **dict(arm.settings)).needs <= {"old_logprobs", "sampler_logprobs"}
  assert len({arm.learning_rate for arm in rules.ARMS.values()}) == 1


def test_bands_of_the_sequence_ratio_are_scaled_by_one_factor():
  assert dict(rules.BAND)["clip_low"] / 3e-4 == pytest.approx(dict(rules.LUSPO_BAND)["clip_low"] / 2e-3, rel=1e-3)


@pytest.mark.slow
def test_smoke_run_writes_verdicts_and_figures_and_goes_on_where_it_was(tmp_path):
  argv = ["--smoke", f"--folder={tmp_path}"]
  run.main(argv)
  results = from_json((tmp_path / "results.json").read_text())
  assert {row["objective"] for row in results["trials"]} == set(run.SMOKE)
  assert "E20, VESPO above GRPO at 64" in results["verdicts"] and results["processor_seconds"] > 0
  assert (tmp_path / "figures" / "ladder.png").stat().st_size > 10_000
  (tmp_path / "figures" / "curves.png").unlink()
  run.main(["--plot_only", f"--folder={tmp_path}", "--format", "pdf"])
  assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["curves.pdf", "ladder.pdf", "ladder.png"]


def test_refusals(tmp_path):
  with pytest.raises(SystemExit, match="give --folder=DIR"):
    run.main(["--smoke"])
  with pytest.raises(SystemExit, match="leave --plot_only out once"):
    run.main(["--plot_only", f"--folder={tmp_path}"])
