"""Checksums of weights, by which two sides find out whether they hold the same numbers.

A checksum is the sum of each number's bits times an odd hash of its index, modulo 2³². It does not
depend on the layout of a weight over devices, and costs one pass over it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxrl_llm.types import Params


class Checksum(NamedTuple):
  """The hashed sum of a weight's bits.

  Attributes:
    bits: Hashed sum modulo 2³².
    nonfinite: Number of non-finite numbers.
  """

  bits: UInt32[Array, ""]
  nonfinite: UInt32[Array, ""]


def checksum(x: Float[Array, "..."]) -> Checksum:
  """Computes Σᵢ hash(i)·bits(xᵢ) mod 2³², where i is a number's index in its array.

  hash(i) is odd. A wrong or stale number changes the sum, because an odd factor loses no bit. So do
  swapped pieces, because the factors of two pieces are unrelated. Addition modulo 2³² is exact in
  any order, so the sum is the same for every layout over devices.

  Example:
    >>> x = jnp.arange(4.0)
    >>> [int(checksum(y).bits) == int(checksum(x).bits) for y in (x, x[::-1], x.at[2].set(2.0000002))]
    [True, False, False]
  """
  total = jnp.sum(_bits(x) * _hashes(x), dtype=jnp.uint32)
  return Checksum(total, jnp.sum(~jnp.isfinite(x), dtype=jnp.uint32))


def double_checksum(x: Float[Array, "..."]) -> UInt32[Array, " 2"]:
  """Computes `checksum` with two hashes, for weights whose equality decides what is sent.

  Two different weights have the same sum of 32 bits once in 2³² times.

  Example:
    >>> x = jnp.arange(4.0)
    >>> int(double_checksum(x)[0]) == int(checksum(x).bits)
    True
  """
  bits, hashes, zero = _bits(x), _hashes(x), jnp.uint32(0)
  others = (hashes ^ (hashes >> 13)) | 1
  add = lambda sums, more: (sums[0] + more[0], sums[1] + more[1])
  # One pass for both, which a CPU does several times faster than two of `jnp.sum`.
  return jnp.stack(jax.lax.reduce((bits * hashes, bits * others), (zero, zero), add, tuple(range(x.ndim))))


def _bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
  return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)


def _hashes(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
  place, stride = jnp.zeros(x.shape, jnp.uint32), 1
  for axis in reversed(range(x.ndim)):
    place = place + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= x.shape[axis]
  factor = place * jnp.uint32(0x9E3779B1)
  return (factor ^ (factor >> 15)) * jnp.uint32(0x85EBCA77) | 1


def checksums(params: Params) -> dict[str, Checksum]:
  """Returns the checksum of every weight by name; None in the tree is skipped."""
  return {jax.tree_util.keystr(path, simple=True, separator="/"): checksum(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}
