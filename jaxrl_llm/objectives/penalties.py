"""Terms that add to the policy loss. Factories of `(outputs, batch) -> (per-token loss, metrics)`.

They see arrays that are 0 off the mask (see `base.on_mask`). Metrics named `..._loss` include the coefficient, so that they add up to
`actor/loss`. Beside them stand the estimators of KL(π‖π_ref) for a penalty in the reward, and the controller of its coefficient.
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
  # expm1 keeps the digits near u = 1, where the difference of two numbers close to 1 would lose them all in float32.
  "k3": lambda log_u: jnp.expm1(log_u) - log_u,
}
"""One-sample estimators of KL(π‖π_ref) as functions of log u, u = π_ref/π."""


def _straight_through(value: Float[Array, "..."], gradient: Float[Array, "..."]) -> Float[Array, "..."]:
  """The value of one array with the gradient of another."""
  stop = jax.lax.stop_gradient
  # The difference comes first: it is exactly 0.
  return stop(value) + (gradient - stop(gradient))


KL_ESTIMATORS = {
  **{name: (lambda log_u, log_ratio, value=value: value(log_u)) for name, value in KL_VALUES.items()},
  "k1+": lambda log_u, log_ratio: _straight_through(KL_VALUES["k1"](log_u), KL_VALUES["k2"](log_u)),
  "k3+": lambda log_u, log_ratio: _straight_through(KL_VALUES["k3"](log_u), KL_VALUES["k2"](log_u)),
  "weighted_k3": lambda log_u, log_ratio: jnp.exp(log_ratio) * KL_VALUES["k3"](log_u),
}
"""Penalties on KL(π‖π_ref) in the loss, as functions of log u and of log r, r = π/π_old; they differ in their gradients (`kl_penalty`)."""

MAX_KL_ERROR = 0.2
"""Largest relative error that `adapted_coef` acts on, so that one odd batch cannot throw the coefficient."""


def kl_penalty(coef: float, estimator: str = "k3") -> PenaltyFn:
  """Keeps the policy near the frozen reference.

  coef·k(u),  u = π_ref/π:  k1 = −log u,  k2 = ½(log u)²,  k3 = u − 1 − log u,  weighted_k3 = r·k3

  | estimator | mean of the value | mean of the gradient |
  | --- | --- | --- |
  | k1 | KL(π‖π_ref) | 0 |
  | k2 | neither, about KL where π ≈ π_ref | ∇KL(π‖π_ref) |
  | k3 | KL(π‖π_ref) | ∇KL(π_ref‖π) |
  | k1+, k3+ | that of k1, k3 | that of k2 |
  | weighted_k3 | KL(π‖π_ref) | ∇KL(π‖π_ref) |

  All hold on-policy, for tokens drawn from π; weighted_k3 holds for tokens drawn from π_old as well.

  Args:
    coef: loss per nat of estimated divergence; where the batch has `kl_coefs`, these are taken in its place.
    estimator: a key of `KL_ESTIMATORS`.

  Returns:
    The penalty. Its metrics: `actor/kl_loss` (coefficient included), `actor/ref_kl` (the value of the chosen estimator, in nats),
    `actor/ref_kl_k1`, `_k2` and `_k3` side by side, and `actor/kl_coef`.

  Raises:
    ValueError: at the call, where the batch has no `ref_logprobs`.

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
    Both log-ratios are bounded at ±20, where the gradient ends. r is the token's own ratio to the policy that the objective compares with
    (π_old, or the sampler's where that is its anchor), also where the objective compares whole sequences; it corrects the token given what
    stands before it, not the drift of what stands before it; TRL takes the sequence's ratio there. verl caps k3 at 10, where its gradient
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
  """Estimate of KL(π‖π_ref) at each token, for a penalty in the reward: only its value counts.

  k1 = −log u,  k2 = ½(log u)²,  k3 = u − 1 − log u,  u = π_ref/π

  Args:
    logprobs: log-probabilities under the policy that drew the tokens, in nats, any shape; put zeros where a token does not count.
    ref_logprobs: log-probabilities under the frozen reference, in nats.
    estimator: "k1", "k2" or "k3".

  Returns:
    The estimates, in nats, in float32 at least. NaN stays NaN.

  Raises:
    ValueError: for an estimator that differs from these in its gradient only, and for an unknown one.

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
  """Next coefficient of a KL penalty: up where the measured divergence is above its target, down where it is below.

  coef·(1 + clip(kl/target − 1, −0.2, 0.2)·num_sequences/horizon)

  Args:
    coef: the present coefficient.
    kl: the divergence measured under it, in nats, in the units of `target`: per token or per sequence.
    target: the divergence to hold, in nats.
    horizon: how many sequences the controller takes for a full correction.
    num_sequences: sequences that `kl` was measured on.

  Returns:
    The next coefficient, above 0 where the present one is. A kl that is not finite says nothing and leaves the coefficient as it is.

  Raises:
    ValueError: for settings that are illegal, or a horizon so short that one step could turn the coefficient's sign.

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
  problems = [f"{name}: found {found!r}, expected {expected}" for name, found, holds, expected in rules if not holds]
  if problems:
    raise ValueError("; ".join(problems))
  if not math.isfinite(kl):
    return float(coef)
  error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
  return float(coef * (1 + error * num_sequences / horizon))


def entropy_bonus(coef: float) -> PenaltyFn:
  """Rewards a policy that stays undecided.

  −coef·H(π), H in nats

  Returns:
    The penalty. Its metric: `actor/entropy_loss` (coefficient and sign included).

  Raises:
    ValueError: at the call, where nobody computed the entropy.

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017, eq. 9.
  """

  def penalty(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    del batch
    loss = -coef * required(outputs.entropy, "entropy", f"entropy_coef is {coef}")
    return loss, {"actor/entropy_loss": loss}

  return penalty


def value_loss(coef: float, clip: float | None = None) -> PenaltyFn:
  """Squared error of the critic, pessimistic outside a band around its old prediction.

  coef·max((V − R̂)², (V_old + clip(V − V_old, −c, c) − R̂)²)

  Args:
    coef: weight of the squared error; 0.5 gives the usual half square.
    clip: half-width c of the band, in units of the return; None for the plain square.

  Returns:
    The penalty. Its metrics: `critic/vf_loss` (coefficient included), `critic/vf_clipfrac`, `critic/vpred_mean`, and of the old
    values and the returns `critic/values/mean`, `/min`, `/max` and `critic/returns/mean`, ...

  Raises:
    ValueError: at the call, for values without returns and the other way round.

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017, eq. 9; the clip is that of the authors' implementation.
  """

  def penalty(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    values = required(outputs.values, "values", "the loss is the critic's")
    returns = required(batch.returns, "returns", "values are given")
    error = jnp.square(values - returns)
    clipped = jnp.zeros_like(error)
    # Without old values the present ones are the old ones, as at the first update of a rollout batch: no clip can bind.
    old_values = jax.lax.stop_gradient(values) if batch.old_values is None else batch.old_values
    if clip is not None:
      # Selected as in gates.hard_clip: inside the band the two squares tie, and a maximum would split the gradient.
      step = values - old_values
      bounded = jnp.where(jnp.abs(step) > clip, old_values + jnp.sign(step) * clip, values)
      bounded_error = jnp.square(bounded - returns)
      clipped = (bounded_error > error).astype(error.dtype)
      error = jnp.where(bounded_error > error, bounded_error, error)
      # Comparisons would swallow a NaN among the old values.
      error = jnp.where(jnp.isnan(step), step, error)
    return coef * error, {
      "critic/vf_loss": coef * error,
      "critic/vf_clipfrac": clipped,
      "critic/vpred_mean": values,
      **{f"critic/values/{statistic}": old_values for statistic in ("mean", "min", "max")},
      **{f"critic/returns/{statistic}": returns for statistic in ("mean", "min", "max")},
    }

  return penalty
