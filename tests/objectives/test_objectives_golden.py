"""Every objective's loss and gradient against golden.json, and golden.json against the reference.

The reference's gradient is the closed form of each method. Finite differences tie it to the
reference's loss, so that a slip in either is detected.
"""

import functools
import inspect
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.objectives import OBJECTIVES, value
from jaxrl_llm.objectives.corrections import CORRECTIONS
from jaxrl_llm.objectives.distillation import ADVICE, teacher_advantages
from jaxrl_llm.objectives.divergence import comparer
from jaxrl_llm.objectives.penalties import adapted_entropy_coef
from jaxrl_llm.segments import token_mean
from jaxrl_llm.types import Objective, TrainBatch
from tests.golden import check_file, each_case, run_snippets
from tests.objectives import reference, reference_terms
from tests.objectives.batches import as_batch, with_junk

GOLDEN = json.loads(reference.GOLDEN.read_text(encoding="utf-8"))


def test_the_file_matches_the_reference():
  check_file(reference, largest=250_000)


def test_every_objective_has_cases_and_its_defaults_written_down():
  assert set(reference.PAPERS) == set(OBJECTIVES) == set(GOLDEN["objectives"])
  for name, factory in OBJECTIVES.items():
    assert {key: parameter.default for key, parameter in inspect.signature(factory).parameters.items()} == reference.PAPERS[name], name
    entry = GOLDEN["objectives"][name]
    assert entry["defaults"] == reference.PAPERS[name]
    # A default that no case changes could be ignored unnoticed. The settings of custom's gates are
    # those of the other objectives.
    changed = {key for case in entry["cases"] for key in case["settings"]}
    assert {} in [case["settings"] for case in entry["cases"]]
    assert name == "custom" or changed == set(reference.PAPERS[name]), name


def test_bounds_bind_in_some_tokens_and_not_in_others():
  for name, entry in GOLDEN["objectives"].items():
    fractions = [case["clip_fraction"] for case in entry["cases"] if "clip_fraction" in case]
    assert not fractions or any(0 < fraction < 1 for fraction in fractions), name
  signs = {np.sign(inputs["advantages"]).min() + 2 * np.sign(inputs["advantages"]).max() for inputs in GOLDEN["inputs"].values()}
  assert signs == {1.0}  # −1 + 2·1: both signs in each batch.


@each_case(GOLDEN["objectives"])
def test_loss_and_gradient_are_the_reference(x64, evaluate, name, index):
  case = GOLDEN["objectives"][name]["cases"][index]
  # `value` always takes these two; they must change nothing if a case does not read them.
  fields = {*case["reads"], "old_logprobs", "advantages"}
  arrays = {field: np.asarray(GOLDEN["inputs"][case["inputs"]][field], float) for field in fields - {"groups"}}
  arrays |= {"groups": np.asarray(GOLDEN["groups"])} if "groups" in fields else {}
  loss, metrics, grads = evaluate(name, arrays, wanted=("actor/", "critic/vf_loss"), **case["settings"])
  assert loss.dtype == np.float64
  np.testing.assert_allclose(loss, case["loss"], rtol=1e-10)
  np.testing.assert_allclose(grads["logprobs"], case["grad_logprobs"], rtol=1e-10, atol=1e-15)
  assert np.any(grads["logprobs"])
  if "grad_values" in case:
    np.testing.assert_allclose(grads["values"], case["grad_values"], rtol=1e-10, atol=1e-15)
    assert np.any(grads["values"])
  assert ("clip_fraction" in case) == ("actor/pg_clipfrac" in metrics)
  if "clip_fraction" in case:
    np.testing.assert_allclose(metrics["actor/pg_clipfrac"], case["clip_fraction"], rtol=1e-12)
  # The parts add up to the whole.
  parts = [x for key, x in metrics.items() if key.endswith("_loss")]
  np.testing.assert_allclose(sum(parts), metrics["actor/loss"], rtol=1e-10)
  assert metrics["actor/loss"] == loss


def slopes(function, x, step=1e-6):
  """Returns central differences of a function of an array."""
  result = np.zeros(x.shape)
  for i in np.ndindex(x.shape):
    one = np.zeros(x.shape)
    one[i] = step
    result[i] = (function(x + one) - function(x - one)) / (2 * step)
  return result


def check_slopes(name, settings, case, **correction):
  """Checks a case's gradients by differences of the reference's loss, stop-gradients held fixed."""
  inputs = {field: GOLDEN["inputs"][case["inputs"]][field] for field in case["reads"] if field not in ("groups", "old_entropy")}
  loss_of = functools.partial(reference.reference, name, settings, at=inputs["logprobs"], **correction)
  for field in ("logprobs", "values"):
    if f"grad_{field}" in case:
      actual = slopes(lambda x, field=field: loss_of(inputs | {field: x.tolist()}).loss, np.array(inputs[field]))
      np.testing.assert_allclose(actual, case[f"grad_{field}"], rtol=1e-6, atol=2e-9, err_msg=str(settings))


@pytest.mark.parametrize("name", GOLDEN["objectives"])
def test_reference_gradient_is_that_of_the_reference_loss(name):
  for case in GOLDEN["objectives"][name]["cases"]:
    check_slopes(name, case["settings"], case)


CORRECTED = [(name, case) for name, entry in GOLDEN["corrections"].items() for case in entry["cases"]]
corrected_cases = pytest.mark.parametrize(("name", "case"), CORRECTED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CORRECTED)])


def test_every_correction_has_cases_and_its_defaults_written_down():
  # `bypass` has no weight; it is the objective with another field (see test_corrections).
  assert set(GOLDEN["corrections"]) == set(CORRECTIONS) - {"bypass"}
  for name, entry in GOLDEN["corrections"].items():
    parameters = {key: x for key, x in inspect.signature(CORRECTIONS[name]).parameters.items() if key != "objective"}
    assert entry["defaults"] == {key: x.default for key, x in parameters.items() if x.default is not x.empty}
    assert {key for case in entry["cases"] for key in case["settings"]} <= set(parameters)
    weights = [np.array(case["weights"])[np.array(reference.MASK) > 0] for case in entry["cases"]]
    assert any(len(set(x)) > 1 for x in weights), name


@corrected_cases
def test_every_correction_is_the_reference(x64, name, case):
  objective = CORRECTIONS[name](objectives.make(case["objective"], **case["objective_settings"]), **case["settings"])
  inputs = GOLDEN["inputs"][case["inputs"]] | {"old_entropy": GOLDEN["corrections"]["top_entropy"]["old_entropy"]}
  arrays = with_junk({field: np.array(inputs[field], float) for field in case["reads"]})
  loss_fn = lambda logprobs: value(objective, **(arrays | {"logprobs": logprobs}))[0]
  loss, grad = jax.jit(jax.value_and_grad(loss_fn))(arrays["logprobs"])
  np.testing.assert_allclose(loss, case["loss"], rtol=1e-10)
  np.testing.assert_allclose(grad, case["grad_logprobs"], rtol=1e-10, atol=1e-15)
  # An objective whose loss is the weight that reaches it.
  spy = Objective(token_mean, lambda outputs, batch: (batch.importance, {}), correctable=True)
  weights, _ = CORRECTIONS[name](spy, **case["settings"]).token_loss(*as_batch(arrays))
  np.testing.assert_allclose(np.where(arrays["mask"] > 0, weights, 0), case["weights"], rtol=1e-10)


@corrected_cases
def test_the_reference_gradient_of_a_correction_is_that_of_its_loss(name, case):
  check_slopes(case["objective"], case["objective_settings"], case, correction=(name, case["settings"]))


def test_divergences_from_a_teacher_are_the_reference(x64):
  section = GOLDEN["divergences"]
  assert section["defaults"] == {"temperature": inspect.signature(objectives.divergence).parameters["temperature"].default}
  mask, student, teacher = (np.array(section["inputs"][field]) for field in ("mask", "student_logits", "teacher_logits"))
  hidden = np.where(mask[..., None] > 0, student, np.nan)
  for case in section["cases"]:
    of_student = jax.value_and_grad(lambda x, case=case: objectives.divergence(x, teacher, mask, **case["settings"]))
    loss, grad = jax.jit(of_student)(hidden)
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-10)
    np.testing.assert_allclose(grad, case["grad_student_logits"], rtol=1e-10, atol=1e-13)
    # The output head has the same gradient by hand, of one chunk of tokens.
    made, rows = comparer(**case["settings"]), [jnp.asarray(x[mask > 0]) for x in (student, teacher)]
    by_hand = made.gradient(*rows, made.compare(*rows)[1]) / mask.sum()
    np.testing.assert_allclose(by_hand, np.array(case["grad_student_logits"])[mask > 0], rtol=1e-10, atol=1e-13)
    of_reference = lambda x, case=case: reference_terms.divergence(x.tolist(), teacher.tolist(), mask, **case["settings"]).loss
    np.testing.assert_allclose(slopes(of_reference, student), case["grad_student_logits"], rtol=1e-6, atol=2e-9)
  assert {case["settings"]["beta"] for case in section["cases"]} >= {0.0, 0.3, 0.5, 1.0}


def test_advantages_of_a_teacher_and_coefficients_of_the_entropy_are_the_reference(x64):
  for case in GOLDEN["teacher_advantages"]["cases"]:
    fields = ("mask", "old_logprobs", "ref_logprobs", "advantages")
    inputs = {field: jnp.array(GOLDEN["inputs"][case["inputs"]][field], float) for field in fields}
    outside, zeros = jnp.where(inputs["mask"] > 0, 0, jnp.nan), jnp.zeros(inputs["mask"].shape, int)
    batch = TrainBatch(zeros, zeros, zeros, inputs["mask"], inputs["advantages"] + outside, inputs["old_logprobs"] + outside)
    advantages, _ = teacher_advantages(batch, inputs["ref_logprobs"] + outside, outside, **case["settings"])
    np.testing.assert_allclose(advantages, case["advantages"], rtol=1e-10, atol=1e-15)
    assert np.any(advantages)
  assert {case["settings"].get("advice", "opd") for case in GOLDEN["teacher_advantages"]["cases"]} == set(ADVICE)
  for case in GOLDEN["entropy_coefficients"]["cases"]:
    (coef, target, step), made = case["settings"].values(), []
    for entropy in case["entropies"]:
      coef = adapted_entropy_coef(coef, math.nan if entropy is None else entropy, target=target, step=step)
      made.append(coef)
    assert made == case["coefficients"]
    assert 0 in made and len(set(made)) > 2


def test_the_snippets_of_its_readme_run(monkeypatch):
  run_snippets(objectives, 'case["loss"]', '(case["loss"] + 1e-3)', monkeypatch)


def test_by_hand(evaluate):
  # Two responses with ratios (2, 1/2) and (1/2), advantages +1 and −1, clip .2/.28: the surrogates
  # are 1.28, 0.5 and −0.8; the loss is (−1.28 − 0.5 + 0.8)/3.
  logprobs = np.log([[0.5, 0.25], [0.25, 0.9]])
  old_logprobs = np.log([[0.25, 0.5], [0.5, 0.1]])
  batch = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": np.array([1.0, -1.0]), "mask": np.array([[1, 1], [1, 0]])}
  loss, metrics, _ = evaluate("dapo", batch)
  np.testing.assert_allclose(loss, -0.98 / 3, rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 2 / 3, rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/pg_clipfrac_pos"], 1 / 2, rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/pg_clipfrac_neg"], 1, rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/pg_clipfrac_seq"], 1, rtol=1e-6)
  np.testing.assert_allclose(metrics["ratio/mean"], 1, rtol=1e-6)
  np.testing.assert_allclose([metrics["ratio/min"], metrics["ratio/max"]], [0.5, 2], rtol=1e-6)
  # The geometric means of the two responses are 1 and 1/2, and so are the products; the effective
  # sample size is (Σr)²/(n·Σr²) over three tokens and over two products.
  np.testing.assert_allclose([metrics["ratio/sequence/min"], metrics["ratio/sequence/max"]], [0.5, 1], rtol=1e-6)
  np.testing.assert_allclose([metrics["ratio/ess"], metrics["ratio/sequence/ess"]], [9 / (3 * 4.5), 2.25 / (2 * 1.25)], rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/ppo_kl"], math.log(2) / 3, rtol=1e-6)
  # The coefficient of A·∇log π is 0 where the clip binds, else the ratio: 0, 1/2, 0.
  np.testing.assert_allclose([metrics["gate/min"], metrics["gate/mean"], metrics["gate/max"]], [0, 1 / 6, 0.5], rtol=1e-6)


def test_prefixes_by_hand(evaluate):
  # μ = .5 at every token, π = .6, .7, .5; weights w = 1, .9, .8; D = .1, .2, 0, whose 90 % quantile
  # is .18, so b = min(.18, .04) = .04. Z = .1, .18, 0; room min(.15, .15 + .04·W − S) = .15, then
  # .15 + .04 − .1 = .09: the second token is dropped for A > 0.
  logprobs, old_logprobs, ones = np.log([[0.6, 0.7, 0.5]]), np.log([[0.5, 0.5, 0.5]]), np.ones((1, 3))
  cppo = functools.partial(evaluate, "cppo", anchor="old")
  batch = {"logprobs": logprobs, "old_logprobs": old_logprobs, "mask": ones}
  loss, metrics, _ = cppo(batch | {"advantages": ones})
  np.testing.assert_allclose(loss, -(1.2 + 0 + 1) / 3, rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 1 / 3, rtol=1e-6)
  loss, metrics, _ = cppo(batch | {"advantages": -ones})
  np.testing.assert_allclose(loss, (1.2 + 1.4 + 1) / 3, rtol=1e-6)
  assert metrics["actor/pg_clipfrac"] == 0
  # Of 21 tokens two move, by .14 and .02: the quantile is 0, so b is the budget .02, and the room
  # of the second is .15 + .02 − .14 = .03.
  prefix = np.log([[0.64, 0.52, *[0.5] * 19]])
  ones = np.ones((1, 21))
  loss, _, _ = cppo({"logprobs": prefix, "old_logprobs": np.log(ones / 2), "mask": ones, "advantages": ones})
  np.testing.assert_allclose(loss, -(1.28 + 1.04 + 19) / 21, rtol=1e-6)
  # Ratios 2, 1/2, 3 with prefix minima 1, 2, 1/2: weights 2, 1 and 1.5.
  logprobs, ones = np.log([[0.5, 0.25, 0.75]]), np.ones((1, 3))
  batch = {"logprobs": logprobs, "old_logprobs": np.log([[0.25, 0.5, 0.25]]), "mask": ones, "advantages": ones}
  loss, _, _ = evaluate("minpro", batch)
  np.testing.assert_allclose(loss, -np.dot([2, 1, 1.5], logprobs[0]) / 3, rtol=1e-6)


def test_sapo_gates_are_reported_by_the_sign_of_the_advantage(evaluate):
  logprobs = np.log([[0.5, 0.25, 0.5]])
  old_logprobs = np.log([[0.25, 0.5, 0.5]])
  batch = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": np.array([[1.0, -1.0, -1.0]]), "mask": np.ones((1, 3))}
  metrics = evaluate("sapo", batch).metrics
  np.testing.assert_allclose(metrics["sapo/gate_pos"], 1 / math.cosh(0.5) ** 2, rtol=1e-6)
  np.testing.assert_allclose(metrics["sapo/gate_neg"], (1 / math.cosh(1.05 / 4) ** 2 + 1) / 2, rtol=1e-6)
  centred = [4 / tau / (1 + math.exp(-tau * (r - 1))) - 2 / tau + 1 for tau, r in ((1, 2), (1.05, 0.5), (1.05, 1))]
  np.testing.assert_allclose(metrics["sapo/centred_loss"], -(centred[0] - centred[1] - centred[2]) / 3, rtol=1e-6)


def test_dual_clip_is_reported_only_when_set(make_batch, evaluate):
  batch = make_batch(seed=3)
  without = evaluate("dapo", batch).metrics
  with_dual = evaluate("dapo", batch, dual_clip=1.2).metrics
  ratios, counted = np.exp(batch["logprobs"] - batch["old_logprobs"]), batch["mask"] > 0
  assert "actor/pg_clipfrac_lower" not in without
  np.testing.assert_allclose(
    with_dual["actor/pg_clipfrac_lower"], np.mean(((ratios > 1.2) & (batch["advantages"] < 0))[counted]), rtol=1e-6
  )
  assert with_dual["actor/pg_clipfrac_lower"] > 0
