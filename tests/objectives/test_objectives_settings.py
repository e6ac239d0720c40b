"""Every option of every objective does something, and what would not is refused."""

import inspect

import jax
import numpy as np
import pytest

from jaxrl_llm.objectives import OBJECTIVES, make, value
from jaxrl_llm.objectives.settings import RULES

# Each hyper-parameter: the settings before, and its own new value. One entry serves every objective that has it.
TURNS = {
  "clip_low": ({}, 0.05),
  "clip_high": ({}, 0.06),
  "dual_clip": ({}, 1.01),
  "tau_pos": ({}, 3.0),
  "tau_neg": ({}, 3.0),
  "kl_coef": ({}, 0.5),
  "kl_estimator": ({"kl_coef": 0.5}, "k2"),
  "entropy_coef": ({}, 0.1),
  "value_coef": ({}, 0.1),
  "value_clip": ({}, 0.01),
  "weights": ({}, None),
  "max_tokens": ({"weights": "constant", "max_tokens": 10}, 20),
}
OPTIONS = [(name, option) for name, factory in OBJECTIVES.items() for option in inspect.signature(factory).parameters]


def loss_and_grads(objective, batch):
  batch = dict(batch)
  logprobs, values = batch.pop("logprobs"), batch.pop("values")
  (loss, _), grads = jax.value_and_grad(lambda x, v: value(objective, x, values=v, **batch), argnums=(0, 1), has_aux=True)(logprobs, values)
  return [loss, *grads]


def differ(a, b):
  return not all(np.allclose(x, y, rtol=1e-4, atol=1e-7) for x, y in zip(a, b, strict=True))


def test_every_option_has_a_rule_and_a_turn():
  assert {option for _, option in OPTIONS} == set(RULES) == set(TURNS)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_changes_loss_or_gradient(make_batch, name, option):
  batch = make_batch(lengths=(6, 3, 1, 5))
  before, turned = TURNS[option]
  defaults = {k: p.default for k, p in inspect.signature(OBJECTIVES[name]).parameters.items()}
  reference = loss_and_grads(make(name, **before), batch)
  for choice in ("token_mean", "sequence_mean", "constant") if option == "weights" else (turned,):
    if choice == defaults[option]:
      continue
    extra = {"max_tokens": 10} if choice == "constant" else {}
    assert differ(loss_and_grads(make(name, **(before | extra | {option: choice})), batch), reference), choice


@pytest.mark.parametrize("estimators", [("k1", "k2"), ("k2", "k3"), ("k1", "k3")])
def test_kl_estimators_differ(make_batch, estimators):
  a, b = (loss_and_grads(make("grpo", kl_coef=0.5, kl_estimator=e), make_batch()) for e in estimators)
  assert differ(a, b)


WRONG = {
  "clip_low": (-0.1, 1.1, "0.2", True, float("nan"), None),
  "clip_high": (-0.1, "0.2", False, float("nan"), None),
  "dual_clip": (1, 0.5, "3", True, float("nan"), float("inf")),
  "tau_pos": (0, -1, "1", True, float("nan"), float("inf"), None),
  "tau_neg": (0, -1, "1", True, float("nan"), float("inf"), None),
  "kl_coef": (-0.1, "0", True, float("nan"), float("inf"), None),
  "kl_estimator": ("k4", "", None, 3, ["k3"]),
  "entropy_coef": (-0.1, "0", True, float("nan"), float("inf"), None),
  "value_coef": (-0.1, "0", True, float("nan"), None),
  "value_clip": (-0.1, "0", True, float("nan")),
  "weights": ("token-mean", "", None, 1, ["token_mean"]),
  "max_tokens": (0, -5, 2.5, "3000", True),
}


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_illegal_settings_are_named_found_and_expected(name, option):
  for wrong in WRONG[option]:
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


def test_a_name_like_nothing_gets_the_list_alone():
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


def test_numbers_of_any_type_are_the_same_setting(make_batch):
  batch = make_batch()
  for a, b in ((0, 0.0), (np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.int64(1), 1.0)):
    assert not differ(loss_and_grads(make("dapo", clip_low=a), batch), loss_and_grads(make("dapo", clip_low=b), batch))
  a, b = (loss_and_grads(make("dr_grpo", max_tokens=n), batch) for n in (np.int64(50), 50))
  assert not differ(a, b)
