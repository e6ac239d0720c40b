"""Products of tokens and the weights of the experts that they visit, on one device.

`dispatch` is the general one. `bounded` and `masked` compute the same for the few tokens of a
decoding step.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import permutations
from jaxrl_llm.models.grouped import ragged_matmul
from jaxrl_llm.models.linear import swiglu
from jaxrl_llm.models.precision import precision_of
from jaxrl_llm.models.quantized import Quantized

_SLACK = 1.5
"""Room of `bounded`, in copies of an even load."""


class Weights(NamedTuple):
  """Weights of the experts, possibly in 8 bits; an adapter is None if a weight has none."""

  gate: Float[Array, "E D F"] | Quantized
  up: Float[Array, "E D F"] | Quantized
  down: Float[Array, "E F D"] | Quantized
  gate_lora: tuple[Float[Array, "E D r"], Float[Array, "E r F"]] | None = None
  up_lora: tuple[Float[Array, "E D r"], Float[Array, "E r F"]] | None = None
  down_lora: tuple[Float[Array, "E F r"], Float[Array, "E r D"]] | None = None


def dispatch(
  x: Float[Array, "N D"],
  gates: Float[Array, "N K"],
  experts: Int[Array, "N K"],
  weights: Weights,
  *,
  first=0,
  scale: float = 1.0,
  product: Callable[[Array, Array, Array], Array] = ragged_matmul,
) -> Float[Array, "N D"]:
  """Computes Σ_k g_k · expert_k(x) over the local experts; the others contribute 0.

  Copies of tokens are sorted by expert, so that the tokens of each weight matrix are contiguous.
  There is no capacity limit, and no token is dropped.

  Args:
    x: Hidden states of the tokens.
    gates: Gates of the visited experts.
    experts: Indices of the visited experts.
    weights: Weights of the local experts.
    first: Index of the first local expert.
    scale: Scale of the adapters, alpha / rank.
    product: Function that multiplies groups of rows; see `grouped_matmul_for`.
  """
  num_tokens, top_k = experts.shape
  num_local = weights.gate.shape[0]
  order, sizes = _by_local_expert(experts, first, num_local)
  place = permutations.inverse(order)
  y = _grouped(_copied(x, order, place), weights, sizes, scale=scale, product=product)
  y = permutations.permuted(y, place, order).reshape(num_tokens, top_k, -1)
  # What a product leaves in the rows after its last group is arbitrary. Here, XLA fuses the mask
  # into the sum; before the permutation it would be one more pass over all copies.
  y = jnp.where(((experts >= first) & (experts < first + num_local))[..., None], y, 0)
  return _sum("nkd,nk->nd", y, gates.astype(y.dtype)).astype(x.dtype)


def _sum(subscripts: str, x: Array, y: Array) -> Float[Array, "N D"]:
  """Sums the outputs of experts, weighted by their gates, in float32."""
  return jnp.einsum(subscripts, x, y, precision=precision_of(x, y), preferred_element_type=jnp.float32)


def _by_local_expert(experts: Int[Array, "N K"], first, num_local: int) -> tuple[Int[Array, " NK"], Int[Array, " E"]]:
  """Returns the copies of tokens in the order of the local experts, and the size of each group.

  Copies for the experts of other devices come last.
  """
  local = experts.reshape(-1) - first
  local = jnp.where((local >= 0) & (local < num_local), local, num_local)
  return jnp.argsort(local, stable=True), jnp.bincount(local, length=num_local + 1)[:num_local].astype(jnp.int32)


def _experts(
  rows: Float[Array, "*batch D"],
  weights: Weights,
  *,
  scale: float,
  product: Callable[[Array, Array], Array],
  of_rows: Callable[[Array], Array],
) -> Float[Array, "*batch D"]:
  """Applies the experts to their rows.

  `product` multiplies rows by the matrices of all experts, and `of_rows` takes a vector per expert
  to one for each row.
  """

  def linear(rows, weight, lora):
    if isinstance(weight, Quantized):
      y = product(rows, weight.values.astype(rows.dtype))
      y = (y.astype(jnp.float32) * of_rows(weight.scale)).astype(rows.dtype)
    else:
      y = product(rows, weight.astype(rows.dtype))
    if lora is None:
      return y
    a, b = (w.astype(rows.dtype) for w in lora)
    return y + scale * product(product(rows, a), b)

  hidden = swiglu(linear(rows, weights.gate, weights.gate_lora), linear(rows, weights.up, weights.up_lora))
  return linear(hidden, weights.down, weights.down_lora)


def _grouped(
  rows: Float[Array, "M D"], weights: Weights, sizes: Int[Array, " E"], *, scale: float, product: Callable
) -> Float[Array, "M D"]:
  """Applies each expert to its group of rows; rows after the last group become arbitrary."""
  of_rows = lambda x: jnp.repeat(x, sizes, axis=0, total_repeat_length=len(rows))
  return _experts(rows, weights, scale=scale, product=lambda rows, weight: product(rows, weight, sizes), of_rows=of_rows)


@jax.custom_vjp
def _copied(x: Array, order: Array, place: Array) -> Array:
  """Returns K = len(order) / len(x) copies of each token, in the given order.

  Its gradient sums gathered copies; JAX's own would be a scatter.
  """
  return x[order // (len(order) // len(x))]


def _copied_bwd(saved: tuple[Array, Array], ct: Array) -> tuple[Array, None, None]:
  tokens, place = saved
  copies = ct[place].reshape(len(tokens), -1, ct.shape[-1])
  return jnp.sum(copies, axis=1, dtype=jnp.float32).astype(ct.dtype), None, None


_copied.defvjp(lambda x, order, place: (_copied(x, order, place), (x[:, 0], place)), _copied_bwd)


def bounded(
  x: Float[Array, "N D"],
  gates: Float[Array, "N K"],
  experts: Int[Array, "N K"],
  weights: Weights,
  *,
  num_experts: int,
  first=0,
  scale: float = 1.0,
  product: Callable[[Array, Array, Array], Array] = ragged_matmul,
) -> Float[Array, "N D"]:
  """Computes the same as `dispatch` with room for the usual number of local copies.

  `dispatch` copies every token K times, wherever its experts are. Here, only the first copies in
  the order of the local experts are made, half as many again as an even load has. If there are
  more, `dispatch` takes their place. Nothing is dropped.

  Besides the arguments of `dispatch`, it takes the number of experts on all devices.
  """
  num_tokens, top_k = experts.shape
  num_local, num_copies = weights.gate.shape[0], experts.size
  room = min(_round_up(_SLACK * num_copies * num_local / num_experts, 128), num_copies)
  order, sizes = _by_local_expert(experts, first, num_local)

  def few(x, gates):
    copies = order[:room]
    y = _grouped(x[copies // top_k], weights, sizes, scale=scale, product=product)
    y = jnp.where((jnp.arange(room) < jnp.sum(sizes))[:, None], y, 0)
    # A product with so few copies is cheaper than a scatter to their tokens.
    shares = jnp.where(copies // top_k == jnp.arange(num_tokens)[:, None], gates.reshape(-1)[copies], 0)
    return _sum("nr,rd->nd", shares.astype(y.dtype), y).astype(x.dtype)

  @jax.named_scope("overflow")  # Tells readers of the compiled program that it is the rare branch.
  def full(x, gates):
    return dispatch(x, gates, experts, weights, first=first, scale=scale, product=product)

  return full(x, gates) if room == num_copies else jax.lax.cond(jnp.sum(sizes) <= room, few, full, x, gates)


def _round_up(size: float, multiple: int) -> int:
  return -(-math.ceil(size) // multiple) * multiple


def masked(
  x: Float[Array, "N D"], gates: Float[Array, "N K"], experts: Int[Array, "N K"], weights: Weights, *, first=0, scale: float = 1.0
) -> Float[Array, "N D"]:
  """Computes the same as `dispatch` by multiplying every token by every local expert.

  It neither sorts nor copies. For the few tokens of a decoding step and a few local experts, whose
  weights must be read anyway, the additional products cost less than the sort and its scatters.
  """
  is_local = experts[:, :, None] == first + jnp.arange(weights.gate.shape[0])
  local_gates = jnp.sum(jnp.where(is_local, gates[:, :, None], 0), axis=1)
  rows = jnp.broadcast_to(x, (weights.gate.shape[0], *x.shape))
  product = lambda rows, weight: jnp.einsum("end,edf->enf", rows, weight, precision=precision_of(rows, weight))
  y = _experts(rows, weights, scale=scale, product=product, of_rows=lambda x: x[:, None])
  return _sum("end,ne->nd", y, local_gates.astype(y.dtype)).astype(x.dtype)
