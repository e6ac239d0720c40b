"""Divergence of a student from a teacher over the whole vocabulary, with its gradient.

The student is the policy. `divergence` is for logits that are all in memory. `comparer` gives the
output head the same numbers for one chunk of tokens at a time, so that no `[B, T, V]` ever exists.
"""

import math
import numbers
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.types import Comparer, Comparison


class Sums(NamedTuple):
  """Sums over the vocabulary that the gradient reads again.

  Attributes:
    student: Log-sum-exp of the student's logits, divided by the temperature.
    teacher: Log-sum-exp of the teacher's logits, divided by the temperature.
    slope: Mean under the student of the log-ratio in the gradient; see `comparer`.
  """

  student: Float[Array, " c"]
  teacher: Float[Array, " c"]
  slope: Float[Array, " c"]


def divergence(
  student_logits: ArrayLike, teacher_logits: ArrayLike, mask: ArrayLike, *, beta: float, temperature: float = 1.0
) -> Float[Array, ""]:
  """Computes the mean over counted tokens of the generalised Jensen-Shannon divergence.

  JSD(β) = β·KL(π_T‖m) + (1 − β)·KL(π‖m),  m = β·π_T + (1 − β)·π

  β = 0 is the forward KL(π_T‖π), β = 1 the reverse KL(π‖π_T). These are the limits of JSD(β)/β and
  of JSD(β)/(1 − β).

  Args:
    student_logits: Logits of the student, [B, T, V], or any axes before V.
    teacher_logits: Logits of the teacher, of the same shape. They get no gradient.
    mask: 1 for tokens that count, else 0, [B, T]. Logits elsewhere may be anything, even NaN.
    beta: Interpolation between the two KL divergences, from 0 to 1.
    temperature: Divisor of both models' logits.

  Returns:
    The divergence in nats per token, in float32 at least; 0 if no token counts.

  Raises:
    ValueError: If the shapes differ, or a setting is out of range.

  Example:
    >>> student, teacher = jnp.log(jnp.array([[[0.5, 0.5]]])), jnp.log(jnp.array([[[0.9, 0.1]]]))
    >>> [round(float(divergence(student, teacher, jnp.ones((1, 1)), beta=beta)), 4) for beta in (0, 0.5, 1)]
    [0.3681, 0.1017, 0.5108]

  References:
    On-policy distillation of language models (GKD), arXiv:2306.13649, 2023, eq. 1.

  Note:
    As in TRL's `GKDTrainer`, β = 0 and β = 1 are the KL divergences themselves. There the loss
    jumps: JSD(β) is near 0 for β near 0 or 1. It is not multiplied by the square of the
    temperature.
  """
  check_settings(beta, temperature)
  dtype = jnp.result_type(jnp.float32, student_logits, teacher_logits)
  student, teacher = (jnp.asarray(x, dtype) for x in (student_logits, teacher_logits))
  counted = jnp.asarray(mask) > 0
  if teacher.shape != student.shape:
    raise ValueError(f"teacher_logits: found shape {teacher.shape}, expected {student.shape}, the shape of student_logits")
  if counted.shape != student.shape[:-1]:
    raise ValueError(f"mask: found shape {counted.shape}, expected {student.shape[:-1]}, the shape of student_logits without V")
  # The inputs are cleaned: a NaN would come back through its gradient even if its loss is masked.
  student, teacher = (jnp.where(counted[..., None], x, 0) for x in (student, jax.lax.stop_gradient(teacher)))
  compared, _ = _compare(student, teacher, beta=beta, temperature=temperature)
  return jnp.sum(jnp.where(counted, compared.divergence, 0)) / jnp.maximum(jnp.sum(counted), 1)


def check_settings(beta: float, temperature: float) -> None:
  """Raises a ValueError if a setting is out of range.

  Example:
    >>> check_settings(1.5, 1.0)
    Traceback (most recent call last):
    ...
    ValueError: beta: found 1.5, expected a number from 0 (forward KL) to 1 (reverse KL)
  """
  if not isinstance(beta, numbers.Real) or not 0 <= beta <= 1:
    raise ValueError(f"beta: found {beta!r}, expected a number from 0 (forward KL) to 1 (reverse KL)")
  if not isinstance(temperature, numbers.Real) or not (0 < temperature < math.inf):
    raise ValueError(f"temperature: found {temperature!r}, expected a finite number above 0")


def comparer(*, beta: float, temperature: float = 1.0) -> Comparer:
  """Makes the comparison of student and teacher for a chunk of tokens, with a gradient by hand.

  With a = log π − log π_T for β = 1 and a = log π − log m for 0 < β < 1,

  ∂D/∂z_v = π_v·(a_v − Σ_u π_u·a_u)·(1 or 1 − β)/temperature,  for β = 0: (π_v − π_T,v)/temperature

  Args:
    beta: Interpolation between forward and reverse KL; see `divergence`.
    temperature: Divisor of both models' logits.

  Raises:
    ValueError: If a setting is out of range.
  """
  check_settings(beta, temperature)
  options = dict(beta=beta, temperature=temperature)
  return Comparer(partial(_compare, **options), partial(_gradient, **options))


def _mixture(student: Array, teacher: Array, beta: float) -> Array:
  """Returns log m of the two distributions, given as log-probabilities."""
  return jnp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))


def _compare(
  student: Float[Array, "*c V"], teacher: Float[Array, "*c V"], *, beta: float, temperature: float
) -> tuple[Comparison, Sums]:
  """Computes the comparison of two models' logits, and the sums that `_gradient` reads."""
  agreement = jnp.argmax(student, axis=-1) == jnp.argmax(teacher, axis=-1)
  student, teacher = student / temperature, teacher / temperature
  sums = [jax.nn.logsumexp(x, axis=-1) for x in (student, teacher)]
  log_q, log_p = (x - total[..., None] for x, total in zip((student, teacher), sums, strict=True))
  q, p = jnp.exp(log_q), jnp.exp(log_p)
  mean = lambda probs, x: jnp.sum(probs * x, axis=-1)
  kl, entropy = mean(q, log_q - log_p), -mean(p, log_p)
  if beta == 0:
    value, slope = mean(p, log_p - log_q), jnp.zeros_like(kl)
  elif beta == 1:
    value, slope = kl, kl
  else:
    log_m = _mixture(log_q, log_p, beta)
    slope = mean(q, log_q - log_m)
    value = beta * mean(p, log_p - log_m) + (1 - beta) * slope
  return Comparison(value, kl, entropy, agreement.astype(value.dtype)), Sums(*sums, slope)


def _gradient(
  student: Float[Array, "c V"], teacher: Float[Array, "c V"], sums: Sums, *, beta: float, temperature: float
) -> Float[Array, "c V"]:
  """Computes the gradient of each token's divergence with respect to the student's logits."""
  log_q, log_p = student / temperature - sums.student[:, None], teacher / temperature - sums.teacher[:, None]
  q = jnp.exp(log_q)
  if beta == 0:
    return (q - jnp.exp(log_p)) / temperature
  other, scale = (log_p, 1.0) if beta == 1 else (_mixture(log_q, log_p, beta), 1 - beta)
  return scale / temperature * q * (log_q - other - sums.slope[:, None])
