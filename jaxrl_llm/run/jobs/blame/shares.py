"""The loss and the gradient of an update, taken apart over groups or responses.

The loss Σ w·l is linear in the weights w of the tokens, and every token belongs to one part i:

  L = Σ_i L_i,  g = Σ_i g_i,  share_i = ⟨g_i, g⟩ / |g|²,  Σ_i share_i = 1

The weights are those that the tokens have among all of the batch, so nothing is renormalised.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxrl_llm.learner.train_step import Losses
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.types import Params, TrainBatch

Part = Sequence[tuple[int, int]]
"""Row and segment of each response of a part."""

_SUMMED = 256
"""Products that are added up in float32; their sums are added in float64 on the host."""


class Shares(NamedTuple):
  """Loss and gradient of each of n parts of an update.

  Attributes:
    losses: Loss L_i of each part; they add up to the loss.
    products: Product ⟨g_i, g⟩ with the whole gradient; they add up to |g|².
    squares: Squared norm |g_i|² of each part's gradient.
    total: Squared norm |g|² of the whole gradient.
    tokens: Loss of each token, with its weight.
  """

  losses: Float[np.ndarray, " n"]
  products: Float[np.ndarray, " n"]
  squares: Float[np.ndarray, " n"]
  total: float
  tokens: Float[np.ndarray, "B T"]

  @property
  def shares(self) -> Float[np.ndarray, " n"]:
    """Share ⟨g_i, g⟩ / |g|² of each part in the gradient; NaN without a gradient."""
    return self.products / self.total if self.total > 0 else np.full(len(self.products), math.nan)

  @property
  def agreement(self) -> Float[np.ndarray, " n"]:
    """Cosine of each part's gradient with the sum of the others'.

    ⟨g_i, g − g_i⟩ / (|g_i|·|g − g_i|). It is NaN where one of the two is 0.

    Example:
      >>> zeros = np.zeros(2)  # Gradients (3, 0) and (-1, 0): g = (2, 0).
      >>> Shares(zeros, np.array([6.0, -2.0]), np.array([9.0, 1.0]), 4.0, np.zeros((1, 1))).agreement.tolist()
      [-1.0, -1.0]
    """
    others = np.maximum(self.total - 2 * self.products + self.squares, 0)
    norms = np.sqrt(self.squares * others)
    return np.divide(self.products - self.squares, norms, out=np.full(len(norms), math.nan), where=norms > 0)


def decompose(
  losses: Losses,
  params: Params,
  batch: TrainBatch,
  parts: Sequence[Part],
  *,
  trainable: PyTree | None = None,
  at_once: int = 1,
  place: Callable[[Any], Any] = lambda tree: tree,
) -> Shares:
  """Computes the loss and the gradient of each part of a batch.

  Two gradients exist at a time: that of a part, of which only the rows that hold it are computed,
  and the whole one. Each part's is computed twice, first for the whole.

  Args:
    losses: The learner's loss, from `make_losses`.
    params: Weights before the update.
    batch: Whole batch on the host.
    parts: Parts, which hold each response once.
    trainable: Params tree with True for each weight that is trained; None takes all.
    at_once: Rows that are computed at a time, those of a micro-batch.
    place: Function that places arrays of some rows on the devices.
  """
  prepared, _, weights = jax.device_get(jax.jit(losses.weigh)(place(batch)))
  trained, frozen = partition(params, trainable)
  gradients, of_tokens = jax.jit(losses.gradients), jax.jit(losses.of_tokens)

  def of_part(part: Part) -> tuple[float, Params]:
    """Returns the loss of a part, and its gradient."""
    rows = sorted({row for row, _ in part})
    padded = np.array(rows + [rows[0]] * (-len(rows) % at_once))
    chosen = np.zeros((len(padded), batch.mask.shape[1]), bool)
    for row, segment in part:
      chosen[rows.index(row)] |= batch.segments[row] == segment
    loss, total = 0.0, None
    for begin in range(0, len(padded), at_once):
      now = slice(begin, begin + at_once)
      own = [np.where(chosen[now], x[padded[now]], 0) for x in weights]
      arguments = place((jax.tree.map(lambda x: x[padded[now]], prepared), own))  # noqa: B023 (called at once)
      (part_loss, _), gradient = gradients(trained, frozen, *arguments)
      loss, total = loss + float(part_loss), gradient if total is None else _add(total, gradient)
    return loss, total

  whole = None
  for part in parts:
    _, gradient = of_part(part)
    whole = gradient if whole is None else _add(whole, gradient)
  of_parts = [(loss, _dot(gradient, whole), _dot(gradient, gradient)) for loss, gradient in map(of_part, parts)]
  each = []
  for begin in range(0, len(batch.mask), at_once):
    now = np.arange(begin, min(begin + at_once, len(batch.mask)))
    rows = jax.tree.map(lambda x: x[now], (prepared, list(weights)))  # noqa: B023 (called at once)
    each.append(np.asarray(of_tokens(combine(trained, frozen), *place(rows))))
  return Shares(*np.array(of_parts, np.float64).T, total=_dot(whole, whole), tokens=np.concatenate(each))


@partial(jax.jit, donate_argnums=0)
def _add(one: Params, other: Params) -> Params:
  return jax.tree.map(jnp.add, one, other)


@jax.jit
def _largest(gradient: Params) -> Float[Array, ""]:
  return jnp.max(jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in jax.tree.leaves(gradient)]))


@jax.jit
def _products(one: Params, other: Params, own_scale: Float[Array, ""], other_scale: Float[Array, ""]) -> list[Float[Array, " sums"]]:
  def of_leaf(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, " sums"]:
    products = (x.astype(jnp.float32) / own_scale * (y.astype(jnp.float32) / other_scale)).reshape(-1)
    return jnp.sum(jnp.pad(products, (0, -products.size % _SUMMED)).reshape(-1, _SUMMED), axis=1)

  return list(map(of_leaf, jax.tree.leaves(one), jax.tree.leaves(other)))


def _dot(one: Params, other: Params) -> float:
  """Returns the product of two gradients, also where their squares leave the range of float32."""
  # Powers of 2, which change no bit.
  scales = [2.0 ** math.frexp(float(_largest(x)))[1] for x in (one, other)]
  sums = _products(one, other, *map(jnp.float32, scales))
  return math.prod(scales) * float(sum(np.sum(np.asarray(x), dtype=np.float64) for x in sums))
