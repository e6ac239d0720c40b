"""Products of tokens and the weights of the experts that they visit, on one device.

`dispatch` is the general one; `masked` computes the same for the few tokens of a decoding step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import permutations
from jaxrl_llm.kernels.grouped import ragged_matmul
from jaxrl_llm.kernels.precision import precision_of
from jaxrl_llm.models.copies import Copies, Sums, copied, summed, sums_by_place
from jaxrl_llm.models.linear import swiglu
from jaxrl_llm.models.quantized import Quantized

_SLACK = 1.5
"""Room of `dispatch`, in copies of an even load of the devices, whatever the load of an expert."""


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
  num_experts: int | None = None,
  first=0,
  scale: float = 1.0,
  product: Callable[[Array, Array, Array], Array] = ragged_matmul,
  sums: Sums = sums_by_place,
) -> Float[Array, "N D"]:
  """Computes Σ_k g_k · expert_k(x) over the local experts; the others contribute 0.

  Copies of tokens are sorted by expert, so that the tokens of each weight matrix are contiguous.
  There is no capacity limit, and no token is dropped. Where experts are sharded over devices, only
  the first copies in the order of the local experts are made, half as many again as an even load
  has. If there are more, all K copies of every token are made.

  Args:
    x: Hidden states of the tokens.
    gates: Gates of the visited experts.
    experts: Indices of the visited experts.
    weights: Weights of the local experts.
    num_experts: Number of experts on all devices, of whose even load there is room for the copies;
      None makes room for all of them.
    first: Index of the first local expert.
    scale: Scale of the adapters, alpha / rank.
    product: Function that multiplies groups of rows; see `grouped_matmul_for`.
    sums: Function that sums the copies of each token, if only some are made; see `sums_for`.
  """
  num_local, num_copies = weights.gate.shape[0], experts.size
  room = min(_round_up(_SLACK * num_copies * num_local / (num_experts or num_local), 128), num_copies)
  order, sizes = _by_local_expert(experts, first, num_local)
  places = permutations.inverse(order)
  full = partial(_mixture, scale=scale, product=product)
  if room == num_copies:
    return full(x, gates, weights, order, places, sizes)
  few = lambda x, gates, weights, order, *copies: _mixture(
    x, gates, weights, order[:room], *copies, scale=scale, product=product, sums=sums
  )
  # The name tells readers of the compiled program that it is the rare branch.
  return _either(few, jax.named_scope("overflow")(full), jnp.sum(sizes) <= room, (x, gates, weights), (order, places, sizes))


def _mixture(
  x: Float[Array, "N D"],
  gates: Float[Array, "N K"],
  weights: Weights,
  order: Int[Array, " M"],
  places: Int[Array, " NK"],
  sizes: Int[Array, " E"],
  *,
  scale: float,
  product: Callable,
  sums: Sums = sums_by_place,
) -> Float[Array, "N D"]:
  """Applies the experts to the first M copies in the order of the local experts, and sums them.

  `order` lists the copies, of which those of token n have the numbers n·K to n·K + K - 1, and
  `places` says where each is in it. `sizes` counts those of each local expert, M or less in all.
  The other arguments are those of `dispatch`.
  """
  num_tokens, top_k = gates.shape
  of_gates = Copies(order, places, jnp.sum(sizes))
  of_tokens = of_gates._replace(tokens=order // top_k)
  rows = copied(x, of_tokens, sums)
  shares = copied(gates.reshape(-1), of_gates, sums_by_place)
  of_rows = lambda x: jnp.repeat(x, sizes, axis=0, total_repeat_length=len(rows))
  grouped = lambda rows, matrices: product(rows, matrices, sizes)
  y = _experts(rows, shares[:, None], weights, scale=scale, product=grouped, of_rows=of_rows)
  return summed(y, of_tokens, num_tokens, sums)


def _by_local_expert(experts: Int[Array, "N K"], first, num_local: int) -> tuple[Int[Array, " NK"], Int[Array, " E"]]:
  """Returns the copies of tokens in the order of the local experts, and the size of each group.

  Copies for the experts of other devices come last.
  """
  local = experts.reshape(-1) - first
  local = jnp.where((local >= 0) & (local < num_local), local, num_local)
  return jnp.argsort(local, stable=True), jnp.bincount(local, length=num_local + 1)[:num_local].astype(jnp.int32)


def _experts(
  rows: Float[Array, "*batch D"],
  shares: Float[Array, "*batch 1"],
  weights: Weights,
  *,
  scale: float,
  product: Callable[[Array, Array], Array],
  of_rows: Callable[[Array], Array],
) -> Float[Array, "*batch D"]:
  """Applies the experts to their rows, and multiplies each result by its share.

  The hidden layer is multiplied instead of the result, which is linear in it. Then the gradient of
  a share needs no result, so that a backward pass need not compute it again. `product` multiplies
  rows by the matrices of all experts, and `of_rows` takes a vector per expert to one for each row.
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
  return linear((hidden * shares).astype(rows.dtype), weights.down, weights.down_lora)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _either(few: Callable, full: Callable, is_few: Array, arguments: tuple, copies: tuple) -> Array:
  """Returns the result of one of two functions, differentiable in `arguments`.

  The backward pass runs the function again. JAX's own gradient of a conditional would keep what
  either of its branches needs, among it arrays of all copies.
  """
  return jax.lax.cond(is_few, few, full, *arguments, *copies)


def _either_bwd(few: Callable, full: Callable, saved: tuple, ct: Array) -> tuple:
  is_few, arguments, copies = saved

  def gradient(function):
    return lambda ct, arguments, copies: jax.vjp(lambda *x: function(*x, *copies), *arguments)[1](ct)

  of_full = jax.named_scope("overflow")(gradient(full))
  return None, jax.lax.cond(is_few, gradient(few), of_full, ct, arguments, copies), None


_either.defvjp(lambda few, full, *rest: (_either(few, full, *rest), rest), _either_bwd)


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
  y = _experts(rows, local_gates.T[..., None], weights, scale=scale, product=product, of_rows=lambda x: x[:, None])
  return jnp.sum(y, axis=0, dtype=jnp.float32).astype(x.dtype)
