"""Results of verl's and TRL's own loss functions on the inputs of golden.json, against ours.

`peers.py` has recorded them. Where the definitions agree, loss, gradient and clip fraction must
agree. Where they differ, the difference is stated here in one line and in numbers: `scale` (theirs
= scale x ours), another setting of ours, or a separate test. A new recording is needed only for a
new case, a new version of a peer, or other inputs in golden.json.
"""

import json
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxrl_llm.objectives import make, value
from jaxrl_llm.objectives.corrections import off_policy_mask, tis
from tests.marks import few
from tests.objectives import peers

RECORDED = json.loads(peers.PEERS.read_text(encoding="utf-8"))
INPUTS = json.loads(peers.GOLDEN.read_text(encoding="utf-8"))["inputs"]
EXACT = 1e-10
EPSILON = 3e-8
"""verl divides a sequence's sum by |y| + 1e-8, an error of 1e-8 of a term if |y| = 1."""
SINGLE = 2e-7
"""TRL's SAPO takes τ from `torch.where(A > 0, 1.0, 1.05)`.

This is a float32 for two Python numbers, so 1.05 is 4.8e-8 too small.
"""


class Ours(NamedTuple):
  """Equivalent objective and settings of this package."""

  name: str
  settings: dict[str, Any] = {}  # noqa: RUF012
  rtol: float = EXACT
  scale: float = 1.0
  """Their loss divided by ours."""
  same_value: bool = True
  """Whether the loss agrees, not only its gradient."""
  clip_fraction: str | None = "actor/pg_clipfrac"
  """Metric of this package that equals the peer's clip fraction, if any."""


def penalty_only(estimator):
  return Ours("dapo", {"kl_coef": 1.0, "kl_estimator": estimator})


GSPO_WIDE = {"clip_low": 0.05, "clip_high": 0.1}
# TRL's clip fraction counts sequences if it weighs sequences; ours of the plain name always counts
# tokens.
OF_SEQUENCES = "actor/pg_clipfrac_seq"

AGREE = {
  "verl": {
    "vanilla-dual-clip": Ours("ppo", {"dual_clip": 1.3}),
    "vanilla-without-dual-clip": Ours("ppo"),
    "vanilla-dapo": Ours("dapo"),
    "vanilla-seq-mean-token-sum": Ours("ppo", {"weights": "sequence_sum"}),
    "vanilla-seq-mean-token-mean": Ours("grpo", {"kl_coef": 0.0}, EPSILON),
    "vanilla-constant": Ours("dr_grpo", {"max_tokens": 7}),
    "vanilla-minirl": Ours("minirl"),
    "gspo": Ours("gspo", {}, EPSILON),
    "gspo-wide": Ours("gspo", GSPO_WIDE, EPSILON),
    "gspo-wide-token-mean": Ours("gspo", {**GSPO_WIDE, "weights": "token_mean"}),
    "gspo-token-advantages": Ours("gspo_token", GSPO_WIDE, EPSILON),
    "sapo": Ours("sapo", {}, EPSILON),
    "sapo-narrow": Ours("sapo", {"tau_pos": 3.0, "tau_neg": 0.5}, EPSILON),
    "cispo": Ours("cispo"),
    "cispo-two-sided": Ours("cispo", {"clip_low": 0.3, "clip_high": 0.5}),
    "cispo-script": Ours("cispo", {"clip_high": 0.2}),
    "dppo-tv": Ours("dppo_tv"),
    "dppo-tv-narrow": Ours("dppo_tv", {"delta_low": 0.05, "delta_high": 0.3, "ratio_cap": 1.5}),
    "dppo-tv-old": Ours("dppo_tv", {"anchor": "old"}),
    "dppo-kl": Ours("dppo_kl"),
    "dppo-kl-narrow": Ours("dppo_kl", {"delta_low": 0.01, "delta_high": 0.1, "ratio_cap": 1.5}),
    "dppo-kl-old": Ours("dppo_kl", {"anchor": "old"}),
    "value": Ours("ppo"),
    "value-narrow": Ours("ppo", {"value_clip": 0.05, "weights": "sequence_mean"}, EPSILON),
    **{f"kl-{estimator}": penalty_only(estimator) for estimator in ("k1", "k2", "k3", "k1+", "k3+")},
  },
  "trl": {
    "grpo": Ours("grpo"),
    "grpo-token-advantages": Ours("grpo", {"kl_coef": 0.0}),
    "bnpo": Ours("dapo"),
    "dapo": Ours("dapo"),
    "dapo-entropy": Ours("dapo", {"entropy_coef": 0.01}),
    "dapo-tis": Ours("minirl", {"clip_high": 0.28, "tis_cap": 2.0, "weights": "token_mean"}),
    "dr-grpo": Ours("dr_grpo"),
    "gspo": Ours("gspo", {}, clip_fraction=OF_SEQUENCES),
    "gspo-wide": Ours("gspo", GSPO_WIDE, clip_fraction=OF_SEQUENCES),
    "gspo-token-advantages": Ours("gspo", GSPO_WIDE),
    "gspo-kl": Ours("gspo", {**GSPO_WIDE, "kl_coef": 0.3}, clip_fraction=OF_SEQUENCES),
    "luspo": Ours("luspo", {}, clip_fraction=OF_SEQUENCES),
    "luspo-near": Ours("luspo", {}, clip_fraction=OF_SEQUENCES),
    "sapo": Ours("sapo", {}, SINGLE),
    "sapo-sequence": Ours("custom", {"ratio": "sequence", "gate": "soft", "weights": "sequence_mean"}, SINGLE),
    "vespo": Ours("vespo"),
    "vespo-near": Ours("vespo"),
    "vespo-zero-advantage": Ours("vespo"),
    "delta": Ours("dapo", {"clip_high": 0.2, "dual_clip": 1.3}),
    "weighted-kl": Ours("dapo", {"clip_high": 0.2, "kl_coef": 0.3, "kl_estimator": "weighted_k3"}),
    "gmpo": Ours("gmpo"),
    "gmpo-kl": Ours("gmpo", {"log_clip_low": 0.1, "log_clip_high": 0.2, "kl_coef": 0.3}),
    "rloo": Ours("rloo", {}, clip_fraction=OF_SEQUENCES),
    "rloo-wide": Ours("rloo", {"clip_low": 0.5, "clip_high": 1.0}, clip_fraction=OF_SEQUENCES),
  },
}

DIFFER = {
  "verl": {
    # The dual clip at 3 is always on; ours is off unless set.
    "vanilla": Ours("ppo", {"dual_clip": 3.0}),
    # Without a loss_scale_factor the constant is the padded width, here 6, so padding changes the
    # loss. Our constant must be given.
    "vanilla-padded-width": Ours("dr_grpo", {"max_tokens": 6}),
    # This is a plain sum over all tokens, here 16. Ours has no weights that grow with the batch.
    "vanilla-token-sum": Ours("ppo", {}, scale=16),
    # Given a global_batch_size, verl counts every row, here 5; ours counts the 4 that have a
    # counted token.
    "vanilla-all-rows-count": Ours("ppo", {"weights": "sequence_sum"}, scale=4 / 5),
    # GMPO is a plain mean over all rows of a micro-batch, even those without a counted token,
    # whatever loss_agg_mode is. Its clip fraction counts a token that is out on either side; ours
    # counts one whose gradient has ended.
    "geo-mean": Ours("gmpo", {}, EPSILON, clip_fraction=None),
    "geo-mean-narrow": Ours("gmpo", {"log_clip_low": 0.1, "log_clip_high": 0.2}, EPSILON, clip_fraction=None),
    "geo-mean-with-an-empty-row": Ours("gmpo", {}, EPSILON, scale=4 / 5, clip_fraction=None),
    # With one advantage per token, verl takes their mean before the product; the sum is the same.
    "geo-mean-token-advantages": Ours("gmpo", {}, EPSILON, clip_fraction=None),
    # Their value is −A·log π. Ours is −A, which has the same gradient and is comparable to that of
    # other methods.
    "reinforce": Ours("reinforce", {}, same_value=False),
    "gpg": Ours("reinforce", {"weights": "token_mean"}, same_value=False),
  },
  "trl": {
    # Their mean is over all rows; ours is over the rows that have a counted token.
    "grpo-with-an-empty-row": Ours("grpo", {"kl_coef": 0.0}, scale=4 / 5),
    # CISPO's cap is the ratio itself, ours its distance from 1.
    "cispo": Ours("cispo", {"clip_high": 5.0 - 1.0}),
    "cispo-near": Ours("cispo", {"clip_high": 1.1 - 1.0}),
    # If no cap is set it is 0.2: every weight becomes 0.2, which makes the learning rate five times
    # smaller.
    "cispo-unset": Ours("reinforce", {"weights": "token_mean"}, scale=0.2, same_value=False),
    # delta caps the ratio before both branches. Above 1 + epsilon_high it is the dual clip. Below
    # it, A < 0 ends at 1 + epsilon_high and A > 0 at delta.
    "delta-inside-the-band": Ours("dapo", {"clip_high": 1.1 - 1.0, "dual_clip": 1.2}, clip_fraction=None),
  },
}
ALONE = {"verl": {"kl-k3-far-from-the-reference"}, "trl": {"grpo-entropy", "gspo-weighted-kl", "off-policy-mask"}}
"""Cases with a separate test below."""

COMPARED = [(peer, name, ours) for table in (AGREE, DIFFER) for peer, cases in table.items() for name, ours in cases.items()]


def arguments(case, name):
  """Returns the arguments of `objectives.value` on the inputs of a recorded case."""
  inputs = {field: np.asarray(rows, float) for field, rows in peers.inputs_of(case, name, INPUTS).items()}
  critic = ("values", "returns", "old_values")
  if case["function"] in ("compute_value_loss", "kl_penalty"):
    inputs["advantages"] = np.zeros_like(inputs["advantages"])
  return {field: x for field, x in inputs.items() if case["function"] == "compute_value_loss" or field not in critic}


@pytest.fixture
def run(x64, evaluate):
  """`(ours, peer, name) -> our loss, our gradient of the case, our metrics, their record`."""

  def run_case(ours, peer, name):
    case = RECORDED[peer][name]
    loss, metrics, grads = evaluate(ours.name, arguments(case, name), wanted=("actor/pg_clipfrac",), **ours.settings)
    return loss, grads["values" if case["function"] == "compute_value_loss" else "logprobs"], metrics, case

  return run_case


def test_the_record_is_of_these_inputs_and_these_cases():
  assert RECORDED["inputs_sha256"] == peers.inputs_digest(INPUTS), "golden.json's inputs have changed: run tests/objectives/peers.py again"
  assert RECORDED["versions"] == peers.VERSIONS
  for peer, cases in peers.all_cases().items():
    assert list(cases) == list(RECORDED[peer])
    for name, case in cases.items():
      assert {key: RECORDED[peer][name][key] for key in case} == case, (peer, name)
    assert set(cases) == {*AGREE[peer], *DIFFER[peer], *ALONE[peer]}


@pytest.mark.parametrize(
  ("peer", "name", "ours"), few(COMPARED, *range(0, len(COMPARED), 3), rest="slow"), ids=[f"{peer}-{name}" for peer, name, _ in COMPARED]
)
def test_loss_and_gradient_are_the_peers(run, peer, name, ours):
  loss, grad, metrics, case = run(ours, peer, name)
  assert loss.dtype == np.float64
  np.testing.assert_allclose(ours.scale * grad, case["grad"], rtol=ours.rtol, atol=1e-15)
  assert np.any(grad)
  if ours.same_value:
    # A loss sums terms of both signs, so the relative error of the sum may exceed that of a term.
    np.testing.assert_allclose(ours.scale * loss, case["loss"], rtol=EXACT, atol=0 if ours.rtol == EXACT else ours.rtol)
  else:
    assert not np.isclose(ours.scale * loss, case["loss"], rtol=1e-2)
  theirs = [case["metrics"][key] for key in ("actor/pg_clipfrac", "clip_ratio/region_mean") if key in case["metrics"]]
  # verl reports 0 if it has no clip.
  if theirs and ours.clip_fraction in metrics:
    # Theirs is a float32, and verl adds 1e-8 to the number of tokens.
    np.testing.assert_allclose(metrics[ours.clip_fraction], theirs[0], rtol=1e-6)


@pytest.mark.parametrize(("name", "plain"), [("vanilla", Ours("ppo")), ("vanilla-padded-width", Ours("dr_grpo"))])
def test_verl_defaults_are_not_ours(run, name, plain):
  _, grad, _, case = run(plain, "verl", name)
  assert not np.allclose(grad, case["grad"], rtol=1e-3, atol=0)


def test_verl_caps_k3_at_10_and_ours_does_not(run):
  loss, grad, _, case = run(penalty_only("k3"), "verl", "kl-k3-far-from-the-reference")
  theirs, token = np.asarray(case["grad"]), (0, 0)
  # log u = 5 at that token: k3 is e⁵ − 6 = 142 with slope 1 − e⁵; theirs is 10 with slope 0.
  np.testing.assert_allclose(loss - case["loss"], (np.exp(5.0) - 6 - 10) / 16, rtol=EXACT)
  np.testing.assert_allclose(grad[token], (1 - np.exp(5.0)) / 16, rtol=EXACT)
  assert theirs[token] == 0
  others = np.arange(grad.size) > 0
  np.testing.assert_allclose(grad.ravel()[others], theirs.ravel()[others], rtol=EXACT, atol=1e-15)


def test_trl_takes_the_entropy_bonus_over_tokens_whatever_the_weights(run):
  without, grad, _, case = run(Ours("grpo", {"kl_coef": 0.0}), "trl", "grpo-entropy")
  with_bonus, _, _, _ = run(Ours("grpo", {"kl_coef": 0.0, "entropy_coef": 0.01}), "trl", "grpo-entropy")
  entropy, mask = (arguments(case, "")[field] for field in ("entropy", "mask"))
  np.testing.assert_allclose(grad, case["grad"], rtol=EXACT, atol=1e-15)
  np.testing.assert_allclose(without - 0.01 * (entropy * mask).sum() / mask.sum(), case["loss"], rtol=EXACT)
  of_sequences = np.mean((entropy * mask).sum(1) / mask.sum(1))
  np.testing.assert_allclose(with_bonus, without - 0.01 * of_sequences, rtol=EXACT)


def test_trl_weighs_the_kl_by_the_sequence_ratio_at_that_level(run):
  settings = GSPO_WIDE | {"kl_coef": 0.3, "kl_estimator": "weighted_k3"}
  plain, _, _, case = run(Ours("gspo", GSPO_WIDE), "trl", "gspo-weighted-kl")
  ours, _, _, _ = run(Ours("gspo", settings), "trl", "gspo-weighted-kl")
  x = arguments(case, "")
  lengths, z, log_u = x["mask"].sum(1, keepdims=True), x["logprobs"] - x["old_logprobs"], x["ref_logprobs"] - x["logprobs"]
  s, weights = np.exp((z * x["mask"]).sum(1, keepdims=True) / lengths), x["mask"] / lengths / len(lengths)
  k3 = np.exp(log_u) - 1 - log_u
  np.testing.assert_allclose(plain + 0.3 * (weights * s * k3).sum(), case["loss"], rtol=EXACT)
  np.testing.assert_allclose(plain + 0.3 * (weights * np.exp(z) * k3).sum(), ours, rtol=EXACT)
  assert not np.isclose(ours, case["loss"], rtol=1e-3)


def test_corrections_are_the_peers(x64):
  masked = off_policy_mask(make("grpo", kl_coef=0.0), delta=0.2, anchor="sampler")
  for name, objective in (("off-policy-mask", masked), ("dapo-tis", tis(make("dapo"), cap=2.0))):
    case = RECORDED["trl"][name]
    x = arguments(case, name)

    def loss_fn(logprobs, objective=objective, x=x):
      return value(objective, **(x | {"logprobs": logprobs}))[0]

    loss, grad = jax.jit(jax.value_and_grad(loss_fn))(x["logprobs"])
    np.testing.assert_allclose(loss, case["loss"], rtol=EXACT)
    np.testing.assert_allclose(grad, case["grad"], rtol=EXACT, atol=1e-15)
