"""Every option of every objective has an effect, and settings without effect are refused."""

import inspect
import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import OBJECTIVES, make
from jaxrl_llm.objectives.base import WEIGHTS, weights_by_name
from jaxrl_llm.objectives.gates import GATES, unclipped
from jaxrl_llm.objectives.penalties import KL_ESTIMATORS
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.settings import RULES, checked, gate_settings
from jaxrl_llm.segments import token_mean, token_weights
from jaxrl_llm.types import Objective
from tests.marks import few

# Each hyper-parameter has the settings before and its own new value. One entry serves every
# objective that has it.
TURNS = {
  "ratio": ({}, "sequence"),
  "gate": ({}, "soft"),
  "anchor": ({"anchor": "sampler"}, "old"),
  "clip_low": ({}, 0.05),
  "clip_high": ({}, 0.06),
  "dual_clip": ({}, 1.01),
  "tau_pos": ({}, 3.0),
  "tau_neg": ({}, 3.0),
  "log_clip_low": ({}, 0.05),
  "log_clip_high": ({}, 0.06),
  "sigma": ({}, 0.2),
  "alpha": ({}, 2.0),
  "beta": ({}, 1.0),
  "k_pos": ({}, 1.0),
  "lambda_pos": ({}, 1.0),
  "k_neg": ({}, 1.0),
  "lambda_neg": ({}, 1.0),
  "delta_low": ({}, 1e-3),
  "delta_high": ({}, 1e-3),
  "ratio_cap": ({}, 1.1),
  "delta": ({}, 0.05),
  "w_min": ({}, 0.1),
  "budget": ({}, 0.0),
  "tis_cap": ({}, 1.01),
  "pull": ({}, 1.0),
  "half_life": ({"future_cap": 1.0}, 1.0),
  "future_cap": ({}, 1.0),
  "safe_ratio": ({"future_cap": 1.0, "half_life": 0.1}, 1.01),
  "cov_share": ({"cov_low": -9.0}, 0.5),
  "cov_low": ({"cov_share": 0.9}, -9.0),
  "cov_high": ({"cov_share": 0.9, "cov_low": 0.0}, 0.1),
  "cov_kl_coef": ({"cov_share": 0.5}, 3.0),
  "kl_coef": ({}, 0.5),
  "kl_estimator": ({"kl_coef": 0.5}, "k2"),
  "entropy_coef": ({}, 0.1),
  "value_coef": ({}, 0.1),
  "value_clip": ({"value_coef": 0.5}, 0.01),
}
THIRD_SLOT = ("weights", "max_tokens")
# Options with a rule in `RULES`. The golden table checks that options with their own rule have an
# effect.
OPTIONS = [(name, option) for name, factory in OBJECTIVES.items() for option in inspect.signature(factory).parameters if option in RULES]
GATE_SETTINGS = {setting for gate in GATES for setting in gate_settings(gate)}


def with_its_gate(name, option):
  """Returns the first gate that has a setting, which makes `custom` read it."""
  if name != "custom" or option not in GATE_SETTINGS:
    return {}
  return {"gate": next(gate for gate in GATES if option in gate_settings(gate))}


def parts(evaluation):
  return [evaluation.loss, *evaluation.grads.values()]


def differ(a, b):
  return not all(np.allclose(x, y, rtol=1e-4, atol=1e-7) for x, y in zip(a, b, strict=True))


def test_every_option_has_a_rule_and_a_turn():
  assert {option for _, option in OPTIONS} == set(RULES) == {*TURNS, *THIRD_SLOT}


TURNED = [(name, option) for name, option in OPTIONS if option not in THIRD_SLOT]
# Most objectives share their options: each option once, and all of two objectives by default.
AGAIN = [i for i, (_, option) in enumerate(TURNED) if option in [other for _, other in TURNED[:i]]]


@pytest.mark.parametrize(("name", "option"), few(TURNED, "ppo", "gspo", rest="slow", by_hand=AGAIN))
def test_every_option_changes_loss_or_gradient(make_batch, evaluate, name, option):
  batch = make_batch(lengths=(6, 3, 1, 5))
  before, turned = TURNS[option]
  before = {key: x for key, x in before.items() if key in inspect.signature(OBJECTIVES[name]).parameters}
  before |= with_its_gate(name, option)
  reference, changed = (parts(evaluate(name, batch, wanted=(), **before | new)) for new in ({}, {option: turned}))
  assert differ(changed, reference)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_choice_of_weights_changes_the_weights(make_batch, name):
  """The weights are the whole third slot, and the loss is linear in them."""
  mask = jnp.asarray(make_batch(lengths=(6, 3, 1, 5))["mask"])
  groups = jnp.zeros(mask.shape, int).at[3].set(1)
  choices = [{"weights": weights} for weights in WEIGHTS if weights != "constant" and (name, weights) != ("sft", "prompt_mean")]
  choices += [{"weights": "constant", "max_tokens": max_tokens} for max_tokens in (10, 20)]
  by_choice = [token_weights(make(name, **choice), mask, None, groups) for choice in choices]
  assert not any(np.allclose(a, b) for a, b in itertools.combinations(by_choice, 2))
  default = inspect.signature(OBJECTIVES[name]).parameters["weights"].default
  expected = weights_by_name(default, inspect.signature(OBJECTIVES[name]).parameters["max_tokens"].default)
  np.testing.assert_array_equal(make(name).weigh(mask, None), expected(mask, None))


def test_kl_estimators_differ(make_batch, evaluate):
  outcomes = {
    name: parts(evaluate("grpo", make_batch(), wanted=(), kl_coef=0.5, kl_estimator=name)) for name in KL_ESTIMATORS
  }
  for name, other in itertools.combinations(outcomes, 2):
    assert differ(outcomes[name], outcomes[other]), (name, other)


POSITIVE = (0, -1, "1", True, float("nan"), float("inf"), None)
COEFFICIENT = (-0.1, "0", True, float("nan"), float("inf"), None)
BOUND = (-0.1, "0.2", False, float("nan"), None)
CAP = (0.9, -1, "2", True, float("nan"), None)

WRONG = {
  "ratio": ("tokens", "", None, 1, ["token"]),
  "gate": ("clip", "", None, 1, ["hard"]),
  "anchor": ("mu", "", None, 1, ["old"]),
  "clip_low": (-0.1, 1.1, "0.2", True, float("nan"), None),
  "clip_high": BOUND,
  "dual_clip": (1, 0.5, "3", True, float("nan"), float("inf")),
  "tau_pos": POSITIVE,
  "tau_neg": POSITIVE,
  "log_clip_low": BOUND,
  "log_clip_high": BOUND,
  "sigma": POSITIVE,
  "alpha": COEFFICIENT,
  "beta": COEFFICIENT,
  "k_pos": COEFFICIENT,
  "lambda_pos": POSITIVE,
  "k_neg": COEFFICIENT,
  "lambda_neg": POSITIVE,
  "delta_low": BOUND,
  "delta_high": BOUND,
  "ratio_cap": CAP,
  "delta": (*BOUND, 1.1),
  "w_min": (0, 1.1, "1", True, float("nan"), None),
  "budget": COEFFICIENT,
  "tis_cap": CAP,
  "pull": COEFFICIENT,
  "half_life": POSITIVE,
  "future_cap": COEFFICIENT,
  "safe_ratio": CAP,
  "cov_share": (0, 1, -0.1, "0.1", True, float("nan"), None),
  "cov_low": ("1", True, float("nan"), None),
  "cov_high": ("5", True, float("nan"), None),
  "cov_kl_coef": COEFFICIENT,
  "kl_coef": COEFFICIENT,
  "kl_estimator": ("k4", "", None, 3, ["k3"]),
  "entropy_coef": COEFFICIENT,
  "value_coef": (-0.1, "0", True, float("nan"), None),
  "value_clip": (-0.1, "0", True, float("nan")),
  "weights": ("token-mean", "", None, 1, ["token_mean"]),
  "max_tokens": (0, -5, 2.5, "3000", True),
}


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_illegal_settings_are_named_with_found_and_expected(name, option):
  default = inspect.signature(OBJECTIVES[name]).parameters[option].default
  for wrong in WRONG[option]:
    if wrong is None and default is None:
      continue  # Unset.
    with pytest.raises(ValueError) as error:
      make(name, **{option: wrong})
    message = str(error.value)
    assert message.startswith(f"{name}: {option}: found {wrong!r}, expected ") and "\n" not in message


@pytest.mark.parametrize(
  ("name", "changes", "message"),
  [
    ("grpo", {"weights": "constant"}, "max_tokens: found None, expected .*because weights is 'constant'"),
    ("sft", {"weights": "constant"}, "max_tokens: found None"),
    ("dr_grpo", {"max_tokens": None}, "max_tokens: found None"),
    ("dapo", {"max_tokens": 8}, "max_tokens: found 8, expected None, because weights is 'token_mean'"),
    ("dr_grpo", {"weights": "token_mean", "max_tokens": 8}, "max_tokens: found 8, expected None"),
    ("gspo", {"kl_estimator": "k1"}, "kl_estimator: found 'k1', expected 'k3', because kl_coef is 0"),
    ("grpo", {"kl_coef": 0, "kl_estimator": "k2"}, "kl_estimator: found 'k2'"),
    ("ppo", {"value_coef": 0, "value_clip": 0.1}, "value_clip: found 0.1, expected 0.2, because value_coef is 0"),
    ("clip_cov", {"cov_low": 6.0}, "cov_low: found 6.0, expected at most cov_high=5.0"),
    ("custom", {"value_clip": 0.2}, "value_clip: found 0.2, expected None, because value_coef is 0"),
    ("custom", {"kl_estimator": "k1"}, "kl_estimator: found 'k1', expected 'k3', because kl_coef is 0"),
    ("custom", {"weights": "constant"}, "max_tokens: found None, expected a whole number"),
    ("custom", {"weights": token_mean, "max_tokens": 8}, "max_tokens: found 8, expected None"),
    ("custom", {"tau_pos": 1.0}, "tau_pos: found 1.0, expected None, because gate is 'hard' and takes clip_low=0.2, clip_high=0.2, dual_"),
    ("custom", {"gate": "soft", "dual_clip": 3}, "dual_clip: found 3, expected None, because gate is 'soft' and takes tau_pos=1.0, tau_ne"),
    ("custom", {"gate": "none", "clip_low": 0.1}, "clip_low: found 0.1, expected None, because gate is 'none' and takes no settings"),
    ("custom", {"gate": unclipped(), "clip_low": 0.1}, "clip_low: found 0.1, expected None, because gate is a function and takes no"),
    ("custom", {"gate": "geometric", "clip_high": 0.1}, r"clip_high: found 0.1, .* \(did you mean 'log_clip_high'\?\)"),
    ("custom", {"gate": "kl_ball", "delta": 0.1}, r"delta: found 0.1, .* takes delta_low=0.05, .*\(did you mean 'delta_\w+'\?\)"),
  ],
)
def test_settings_without_effect_are_refused(name, changes, message):
  with pytest.raises(ValueError, match=f"^{name}: {message}"):
    make(name, **changes)


def test_all_problems_come_in_one_line():
  with pytest.raises(ValueError) as error:
    make("gspo", clip_low=-1, weights="tokens", tau=3)
  message = str(error.value)
  assert all(part in message for part in ("clip_low: found -1", "weights: found 'tokens'", "unknown hyper-parameter 'tau'"))
  assert "\n" not in message


@pytest.mark.parametrize(("wrong", "right"), [("gsop", "gspo"), ("GRPO", "grpo"), ("dr-grpo", "dr_grpo"), ("gspotoken", "gspo_token")])
def test_a_wrong_name_is_corrected(wrong, right):
  with pytest.raises(ValueError, match=rf"^unknown objective '{wrong}' \(did you mean '{right}'\?\); known: ppo, grpo, ") as error:
    make(wrong)
  assert all(name in str(error.value) for name in OBJECTIVES)


def test_an_unfamiliar_name_gets_only_the_list():
  with pytest.raises(ValueError, match="^unknown objective 'xyzzy'; known: ppo") as error:
    make("xyzzy")
  assert "did you mean" not in str(error.value)


def test_a_wrong_hyper_parameter_is_corrected():
  with pytest.raises(ValueError) as error:
    make("sapo", tau_positive=1.0)
  message = str(error.value)
  assert message.startswith("sapo: unknown hyper-parameter 'tau_positive' (did you mean 'tau_pos'?); it takes tau_pos=1.0, tau_neg=1.05, ")
  with pytest.raises(ValueError, match="unknown hyper-parameter 'clip_low'.*it takes tau_pos"):
    make("sapo", clip_low=0.2)
  with pytest.raises(ValueError, match="did you mean 'clip_high'"):
    OBJECTIVES["dapo"](clip_hi=0.3)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_signature_and_docstring_name_every_setting(name):
  """These include the shared ones; `**gate_settings` stands for those of the gates."""
  factory = OBJECTIVES[name]
  sections = re.split(r"\n\n(?=\w+:\n)", inspect.cleandoc(factory.__doc__))
  documented = re.findall(r"^  (\w+):", next(section for section in sections if section.startswith("Args:")), flags=re.MULTILINE)
  expected = [setting for setting in inspect.signature(factory).parameters if name != "custom" or setting not in GATE_SETTINGS]
  assert documented == expected
  headings = [section.partition(":")[0] for section in sections if section.partition("\n")[0].endswith(":")]
  assert headings == [h for h in ("Args", "Returns", "Raises", "Example", "References", "Note") if h in headings] and len(headings) >= 4
  assert factory.__name__ == name and inspect.signature(factory).return_annotation is Objective


NAMED_BY_PARTS = {
  "dapo": {"clip_high": 0.28},
  "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "weights": "sequence_mean"},
  "rloo": {"ratio": "product", "weights": "sequence_mean"},
  "vespo": {"ratio": "product", "gate": "gamma"},
  "sapo": {"gate": "soft", "weights": "sequence_mean"},
  "gmpo": {"gate": "geometric", "weights": "sequence_mean"},
  "cispo": {"gate": "capped"},
  "dppo_tv": {"gate": "tv_ball", "anchor": "sampler"},
  "dppo_kl": {"gate": "kl_ball", "anchor": "sampler"},
  "cppo": {"gate": "prefix_budget", "anchor": "sampler"},
  "minpro": {"ratio": "prefix_min", "gate": "capped"},
  "maspo": {"gate": "gaussian"},
  "fipo": {"gate": "future"},
  "topr": {"ratio": "product", "gate": "tapered", "anchor": "sampler", "weights": "sequence_sum"},
}


@pytest.mark.parametrize("name", few(NAMED_BY_PARTS, 0, 1, 2))
def test_a_custom_objective_with_the_parts_of_a_named_one_equals_it(make_batch, evaluate, name):
  batch = make_batch(lengths=(6, 3, 1, 5))
  settings = NAMED_BY_PARTS[name]
  assert make("custom", **settings).needs == make(name).needs
  actual, expected = (parts(evaluate(n, batch, wanted=(), **s)) for n, s in (("custom", settings), (name, {})))
  for x, y in zip(actual, expected, strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_custom_objective_takes_functions(make_batch, gradient):
  batch = make_batch()
  by_function = gradient("custom", batch, ratio=token_ratio, gate=unclipped(), weights=token_mean)
  np.testing.assert_array_equal(by_function, gradient("custom", batch, ratio="token", gate="none", weights="token_mean"))
  with pytest.raises(ValueError, match="^ppo: weights: found <function token_mean"):
    make("ppo", weights=token_mean)


def test_numbers_of_any_type_are_the_same_setting():
  received = []

  def factory(*, clip_low=0.2, weights="constant", max_tokens=50):
    received[:] = clip_low, weights, max_tokens
    return make("sft")

  for a, b in ((0, 0.0), (np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.int64(1), 1.0)):
    checked(factory)(clip_low=a)
    assert received == [b, "constant", 50] and type(received[0]) is float
  checked(factory)(max_tokens=np.int64(7))
  assert received[2] == 7 and type(received[2]) is int
