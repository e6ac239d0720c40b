"""Every estimator's advantages against golden.json, and golden.json against the reference."""

import json

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages
from jaxrl_llm.advantages.estimators import ESTIMATORS, Evidence, make_credit
from tests.advantages import reference
from tests.golden import check_file, each_case, run_snippets

GOLDEN = json.loads(reference.GOLDEN.read_text(encoding="utf-8"))


def evidence(name, case):
  """Makes the evidence of a case, and the same with NaN wherever the case reads nothing.

  A field that only other cases of the estimator read is absent.
  """
  inputs = {field: np.asarray(x) for field, x in GOLDEN["inputs"][case["inputs"]].items()}
  inputs["mask"] = inputs["mask"].astype(float)  # An array of integers would let λ be a float32.
  readable = {field for other in GOLDEN["estimators"][name]["cases"] for field in other["reads"]}
  absent = (readable | {"written"}) - set(case["reads"])
  plain = {field: x for field, x in inputs.items() if field not in absent}
  outside, junk = plain.get("written", inputs["mask"]) == 0, {}
  for field, x in plain.items():
    unread = np.full(x.shape, field not in case["reads"])
    if x.shape == outside.shape and field not in ("mask", "written", "step_ends"):
      unread |= ~inputs["step_ends"] if field in ("step_rewards", "step_states") else outside
    if "valid" in case["reads"] and field in ("rewards", "parts"):
      unread |= ~inputs["valid"]
    other = ~x if x.dtype == bool else -3 if x.dtype == int else np.nan
    junk[field] = np.where(unread, other, x) if field not in ("mask", "written") else x
  return [Evidence(**{field: jnp.asarray(x) for field, x in fields.items()}) for fields in (plain, junk)]


def test_the_file_matches_the_reference():
  check_file(reference, largest=100_000)


def test_every_estimator_has_cases_and_its_defaults_written_down():
  assert set(reference.PAPERS) == set(ESTIMATORS) == set(GOLDEN["estimators"])
  for name, estimator in ESTIMATORS.items():
    entry = GOLDEN["estimators"][name]
    assert entry["defaults"] == {"whiten": False} | estimator.defaults, name
    assert {} in [case["settings"] for case in entry["cases"]], name
    # A default that no case changes could be ignored unnoticed.
    assert {key for case in entry["cases"] for key in case["settings"]} == set(entry["defaults"]), name
    read = {field for case in entry["cases"] for field in case["reads"]}
    optional = {"values", "step_rewards", "step_ends", "step_states", "old_entropy", "old_score_norm", "importance", "beliefs", "drift"}
    assert estimator.needs == read & optional, name
    assert estimator.takes_kl == ("kl" in read), name
    assert ("role_baselines" in read) == ("num_roles" in estimator.defaults), name


@each_case(GOLDEN["estimators"])
def test_advantages_are_the_reference_and_unread_fields_do_not_matter(x64, name, index):
  case = GOLDEN["estimators"][name]["cases"][index]
  credit = make_credit(name, case["group_size"], **case["settings"])
  for given in evidence(name, case):
    made = credit(given)
    assert made.advantages.dtype == np.float64
    np.testing.assert_allclose(made.advantages, case["advantages"], rtol=1e-10, atol=1e-12)
    assert (made.returns is None) == ("returns" not in case)
    if "returns" in case:
      np.testing.assert_allclose(made.returns, case["returns"], rtol=1e-10, atol=1e-12)
    assert (made.role_baselines is None) == ("new_role_baselines" not in case)
    if "new_role_baselines" in case:
      np.testing.assert_allclose(made.role_baselines, case["new_role_baselines"], rtol=1e-10, atol=1e-12)
    assert (made.beliefs is None) == ("new_beliefs" not in case)
    if "new_beliefs" in case:
      np.testing.assert_allclose(made.beliefs, case["new_beliefs"], rtol=1e-10, atol=1e-12)


def test_cases_have_groups_without_a_signal_and_tokens_that_teach():
  for name, entry in GOLDEN["estimators"].items():
    for case in entry["cases"]:
      assert np.any(case["advantages"]), name
      mask = np.array(GOLDEN["inputs"][case["inputs"]]["mask"])
      assert not np.any(np.array(case["advantages"])[mask == 0]), name
    equal = [case for case in entry["cases"] if case["inputs"] == "graded" and not case["settings"]]
    if ESTIMATORS[name].compares_groups and name not in ("steps", "gigpo", "hierarchical", "per_reward"):
      assert not np.any(equal[0]["advantages"][3:]), name


def test_the_snippets_of_its_readme_run(monkeypatch):
  run_snippets(advantages, 'case["advantages"]', '(np.array(case["advantages"]) + 1e-3)', monkeypatch)
