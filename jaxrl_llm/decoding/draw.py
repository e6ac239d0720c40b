"""Token drawing with two random numbers per row, regardless of the size of the vocabulary."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxrl_llm.decoding.filters import REMOVED

# A power of two, so that blocks of a vocabulary sharded over devices align with its shards.
_NUM_BLOCKS = 128
_MAX_BLOCK = 256

# log(2⁻¹²⁶), rounded up: exp of anything less may or may not be flushed to 0, depending on how the
# compiler fuses it. This comparison decides instead whether an entry has mass, so that a block is
# never chosen for the mass of entries that the second read finds to be 0.
_NO_MASS = -87.3


def draw(
  logits: Float[Array, "N V"], keys: Key[Array, " N"], *, whole_rows: Callable[[Array], Array] = lambda x: x
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
  """Draws tokens from softmax(logits) and returns them with their log-probabilities in nats.

  Two-level inverse transform sampling: u₁ chooses a block of the vocabulary by the blocks' masses,
  and u₂ the token within it. The Gumbel trick (`jax.random.categorical`) would need V random
  numbers per row. The logits are read twice: for their maximum, and for the masses.

  Args:
    logits: Logits, filtered or not. Those at or near `REMOVED` and -inf are never drawn.
    keys: One key per row. A row's token depends only on its own logits and key.
    whole_rows: Function that gathers sharded rows of numbers [N n]; see `Model.whole_rows`. One
      device needs none.

  Example:
    >>> tokens, logprobs = draw(jnp.log(jnp.array([[0.0, 1.0, 0.0]])), jax.random.split(jax.random.key(0), 1))
    >>> tokens.tolist(), logprobs.tolist()
    ([1], [0.0])

  Note:
    Tokens less likely than exp(-87.3) times the likeliest are never drawn and count as 0.
  """
  return inverse_cdf(logits, jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys), whole_rows=whole_rows)


def sequence_keys(seeds: UInt32[Array, "N 2"]) -> Key[Array, " N"]:
  """Returns the key of each sequence, whose token t, from 0, is drawn with `fold_in(key, t)`.

  What a sequence draws therefore depends on its seed and its own tokens alone: not on the program,
  the mesh or the process that draws it, on its neighbours, or on the time.

  Args:
    seeds: Low and high 32 bits of each seed, `np.array(seeds, "<u8").view("<u4")`.
  """
  return jax.vmap(lambda seed: jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed[0]), seed[1]))(seeds)


def inverse_cdf(
  logits: Float[Array, "N V"], uniforms: Float[Array, "N 2"], *, whole_rows: Callable[[Array], Array] = lambda x: x
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
  """Returns the tokens at given points of softmax(logits), with their log-probabilities in nats.

  Every returned token has a probability above 0.

  Args:
    logits: Logits, as in `draw`.
    uniforms: Numbers in [0, 1]: a point among the blocks of the vocabulary, and one within the
      block.
    whole_rows: Gather of sharded rows, as in `draw`.

  Example:
    >>> logits = jnp.log(jnp.array([[0.0, 0.25, 0.75]]))  # So small a vocabulary is a single block.
    >>> [inverse_cdf(logits, jnp.array([[0.0, u]]))[0].tolist() for u in (0.0, 0.24, 0.26, 1.0)]
    [[1], [1], [2], [2]]
  """
  blocks = _in_blocks(logits.astype(jnp.float32))
  highest = jnp.max(blocks, axis=(1, 2))
  # Without the barrier, XLA on GPUs sums the blocks' masses for the total from the logits again.
  block_masses = jax.lax.optimization_barrier(jnp.sum(_masses(blocks - highest[:, None, None]), axis=-1))
  # Of a sharded vocabulary, each shifted addition of the cumulative sum would be a collective.
  block_masses = whole_rows(block_masses)
  block = _first_above(block_masses, uniforms[:, 0])
  # Recompute the masses of one block: keeping all of them would write and read the vocabulary once
  # more.
  shifted = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0] - highest[:, None]
  entry = _first_above(_masses(shifted), uniforms[:, 1])
  logprobs = jnp.take_along_axis(shifted, entry[:, None], axis=1)[:, 0] - jnp.log(jnp.sum(block_masses, axis=-1))
  return block * blocks.shape[-1] + entry, logprobs


def _in_blocks(logits: Float[Array, "N V"]) -> Float[Array, "N blocks entries"]:
  num_blocks = math.gcd(logits.shape[-1], _NUM_BLOCKS)
  if num_blocks < _NUM_BLOCKS and logits.shape[-1] > num_blocks * _MAX_BLOCK:
    num_blocks = _NUM_BLOCKS
    logits = jnp.pad(logits, ((0, 0), (0, -logits.shape[-1] % num_blocks)), constant_values=REMOVED)
  return logits.reshape(len(logits), num_blocks, logits.shape[-1] // num_blocks)


def _masses(shifted: Float[Array, "..."]) -> Float[Array, "..."]:
  return jnp.where(shifted > _NO_MASS, jnp.exp(shifted), 0)


def _first_above(masses: Float[Array, "N n"], uniforms: Float[Array, " N"]) -> Int[Array, " N"]:
  """Returns the first entry with mass at which the cumulative mass exceeds u times the total.

  If rounding leaves none, it returns the last entry with mass.
  """
  ids, size = jnp.arange(masses.shape[-1]), masses.shape[-1]
  cumulative = _cumulative(masses)
  above = cumulative > uniforms[:, None] * cumulative[:, -1:]
  first = jnp.min(jnp.where((masses > 0) & above, ids, size), axis=-1)
  last = jnp.max(jnp.where(masses > 0, ids, 0), axis=-1)
  return jnp.minimum(first, last)


def _cumulative(x: Float[Array, "N n"]) -> Float[Array, "N n"]:
  """Computes cumulative sums in log2(n) shifted additions.

  They are elementwise, so a row's rounding depends neither on other rows nor on their number.
  """
  shift = 1
  while shift < x.shape[-1]:
    x += jnp.pad(x, ((0, 0), (shift, 0)))[:, :-shift]
    shift *= 2
  return x
