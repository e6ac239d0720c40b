"""The verdicts of rules, against intervals and tests computed independently."""

import math
import pathlib
import re

import numpy as np
import pytest

from experiments import judging

ROOT = pathlib.Path(__file__).parents[2]
UP, ZERO, DOWN = [0.10, 0.20, 0.15, 0.12], [0.1, -0.2, 0.15, -0.1], [-0.10, -0.20, -0.15, -0.12]


def test_an_interval_decides_on_either_side_of_the_bound_and_not_across_it():
  told = lambda judge, values, *bounds: judge("rule", values, *bounds)["verdict"]
  assert [told(judging.above, values) for values in (UP, ZERO, DOWN)] == ["reproduced", "inconclusive", "contradicted"]
  assert [told(judging.below, values) for values in (UP, ZERO, DOWN)] == ["contradicted", "inconclusive", "reproduced"]
  assert told(judging.above, UP, 0.14) == "inconclusive" and told(judging.above, UP, 0.3) == "contradicted"
  assert told(judging.within, UP, 0.0, 1.0) == "reproduced"
  assert told(judging.within, UP, 0.14, 1.0) == "inconclusive", "an interval that contains an end shows nothing"
  assert told(judging.within, UP, 0.3, 1.0) == "contradicted"
  assert judging.above("rule", UP, engaged=False)["verdict"] == "mechanism not engaged"
  assert told(judging.above, [0.5]) == "inconclusive", "one seed has no interval"


def test_the_numbers_of_a_row_are_textbook_values():
  from scipy import stats

  row = judging.above("rule", UP, 0.05, arm="a")
  mean, spread = np.mean(UP), np.std(UP, ddof=1) / 2
  assert row["interval"]["mean"] == pytest.approx(mean) and row["seeds"] == 4 and row["arm"] == "a"
  assert row["interval"]["high"] - mean == pytest.approx(3.1824 * spread, rel=1e-4)
  assert row["p"] == pytest.approx(stats.ttest_1samp(UP, 0.05).pvalue)
  assert row["p_sign_flip"] == 2 / 16, "of 16 choices of signs, all plus and all minus are as extreme"


@pytest.mark.exhaustive
def test_a_difference_of_size_finds_is_detected_four_times_in_five():
  rng = np.random.default_rng(0)
  finds = np.mean([judging.above("rule", rng.standard_normal(12))["finds"] for _ in range(300)])
  reproduced = [judging.above("rule", finds + rng.standard_normal(12))["verdict"] == "reproduced" for _ in range(1500)]
  assert np.mean(reproduced) == pytest.approx(0.8, abs=0.05)


def test_five_seeds_without_an_effect_are_nearly_always_inconclusive():
  rng = np.random.default_rng(1)
  verdicts = [judging.above("rule", rng.standard_normal(5))["verdict"] for _ in range(2000)]
  assert verdicts.count("inconclusive") / 2000 == pytest.approx(0.95, abs=0.02)


def test_more_often_requires_seeds_that_differ():
  arm = lambda *seeds: {seed: seed in seeds for seed in range(8)}
  told = lambda more, less: judging.more_often("rule", more, less)["verdict"]
  assert told(arm(*range(6)), arm()) == "reproduced", "6 to 0: p is 2/64"
  assert told(arm(*range(5)), arm()) == "inconclusive", "5 to 0: p is 2/32"
  assert told(arm(), arm(*range(6))) == "contradicted"
  assert told(arm(), arm()) == "mechanism not engaged"
  assert told(arm(*range(8)), arm(*range(8))) == "inconclusive", "it happens in all seeds of both arms"
  assert judging.more_often("rule", arm(*range(judging.more_often("", arm(), arm())["needs"])), arm())["verdict"] == "reproduced"


def test_mostly_requires_an_interval_above_one_half():
  told = lambda count, of: judging.mostly("rule", {seed: seed < count for seed in range(of)})
  assert [told(count, 8)["verdict"] for count in (8, 7, 4, 1, 0)] == ["reproduced", *["inconclusive"] * 3, "contradicted"]
  assert told(0, 8)["needs"] == 8 and told(0, 5)["needs"] is None and told(0, 24)["needs"] == 18


def test_several_rules_together_have_the_worst_of_their_verdicts():
  parts = {"a": judging.above("", UP), "b": judging.above("", [2 * x for x in UP])}
  assert judging.every("all", parts)["verdict"] == "reproduced"
  assert judging.every("all", parts)["p"] == parts["a"]["p"] >= parts["b"]["p"]
  for values, verdict in ((ZERO, "inconclusive"), (DOWN, "contradicted")):
    row = judging.every("all", parts | {"c": judging.above("", values)})
    assert (row["verdict"], row["fail"], row["held"], row["of"]) == (verdict, ["c"], 2, 3)


def test_a_collapse_is_a_lasting_fall_of_held_out_accuracy():
  assert judging.collapsed([0.3, 0.6, 0.8, 0.7, 0.6, 0.39, 0.2])
  assert not judging.collapsed([0.3, 0.6, 0.8, 0.1, 0.1, 0.39, 0.41]), "it came back"
  assert not judging.collapsed([0.3] * 7), "it never learnt, so it has nothing to lose"
  assert judging.collapsed([0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]), "the start can be the peak"


@pytest.mark.parametrize(
  ("curve", "expected"),
  [
    ([0.33, 0.05, 0.10, 0.14, 0.18, 0.18, 0.13], True),  # `collapsed` does not see this one.
    ([0.41, 0.38, 0.30, 0.25, 0.20, 0.16, 0.14], True),
    ([0.3, 0.6, 0.8, 0.7, 0.6, 0.39, 0.2], True),
    ([0.3, 0.6, 0.8, 0.1, 0.1, 0.39, 0.43], False),  # It came back.
    ([0.3] * 7, False),
    ([0.3, 0.2, 0.2, 0.2, 0.2, 0.23, 0.23], False),  # A loss, but of less than a quarter.
    ([0.3, 0.5, 0.7, 0.8, 0.8, 0.8, 0.8], False),
    ([0.41, 0.14], True),
  ],
)
def test_a_fall_is_one_from_the_start_or_from_the_peak(curve, expected):
  assert judging.fell(curve) is expected


def test_only_claims_that_were_judged_by_the_older_endpoint_use_it():
  """New studies call `judging.fell`; the verdicts of judged claims stay those of `collapsed`."""
  places = [path for path in (ROOT / "experiments").rglob("*.py") if path.name != "judging.py"]
  users = {path.relative_to(ROOT / "experiments").as_posix() for path in places if re.search(r"\bcollapsed\(", path.read_text())}
  claims = ("gate_asymmetry", "mismatch", "staleness")
  judged = {f"claims/{name}/rules.py" for name in claims} | {"claims/staleness/figures.py", "ablations/routing_replay/rules.py"}
  assert users == judged | {"studies/forecast/__main__.py"}


def test_holm_matches_hand_computed_values():
  assert judging.holm({"a": 0.04, "b": 0.001, "c": 0.03}) == pytest.approx({"b": 0.003, "c": 0.06, "a": 0.06})
  assert judging.holm({"a": 0.7, "b": 0.6}) == {"b": 1.0, "a": 1.0}


def test_values_without_spread_have_a_p_value_of_0_or_1():
  assert judging.above("rule", [0.5] * 3)["p"] == 0 and judging.above("rule", [0.0] * 3)["p"] == 1
  assert math.isfinite(judging.above("rule", [0.5] * 3)["finds"])
