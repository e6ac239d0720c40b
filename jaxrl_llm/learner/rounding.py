"""Updates of weights in bfloat16, rounded at random so that small ones are not lost."""

import zlib

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree, UInt32


def in_bfloat16(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
  """Lets an optimizer update weights in bfloat16 by less than half of their spacing.

  p' = ⌊p + u + ξ⌋, ξ uniform on [0, spacing), so E[p'] = p + u

  bfloat16 has 8 significant bits: rounded to nearest, an update of less than 2⁻⁹ of a weight leaves
  it as it was. Rounded at random, the weight moves by the whole spacing with the probability that
  makes up for it. The optimizer computes in float32, and its second moment, which has the type of
  the weights, is rounded in the same way. Weights of other types are updated as by `optimizer`.

  Args:
    optimizer: Transformation such as AdamW, with a `count` in its state.

  Returns:
    The transformation, whose state is that of `optimizer`. The random bits depend only on the
    weight's name and on the number of earlier updates, neither on devices nor on a restart.

  References:
    Deep learning with limited numerical precision, arXiv:1502.02551, 2015; Revisiting BFloat16
    training, arXiv:2010.06192, 2020.

  Note:
    A weight then carries noise of about its spacing, 2⁻⁸ of it, which does not grow with the number
    of updates, because the mean of the rounding errors is 0.
  """

  def update(grads: PyTree, state: PyTree, params: PyTree | None = None):
    short = jax.tree.map(lambda p: p.dtype == jnp.bfloat16, params)
    if not any(jax.tree.leaves(short)):
      return optimizer.update(grads, state, params)
    count = optax.tree_utils.tree_get(state, "count", filtering=lambda path, _: "ScaleByAdamState" in str(path[-1]))
    wide = lambda tree: jax.tree.map(lambda x, is_short: x.astype(jnp.float32) if is_short else x, tree, short)
    held = optax.tree_utils.tree_get(state, "nu")
    updates, after = optimizer.update(wide(grads), optax.tree_utils.tree_set(state, nu=wide(held)), wide(params))
    bits = jax.tree_util.tree_map_with_path(lambda path, p, is_short: _bits(path, count, p.shape) if is_short else None, params, short)
    moved = lambda p, u, x: u if x is None else rounded(p.astype(jnp.float32) + u, x & 0xFFFF) - p.astype(jnp.float32)
    moments = lambda v, x: v if x is None else rounded(v, x >> 16).astype(jnp.bfloat16)
    updates = jax.tree.map(moved, params, updates, bits)
    return updates, optax.tree_utils.tree_set(after, nu=jax.tree.map(moments, optax.tree_utils.tree_get(after, "nu"), bits))

  return optax.GradientTransformation(optimizer.init, update)


def _bits(path: tuple, count: Array, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
  """Returns 32 random bits for each entry of a weight."""
  name = zlib.crc32(jax.tree_util.keystr(path).encode()) >> 1  # A seed of 31 bits.
  return jax.random.bits(jax.random.fold_in(jax.random.key(name), count), shape, jnp.uint32)


def rounded(x: Float[Array, "..."], bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
  """Rounds float32 at random to one of the two nearest values of bfloat16, with the right mean.

  Args:
    x: Numbers to round.
    bits: Random integers below 2¹⁶.

  Example:
    >>> spacing, bits = 2.0**-7, jnp.arange(2**16, dtype=jnp.uint32)
    >>> [float(jnp.mean(rounded(jnp.full(2**16, 1 + share * spacing), bits) > 1)) for share in (0.0, 0.25, 0.5)]
    [0.0, 0.25, 0.5]
  """
  # bfloat16 is the upper half of float32: adding below it carries into it as often as it should.
  plain = jax.lax.bitcast_convert_type(x, jnp.uint32)
  carried = jax.lax.bitcast_convert_type((plain + bits) & jnp.uint32(0xFFFF0000), jnp.float32)
  return jnp.where(jnp.isfinite(x), carried, x)
