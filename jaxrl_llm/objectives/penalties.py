"""Terms that add to the policy loss, KL estimators, and the controllers of their coefficients.

Each penalty factory returns a function `(outputs, batch) -> (per-token loss, metrics)`.

Penalties see arrays that are 0 outside the mask (see `base.on_mask`). Metrics named `..._loss`
include the coefficient, so that they add up to `actor/loss`. `kl_estimate` serves a KL penalty in
the reward. `adapted_coef` adapts its coefficient, or that of `kl_penalty`; `adapted_entropy_coef`
that of `entropy_bonus`.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.objectives.base import required
from jaxrl_llm.objectives.ratios import LOG_RATIO_BOUND, bounded_log_ratio
from jaxrl_llm.types import PenaltyFn, PolicyOutputs, TokenTerm, TrainBatch

KL_VALUES = {
  "k1": lambda log_u: -log_u,
  "k2": lambda log_u: jnp.square(log_u) / 2,
  # expm1 keeps the digits near u = 1. In float32, the difference of two numbers close to 1 would
  # lose them all.
  "k3": lambda log_u: jnp.expm1(log_u) - log_u,
}
"""One-sample estimators of KL(π‖π_ref) as functions of log u, u = π_ref/π."""


def _straight_through(value: Float[Array, "..."], gradient: Float[Array, "..."]) -> Float[Array, "..."]:
  """Returns the value of one array with the gradient of another."""
  stop = jax.lax.stop_gradient
  # Computes the difference first, which is exactly 0.
  return stop(value) + (gradient - stop(gradient))


KL_ESTIMATORS = {
  **{name: (lambda log_u, log_ratio, value=value: value(log_u)) for name, value in KL_VALUES.items()},
  "k1+": lambda log_u, log_ratio: _straight_through(KL_VALUES["k1"](log_u), KL_VALUES["k2"](log_u)),
  "k3+": lambda log_u, log_ratio: _straight_through(KL_VALUES["k3"](log_u), KL_VALUES["k2"](log_u)),
  "weighted_k3": lambda log_u, log_ratio: jnp.exp(log_ratio) * KL_VALUES["k3"](log_u),
}
"""Penalties on KL(π‖π_ref) in the loss, as functions of log u and of log r, r = π/π_old.

They differ in their gradients (see `kl_penalty`).
"""

MAX_KL_ERROR = 0.2
"""Largest relative error that `adapted_coef` acts on, to limit the effect of outlier batches."""


def kl_penalty(coef: float, estimator: str = "k3") -> PenaltyFn:
  """Penalises divergence of the policy from the frozen reference.

  coef·k(u),  u = π_ref/π:  k1 = −log u,  k2 = ½(log u)²,  k3 = u − 1 − log u,  weighted_k3 = r·k3

  | estimator | mean of the value | mean of the gradient |
  | --- | --- | --- |
  | k1 | KL(π‖π_ref) | 0 |
  | k2 | neither, about KL if π ≈ π_ref | ∇KL(π‖π_ref) |
  | k3 | KL(π‖π_ref) | ∇KL(π_ref‖π) |
  | k1+, k3+ | that of k1, k3 | that of k2 |
  | weighted_k3 | KL(π‖π_ref) | ∇KL(π‖π_ref) |

  All rows hold on-policy, for tokens drawn from π. weighted_k3 also holds for tokens drawn from
  π_old.

  Args:
    coef: Loss per nat of estimated divergence. If the batch has `kl_coefs`, they replace it.
    estimator: Key of `KL_ESTIMATORS`.

  Returns:
    The penalty, with the metrics `actor/kl_loss` (coefficient included), `actor/ref_kl` (the value
    of the chosen estimator, in nats), `actor/ref_kl_k1`, `_k2` and `_k3` side by side, and
    `actor/kl_coef`.

  Raises:
    ValueError: If the penalty is called on a batch without `ref_logprobs`.

  Example:
    >>> zeros = jnp.zeros((1, 1), int)
    >>> batch = TrainBatch(zeros, zeros, zeros, jnp.ones((1, 1)), *2 * [jnp.zeros((1, 1))], ref_logprobs=jnp.array([[-1.]]))
    >>> loss, _ = kl_penalty(0.5, "k2")(PolicyOutputs(jnp.array([[-3.]])), batch)
    >>> loss.tolist()
    [[1.0]]

  References:
    DeepSeekMath (GRPO), arXiv:2402.03300, 2024, eq. 4, for k3.
    DeepSeek-V3.2, arXiv:2512.02556, 2025, for weighted_k3.

  Note:
    Both log-ratios are bounded at ±20, where the gradient ends. r is the token's own ratio to the
    policy that the objective compares with (π_old, or the sampler's if that is the anchor), even if
    the objective compares whole sequences. It corrects the token given its prefix, not the drift of
    the prefix; TRL uses the ratio of the sequence instead. verl caps k3 at 10, where its gradient
    ends; here only the log-ratio is bounded.
  """

  def penalty(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    ref_logprobs = required(batch.ref_logprobs, "ref_logprobs", f"kl_coef is {coef}")
    log_u = bounded_log_ratio(ref_logprobs, outputs.logprobs)
    kl = KL_ESTIMATORS[estimator](log_u, bounded_log_ratio(outputs.logprobs, batch.old_logprobs))
    coefs = jnp.full_like(kl, coef) if batch.kl_coefs is None else batch.kl_coefs
    values = {f"actor/ref_kl_{name}": value(log_u) for name, value in KL_VALUES.items()}
    return coefs * kl, {"actor/kl_loss": coefs * kl, "actor/ref_kl": kl, **values, "actor/kl_coef": coefs}

  return penalty


def kl_estimate(logprobs: ArrayLike, ref_logprobs: ArrayLike, estimator: str = "k1") -> Float[Array, "..."]:
  """Estimates KL(π‖π_ref) at each token for a penalty in the reward, which needs only the value.

  k1 = −log u,  k2 = ½(log u)²,  k3 = u − 1 − log u,  u = π_ref/π

  Args:
    logprobs: Log-probabilities under the policy that drew the tokens, in nats, of any shape; 0 at
      tokens that do not count.
    ref_logprobs: Log-probabilities under the frozen reference, in nats.
    estimator: Name of the estimator: "k1", "k2" or "k3".

  Returns:
    The estimates, in nats, in float32 at least. NaN stays NaN.

  Raises:
    ValueError: If the estimator is unknown, or differs from these three only in its gradient.

  Example:
    >>> kl_estimate(jnp.array([-1., -3.]), jnp.array([-3., -900.]), "k1").tolist()
    [2.0, 20.0]

  References:
    Approximating KL divergence, Schulman, 2020.

  Note:
    The log-ratio is bounded at ±20.
  """
  if estimator not in KL_VALUES:
    choices = ", ".join(map(repr, KL_VALUES))
    raise ValueError(f"estimator: found {estimator!r}, expected one of {choices}, because a reward has a value and no gradient")
  dtype = jnp.result_type(jnp.float32, logprobs, ref_logprobs)
  log_u = jnp.asarray(ref_logprobs, dtype) - jnp.asarray(logprobs, dtype)
  return KL_VALUES[estimator](jnp.clip(log_u, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def adapted_coef(coef: float, kl: float, *, target: float, horizon: float, num_sequences: int) -> float:
  """Computes the next coefficient of a KL penalty, to hold the measured divergence at a target.

  coef·(1 + clip(kl/target − 1, −0.2, 0.2)·num_sequences/horizon)

  The coefficient rises if the divergence is above its target, and falls if it is below.

  Args:
    coef: Current coefficient.
    kl: Divergence measured under this coefficient, in nats, in the units of `target`: per token or
      per sequence.
    target: Divergence to hold, in nats.
    horizon: Number of sequences that the controller takes for a full correction.
    num_sequences: Number of sequences that `kl` was measured on.

  Returns:
    The next coefficient, above 0 if the current one is. A non-finite `kl` leaves it unchanged.

  Raises:
    ValueError: If a setting is illegal, or if the horizon is so short that one step could change
      the sign of the coefficient.

  Example:
    >>> adapted_coef(0.1, 9.0, target=6.0, horizon=10_000, num_sequences=500)
    0.101

  References:
    Fine-tuning language models from human preferences, arXiv:1909.08593, 2019, section 2.2.
  """
  shortest = MAX_KL_ERROR * num_sequences
  of_horizon = f"a finite number of sequences > {MAX_KL_ERROR} * num_sequences = {shortest}"
  rules = (
    ("coef", coef, math.isfinite(coef) and coef >= 0, "a finite number >= 0"),
    ("target", target, math.isfinite(target) and target > 0, "a finite number of nats > 0"),
    ("num_sequences", num_sequences, num_sequences > 0, "a whole number of sequences > 0"),
    ("horizon", horizon, math.isfinite(horizon) and horizon > shortest, of_horizon),
  )
  problems = [f"{name}: found {x!r}, expected {expected}" for name, x, holds, expected in rules if not holds]
  if problems:
    raise ValueError("; ".join(problems))
  if not math.isfinite(kl):
    return float(coef)
  error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
  return float(coef * (1 + error * num_sequences / horizon))


def entropy_bonus(coef: float) -> PenaltyFn:
  """Rewards the entropy of the policy.

  −coef·H(π), H in nats

  Args:
    coef: Reward per nat of entropy. If the batch has `entropy_coefs`, they replace it.

  Returns:
    The penalty, with the metrics `actor/entropy_loss` (coefficient and sign included) and
    `actor/entropy_coef`.

  Raises:
    ValueError: If the penalty is called without the entropy.

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017, eq. 9.
  """

  def penalty(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    entropy = required(outputs.entropy, "entropy", f"entropy_coef is {coef}")
    coefs = jnp.full_like(entropy, coef) if batch.entropy_coefs is None else batch.entropy_coefs
    return -coefs * entropy, {"actor/entropy_loss": -coefs * entropy, "actor/entropy_coef": coefs}

  return penalty


def adapted_entropy_coef(coef: float, entropy: float, *, target: float, step: float) -> float:
  """Computes the next coefficient of an entropy bonus, to hold the measured entropy at a target.

  max(0, coef + step) if the entropy is below its target, max(0, coef − step) if it is above

  Args:
    coef: Current coefficient.
    entropy: Entropy measured under this coefficient, in nats per token.
    target: Entropy to hold, in nats per token.
    step: Change of the coefficient per RL step.

  Returns:
    The next coefficient. A non-finite entropy leaves it unchanged.

  Example:
    >>> adapted_entropy_coef(0.25, 0.1, target=0.2, step=0.125), adapted_entropy_coef(0.25, 0.3, target=0.2, step=0.5)
    (0.375, 0.0)

  References:
    Skywork Open Reasoner 1 Technical Report, arXiv:2505.22312, 2025, section 4.5.

  Note:
    The paper also switches the bonus off as long as the entropy is above the target. Here it fades
    by one step per RL step.
  """
  if not math.isfinite(entropy) or entropy == target:
    return float(coef)
  return float(max(0.0, coef + (step if entropy < target else -step)))


def value_loss(coef: float, clip: float | None = None) -> PenaltyFn:
  """Penalises the critic's squared error, pessimistic outside a band around its old prediction.

  coef·max((V − R̂)², (V_old + clip(V − V_old, −c, c) − R̂)²)

  Args:
    coef: Weight of the squared error; 0.5 gives the usual half square.
    clip: Half-width c of the band, in units of the return; None for the plain square.

  Returns:
    The penalty, with the metrics `critic/vf_loss` (coefficient included), `critic/vf_clipfrac` and
    `critic/vpred_mean`, and, of the old values and the returns, `critic/values/mean`, `/min`,
    `/max` and `critic/returns/mean`, ...

  Raises:
    ValueError: If the penalty is called with values but without returns, or the other way round.

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017, eq. 9; the clip is that of the
      authors' implementation.
  """

  def penalty(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    values = required(outputs.values, "values", "the loss is the critic's")
    returns = required(batch.returns, "returns", "values are given")
    error = jnp.square(values - returns)
    clipped = jnp.zeros_like(error)
    # Without old values, the current ones are the old ones, as at the first update of a rollout
    # batch. No clip can bind then.
    old_values = jax.lax.stop_gradient(values) if batch.old_values is None else batch.old_values
    if clip is not None:
      # Selects as in gates.hard_clip: inside the band the two squares tie, and a maximum would
      # split the gradient.
      step = values - old_values
      bounded = jnp.where(jnp.abs(step) > clip, old_values + jnp.sign(step) * clip, values)
      bounded_error = jnp.square(bounded - returns)
      clipped = (bounded_error > error).astype(error.dtype)
      error = jnp.where(bounded_error > error, bounded_error, error)
      # Restores a NaN among the old values, which comparisons would hide.
      error = jnp.where(jnp.isnan(step), step, error)
    return coef * error, {
      "critic/vf_loss": coef * error,
      "critic/vf_clipfrac": clipped,
      "critic/vpred_mean": values,
      **{f"critic/values/{statistic}": old_values for statistic in ("mean", "min", "max")},
      **{f"critic/returns/{statistic}": returns for statistic in ("mean", "min", "max")},
    }

  return penalty
