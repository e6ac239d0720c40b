"""How fast is each kernel? Times of attention, experts' products and decoding, and of plain JAX."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import roofline
from experiments.first_hour.results import Row
from jaxrl_llm.kernels.grouped import grouped_matmul_for, ragged_matmul
from jaxrl_llm.models import cache as cache_lib
from jaxrl_llm.models import ragged
from jaxrl_llm.models.attention import BACKENDS, packed, row_attention

ATTENTION = {"small": ((1, 256, 64),), "full": ((8, 2048, 128), (4, 4096, 128), (1, 16384, 128), (4, 4096, 64))}
"""Rows, tokens of a row, and width of a head; 16 heads that read 8."""

GROUPED = {"small": ((256, 4, 64, 32),), "full": ((32768, 32, 1024, 1536), (65536, 128, 2048, 768))}
"""Rows of the product, number of matrices, and their height and width."""

DECODING = {"small": ((4, 256),), "full": ((64, 2048), (512, 2048), (64, 16384))}
"""Rows, and columns of the cache; 16 heads of 128 that read 8."""

_PAIRS = 2**30
"""Most pairs of query and key in a row for which plain attention is timed: it stores them."""

_REPEATS = 10


def kernel_speeds(*, size: str) -> list[Row]:
  """Times each kernel that runs here.

  Args:
    size: "small" or "full".
  """
  machine = roofline.datasheet(jax.devices()[0].device_kind)
  rows = [row for shape in ATTENTION[size] for row in _attention(*shape, machine)]
  rows += [row for shape in GROUPED[size] for row in _grouped(*shape, machine)]
  return rows + [row for shape in DECODING[size] for row in _decoding(*shape, machine)]


def _row(what: str, run: Callable[[], object], share: Callable[[float], float | None]) -> Row:
  """Times a call, which a missing kernel or memory may refuse."""
  try:
    seconds = roofline.fastest(lambda: jax.block_until_ready(run()), _REPEATS)
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    return Row(what, f"does not run here: {str(error).splitlines()[0][:120]}")
  of = share(seconds)
  return Row(what, f"{1e3 * seconds:.3f} ms" + (f", {of:.0%} of the peak" if of is not None else ""))


def _attention(num_rows: int, length: int, width: int, machine: roofline.Machine | None) -> list[Row]:
  draw = lambda key, heads: jax.random.normal(key, (num_rows, length, heads, width), jnp.bfloat16)
  q, k, v, ct = map(draw, jax.random.split(jax.random.key(0), 4), (16, 8, 8, 16))
  rows = packed(jnp.ones((num_rows, length), jnp.int32), jnp.zeros((num_rows, length), jnp.int32))
  products = num_rows * length * (length + 1) / 2 * 16 * width * 2  # FLOPs of the scores.

  @partial(jax.jit, static_argnums=0)
  def forward(backend, q, k, v):
    return row_attention(q, k, v, rows, backend=backend, mesh=None)

  @partial(jax.jit, static_argnums=0)
  def both(backend, q, k, v, ct):
    out, back = jax.vjp(partial(forward, backend), q, k, v)
    return out, back(ct)

  made = []
  for backend in BACKENDS:
    if backend == "xla" and length * length * num_rows * 16 > _PAIRS:
      continue
    what = f"attention {backend}, bfloat16, {num_rows} x {length} tokens, heads of {width}"
    # Two products forward, five backward.
    share = lambda seconds, count: count * products / seconds / machine.flops_per_s if machine else None
    made.append(_row(f"{what}: forward", partial(forward, backend, q, k, v), partial(share, count=2)))
    made.append(_row(f"{what}: forward and backward", partial(both, backend, q, k, v, ct), partial(share, count=7)))
  return made


def _grouped(num_rows: int, groups: int, height: int, width: int, machine: roofline.Machine | None) -> list[Row]:
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (num_rows, height), jnp.bfloat16)
  weights = jax.random.normal(keys[1], (groups, height, width), jnp.bfloat16)
  ct = jax.random.normal(keys[2], (num_rows, width), jnp.bfloat16)
  # Groups of unequal size, as a router makes them.
  sizes = np.random.default_rng(0).multinomial(num_rows, np.random.default_rng(1).dirichlet(np.full(groups, 4.0)))
  sizes = jnp.asarray(sizes, jnp.int32)
  products = {"kernel": grouped_matmul_for(jax.default_backend(), dense_bytes=0)}
  if num_rows * groups * max(height, width) <= _PAIRS:
    products["ragged_dot"] = ragged_matmul

  @partial(jax.jit, static_argnums=0)
  def both(name, x, weights, ct):
    out, back = jax.vjp(lambda x, weights: products[name](x, weights, sizes), x, weights)
    return out, back(ct)

  flops = 2 * num_rows * height * width
  share = lambda seconds, count: count * flops / seconds / machine.flops_per_s if machine else None
  made = []
  for name, product in products.items():
    what = f"grouped products {name}, bfloat16, {num_rows} rows, {groups} matrices of {height} x {width}"
    forward = partial(jax.jit(lambda x, weights, product=product: product(x, weights, sizes)), x, weights)
    made.append(_row(f"{what}: forward", forward, partial(share, count=1)))
    made.append(_row(f"{what}: forward and backward", partial(both, name, x, weights, ct), partial(share, count=3)))
  return made


def _decoding(num_rows: int, columns: int, machine: roofline.Machine | None) -> list[Row]:
  platform, keys = jax.default_backend(), jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (num_rows, 8, 2, 128), jnp.bfloat16)
  k, v = (jax.random.normal(key, (num_rows, columns, 8, 128), jnp.bfloat16) for key in keys[1:])
  ages = jnp.arange(columns, dtype=jnp.int32)[::-1]
  lengths = jnp.asarray(np.random.default_rng(0).integers(1, columns + 1, num_rows), jnp.int32)
  num_bytes = 2 * int(jnp.sum(lengths)) * 8 * 128 * 2  # Keys and values that rows see.
  held = cache_lib.key_values(k, v, "bfloat16", cache_lib.layout_of(None))

  @jax.jit
  def kernel(q, held):
    # Once for all layers in a model; counted whole here.
    read = ragged.visits(ages, lengths, rows=ragged.rows_per_group(num_rows, platform), columns=ragged.block_columns(columns, platform))
    return ragged.attend_block(q, held, cache_lib.View(jnp.int32(0), (ages,), lengths, (read,), None), 0, mesh=None)

  plain = jax.jit(lambda q, held: cache_lib.attend(q, held, ages < lengths[:, None]))
  share = lambda seconds: num_bytes / seconds / machine.bytes_per_s if machine else None
  what = f"decoding, bfloat16, {num_rows} rows, {columns} columns, half of them with tokens"
  return [_row(f"{what}: {name}", partial(run, q, held), share) for name, run in (("kernel", kernel), ("plain", plain))]
