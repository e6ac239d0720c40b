"""Terms that add to the policy loss. Factories of `(outputs, batch) -> (per-token loss, metrics)`.

They see arrays that are 0 off the mask (see `base.on_mask`). Metrics named `..._loss` include the coefficient, so that they add up to
`actor/loss`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.base import required
from jaxrl_llm.objectives.ratios import bounded_log_ratio
from jaxrl_llm.types import PenaltyFn, PolicyOutputs, TokenMetrics, TrainBatch

KL_ESTIMATORS = {
  "k1": lambda log_u: -log_u,
  "k2": lambda log_u: jnp.square(log_u) / 2,
  # expm1 keeps the digits near u = 1, where the difference of two numbers close to 1 would lose them all in float32.
  "k3": lambda log_u: jnp.expm1(log_u) - log_u,
}
"""One-sample estimators of KL(π‖π_ref) as functions of log u, u = π_ref/π."""


def kl_penalty(coef: float, estimator: str = "k3") -> PenaltyFn:
  """Keeps the policy near the frozen reference.

  coef·k(u),  u = π_ref/π:  k1 = −log u,  k2 = ½(log u)²,  k3 = u − 1 − log u

  Args:
    coef: loss per nat of estimated divergence.
    estimator: "k1", "k2" or "k3".

  Returns:
    The penalty. Its metrics: `actor/kl_loss` (coefficient included) and `actor/ref_kl` (the estimate itself, in nats).

  Raises:
    ValueError: at the call, where the batch has no `ref_logprobs`.

  Example:
    >>> zeros = jnp.zeros((1, 1), int)
    >>> batch = TrainBatch(zeros, zeros, zeros, jnp.ones((1, 1)), *2 * [jnp.zeros((1, 1))], ref_logprobs=jnp.array([[-1.]]))
    >>> loss, _ = kl_penalty(0.5, "k2")(PolicyOutputs(jnp.array([[-3.]])), batch)
    >>> loss.tolist()
    [[1.0]]

  References:
    DeepSeekMath (GRPO), arXiv:2402.03300, 2024, eq. 4.

  Note:
    As a loss, k1 has zero expected gradient on-policy; k2 follows ∇KL(π‖π_ref) and k3, the paper's, ∇KL(π_ref‖π). The log-ratio is
    bounded at ±20, where the gradient ends.
  """

  def penalty(outputs: PolicyOutputs, batch: TrainBatch) -> tuple[Float[Array, "B T"], TokenMetrics]:
    ref_logprobs = required(batch.ref_logprobs, "ref_logprobs", f"kl_coef is {coef}")
    kl = KL_ESTIMATORS[estimator](bounded_log_ratio(ref_logprobs, outputs.logprobs))
    return coef * kl, {"actor/kl_loss": coef * kl, "actor/ref_kl": kl}

  return penalty


def entropy_bonus(coef: float) -> PenaltyFn:
  """Rewards a policy that stays undecided.

  −coef·H(π)

  Args:
    coef: loss per nat of entropy.

  Returns:
    The penalty. Its metric: `actor/entropy_loss` (coefficient and sign included).

  Raises:
    ValueError: at the call, where nobody computed the entropy.

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017, eq. 9.
  """

  def penalty(outputs: PolicyOutputs, batch: TrainBatch) -> tuple[Float[Array, "B T"], TokenMetrics]:
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
    The penalty. Its metrics: `critic/vf_loss` (coefficient included), `critic/vf_clipfrac` and `critic/vpred_mean`.

  Raises:
    ValueError: at the call, for values without returns and the other way round.

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017, eq. 9; the clip is that of the authors' implementation.
  """

  def penalty(outputs: PolicyOutputs, batch: TrainBatch) -> tuple[Float[Array, "B T"], TokenMetrics]:
    values = required(outputs.values, "values", "the loss is the critic's")
    returns = required(batch.returns, "returns", "values are given")
    error = jnp.square(values - returns)
    clipped = jnp.zeros_like(error)
    if clip is not None:
      # Without old values the present ones are the old ones, as at the first update of a rollout batch: no clip can bind.
      old_values = jax.lax.stop_gradient(values) if batch.old_values is None else batch.old_values
      # Selected as in gates.hard_clip: inside the band the two squares tie, and a maximum would split the gradient.
      step = values - old_values
      bounded = jnp.where(jnp.abs(step) > clip, old_values + jnp.sign(step) * clip, values)
      bounded_error = jnp.square(bounded - returns)
      clipped = (bounded_error > error).astype(error.dtype)
      error = jnp.where(bounded_error > error, bounded_error, error)
    return coef * error, {"critic/vf_loss": coef * error, "critic/vf_clipfrac": clipped, "critic/vpred_mean": values}

  return penalty


def regularisers(kl_coef: float, kl_estimator: str, entropy_coef: float) -> tuple[list[PenaltyFn], frozenset[str]]:
  """The penalties that have a coefficient, and the optional arrays they need; a coefficient of 0 costs nothing.

  Example:
    >>> penalties, needs = regularisers(kl_coef=0.04, kl_estimator="k3", entropy_coef=0.0)
    >>> len(penalties), sorted(needs)
    (1, ['ref_logprobs'])
  """
  penalties, needs = [], set()
  if kl_coef:
    penalties.append(kl_penalty(kl_coef, kl_estimator))
    needs.add("ref_logprobs")
  if entropy_coef:
    penalties.append(entropy_bonus(entropy_coef))
    needs.add("entropy")
  return penalties, frozenset(needs)
