"""softmax(q·k / √C) v: one function for every platform, and the table of its implementations."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

# Finite, so that a fully masked row (padding) gives a uniform softmax and not a NaN that would poison the gradient.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def xla_attention(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T H C"]:
  """Grouped-query attention as plain array operations; the softmax in float32.

  Args:
    q: queries; head h reads key-value head h·K // H.
    k: keys.
    v: values.
    mask: True where a query may attend to a key.
  """
  batch, length, num_heads, width = q.shape
  # Query heads are grouped by the key-value head they read, so keys and values are never repeated in memory.
  q = q.reshape(batch, length, k.shape[2], -1, width)
  scores = jnp.einsum("btkgc,bskc->bkgts", q, k, preferred_element_type=jnp.float32) * width**-0.5
  scores = jnp.where(mask[:, None, None], scores, MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bkgts,bskc->btkgc", weights, v).reshape(batch, length, num_heads, width)


class Rows(NamedTuple):
  """Packed rows, as attention sees them. Whichever of the two a backend does not read is never computed.

  Attributes:
    segments: sequence of each token, from 1; 0 is padding.
    mask: True where a token is an earlier one, or the same, of the same sequence.
  """

  segments: Int[Array, "B T"]
  mask: Bool[Array, "B T T"]


def packed(segments: Int[Array, "B T"]) -> Rows:
  """Causal attention within each sequence of a row."""
  causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
  return Rows(segments, causal & (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, :, None])


def cached_attention(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T H C"]:
  """Attention of new tokens to a cache."""
  return xla_attention(q, k, v, mask)


def row_attention(
  q: Float[Array, "B T H C"], k: Float[Array, "B T K C"], v: Float[Array, "B T K C"], rows: Rows, *, backend: str, mesh: Mesh | None
) -> Float[Array, "B T H C"]:
  """Self-attention over packed rows.

  Args:
    q: queries.
    k: keys.
    v: values.
    rows: which tokens see which.
    backend: key of `BACKENDS`, or "auto".
    mesh: rows lie over data, fsdp and expert, heads over tensor; None is one device.
  """
  name = suited(jax.default_backend(), q.dtype) if backend == "auto" else backend
  return BACKENDS[name](q, k, v, rows, mesh)


def suited(platform: str, dtype) -> str:
  """What "auto" stands for."""
  del platform, dtype
  return "xla"


BACKENDS = {
  "xla": lambda q, k, v, rows, mesh: xla_attention(q, k, v, rows.mask),
}
