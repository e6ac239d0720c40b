"""A mixture of experts that drops no tokens: router, experts over devices, and router losses."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards, platform_of
from jaxrl_llm.kernels.grouped import grouped_matmul_for
from jaxrl_llm.kernels.precision import precision_of
from jaxrl_llm.models import residual, routing
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.copies import sums_by_product, sums_for
from jaxrl_llm.models.experts import Weights, dispatch, masked
from jaxrl_llm.models.linear import LEAST_ROWS, adapter, in_one_order, param
from jaxrl_llm.models.quantized import Quantized
from jaxrl_llm.models.taps import tap

_MASKED_TOKENS, _MASKED_EXPERTS = 512, 8
"""Largest numbers of tokens and local experts that `masked` multiplies; else a sort is cheaper."""


class Routed(NamedTuple):
  """The experts that each token visited, the router's own choice, and its float32 logits.

  The choice differs from the visited experts if recorded routes are replayed.
  """

  experts: Int[Array, "B T K"]
  live: Int[Array, "B T K"]
  logits: Float[Array, "B T E"]


def route(
  logits: Float[Array, "*batch E"], replay: Int[Array, "*batch K"] | None, *, top_k: int, norm_top_k: bool
) -> tuple[Float[Array, "*batch K"], Int[Array, "*batch K"], Int[Array, "*batch K"]]:
  """Computes the experts that each token visits, and their gates.

  The gates are the softmax over the logits of the visited experts, or their part of the softmax
  over all experts. Only the choice of experts is replayed. The gates are computed from the live
  logits, so the router still learns.

  Args:
    logits: Float32 logits of the router.
    replay: Experts to visit instead of the top k, -1 for those of the live router. None uses the
      live router everywhere.
    top_k: Number of experts that a token visits; see `Experts`.
    norm_top_k: Whether the gates of the visited experts sum to 1; see `Experts`.

  Returns:
    Gates, the experts that they belong to, and the experts of the live router.

  Example:
    >>> gates, experts, live = route(jnp.array([0.0, 2.0, 1.0]), jnp.array([0, 2]), top_k=2, norm_top_k=True)
    >>> experts.tolist(), live.tolist(), gates.round(3).tolist()
    ([0, 2], [1, 2], [0.269, 0.731])

  References:
    Stabilizing MoE reinforcement learning by aligning training and inference routers (R3),
    arXiv:2510.11370, 2025.
  """
  _, live = jax.lax.top_k(logits, top_k)
  experts = routing.replayed(replay, live)
  chosen = jnp.take_along_axis(logits, experts, axis=-1)
  gates = jax.nn.softmax(chosen, axis=-1) if norm_top_k else jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
  return gates, experts, live


def over_mesh(
  x: Float[Array, "B T D"],
  gates: Float[Array, "B T K"],
  experts: Int[Array, "B T K"],
  weights: Weights,
  *,
  mesh: Mesh | None,
  scale: float,
  axes: tuple[str, ...] = ("expert",),
  exact: bool = False,
) -> Float[Array, "B T D"]:
  """Runs `dispatch` with experts sharded over devices.

  The tokens of the devices that share a set of experts are gathered. Each device adds the outputs
  of its own experts, and the sums are scattered back to the devices of the tokens. Nothing is
  dropped or padded, whatever the load. Rows are sharded over the mesh axes data, fsdp and expert,
  and their slots over context; the width of the result may be sharded over tensor, see `residual`.

  Args:
    x: Hidden states of the tokens.
    gates: Gates of the visited experts.
    experts: Indices of the visited experts.
    weights: Weights of all experts.
    mesh: Device mesh; None is one device.
    scale: Scale of the adapters, alpha / rank.
    axes: Mesh axes that the experts are sharded over: one for rows of many tokens, several for
      decoding. The experts' hidden layers are sharded over tensor.
    exact: Whether the sums have one order; see `ModelConfig.exact`.
  """
  platform = platform_of(mesh)
  product = grouped_matmul_for(platform, tile=LEAST_ROWS if exact else None)
  sums = sums_for(platform) if len(axes) == 1 else sums_by_product
  num_experts = weights.gate.shape[0]

  def flat(x, gates, experts, weights, first=0):
    tokens = [a.reshape(-1, a.shape[-1]) for a in (x, gates, experts)]
    if not exact and len(axes) > 1 and len(tokens[0]) <= _MASKED_TOKENS and weights.gate.shape[0] <= _MASKED_EXPERTS:
      y = masked(*tokens, weights, first=first, scale=scale)
    else:
      y = dispatch(*tokens, weights, num_experts=num_experts, first=first, scale=scale, product=product, sums=sums)
    return y.reshape(x.shape)

  if mesh is None or mesh.size == 1:
    return flat(x, gates, experts, weights)
  # Rows and slots that do not divide evenly, such as a single prompt, are replicated.
  is_split = x.shape[0] % num_row_shards(mesh) == 0
  rows = PartitionSpec(BATCH_AXES if is_split else None, "context" if x.shape[1] % mesh.shape["context"] == 0 else None)
  wide, tall, thin = PartitionSpec(axes, None, "tensor"), PartitionSpec(axes, "tensor", None), PartitionSpec(axes, None, None)
  loras = ((thin, wide), (thin, wide), (tall, thin))
  # Rows lie in the order of the mesh, whatever the order of the experts.
  in_order = tuple(axis for axis in BATCH_AXES if axis in axes)
  # The scales of a weight in 8 bits lack its input axis, the second one.
  of_weight = lambda weight, spec: Quantized(spec, PartitionSpec(spec[0], spec[2])) if isinstance(weight, Quantized) else spec
  of_experts = map(of_weight, weights[:3], (wide, wide, tall))
  specs = Weights(*of_experts, *(lora and spec for lora, spec in zip(weights[3:], loras, strict=True)))

  scatters = is_split and residual.is_sharded(x.shape, mesh)
  out_specs = PartitionSpec(*rows, "tensor") if scatters else rows

  @partial(jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=out_specs, check_vma=False)
  def sharded(x, gates, experts, weights):
    first = jax.lax.axis_index(axes) * weights.gate.shape[0]
    if is_split:
      gather = partial(jax.lax.all_gather, axis_name=in_order, axis=0, tiled=True)
      if len(axes) > 1:
        # A decoding step waits for collectives, not for bytes, and has no gradients. The gather is
        # one of integers: a TPU may add to zeros, which flushes ids that are read as floats to 0.
        bits = jax.lax.bitcast_convert_type(gates, experts.dtype)
        bits, experts = jnp.split(gather(jnp.concatenate([bits, experts], axis=-1)), 2, axis=-1)
        gates = jax.lax.bitcast_convert_type(bits, gates.dtype)
      else:
        gates, experts = gather(gates), gather(experts)
      x = gather(x)
    y = flat(x, gates, experts, weights, first)
    y = jax.lax.psum_scatter(y, "tensor", scatter_dimension=2, tiled=True) if scatters else jax.lax.psum(y, "tensor")
    return jax.lax.psum_scatter(y, in_order, scatter_dimension=0, tiled=True) if is_split else jax.lax.psum(y, in_order)

  return sharded(x, gates, experts, weights)


class MoE(nnx.Module):
  """A mixture y = Σ_k g_k · SwiGLU_k(x) of the K experts that the router picks for each token.

  References:
    Qwen3 technical report, arXiv:2505.09388, 2025.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None, expert_axes: tuple[str, ...] = ("expert",)):
    d, e, f = config.d_model, config.experts.num_experts, config.experts.d_ff
    # Always float32: a route that flips by rounding changes the policy abruptly.
    self.router = param(rngs, (d, e), ("embed", "router"), fan_in=d)
    self.gate = param(rngs, (e, d, f), ("expert", "embed", "mlp"), fan_in=d, dtype=config.param_dtype)
    self.up = param(rngs, (e, d, f), ("expert", "embed", "mlp"), fan_in=d, dtype=config.param_dtype)
    self.down = param(rngs, (e, f, d), ("expert", "mlp", "embed"), fan_in=f * 2 * config.num_layers, dtype=config.param_dtype)
    for name in ("gate", "up", "down"):
      adapter(self, name, f"mlp/{name}", config, rngs=rngs, lead=1)
    self.config = config
    self.mesh = mesh
    self.expert_axes = expert_axes

  @jax.named_scope("moe")
  def __call__(self, x: Float[Array, "B T D"], replay: Int[Array, "B T K"] | None) -> tuple[Float[Array, "B T D"], Routed]:
    """Applies the mixture; also returns what the router did."""
    experts = self.config.experts
    router, tokens = self.router[...], tap("router in", x).astype(jnp.float32)
    product = lambda x, router: jnp.einsum("...d,de->...e", x, router, precision=precision_of(x, router))
    logits = in_one_order(product, tokens, router, self.mesh) if self.config.exact else product(tokens, router)
    gates, visited, live = route(tap("router", logits), replay, top_k=experts.top_k, norm_top_k=experts.norm_top_k)

    def lora(name):
      return (getattr(self, f"{name}_lora_a")[...], getattr(self, f"{name}_lora_b")[...]) if hasattr(self, f"{name}_lora_a") else None

    weights = Weights(*(x.get_value() for x in (self.gate, self.up, self.down)), lora("gate"), lora("up"), lora("down"))
    scale = self.config.lora.alpha / self.config.lora.rank if self.config.lora else 1.0
    y = over_mesh(x, gates, visited, weights, mesh=self.mesh, scale=scale, axes=self.expert_axes, exact=self.config.exact)
    return tap("experts", y), Routed(visited, live, logits)


def balance_loss(
  logits: Float[Array, "B T E"], experts: Int[Array, "B T K"], segments: Int[Array, "B T"], prefixes: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
  """Computes E/K · Σ_e f_e p_te at each token t; it is 1 for an even load.

  f_e is the fraction of the tokens of t's sequence that visited expert e; it has no gradient. p_te
  is the router's probability. Logits and experts are those of `Routed`. The sequence of a token is
  its segment and the prefix before it; see `Rows`.

  References:
    DeepSeek-V2, arXiv:2405.04434, 2024 (balance within a sequence); Switch transformers,
    arXiv:2101.03961, 2021.

  Note:
    Switch computes fractions over a batch. Over a sequence, the loss is a weighted sum of tokens,
    which no split of the batch can change.
  """
  num_experts, top_k = logits.shape[-1], experts.shape[-1]
  visits = jnp.sum(jax.nn.one_hot(experts, num_experts), axis=-2)

  def fractions(visits, segments, prefixes):
    def total(x):
      sums = jax.ops.segment_sum(x, segments, num_segments=len(segments) + 1)
      return sums[segments] if prefixes is None else sums[segments] + sums.at[0].set(0)[prefixes]

    return total(visits) / total(jnp.ones(len(segments)))[:, None]

  load = jax.lax.stop_gradient(jax.vmap(fractions)(visits, segments, prefixes))
  return num_experts / top_k * jnp.sum(load * jax.nn.softmax(logits, axis=-1), axis=-1)


def z_loss(logits: Float[Array, "B T E"]) -> Float[Array, "B T"]:
  """Computes (log Σ_e exp z_te)² at each token t, which keeps router logits small.

  References:
    ST-MoE, arXiv:2202.08906, 2022.
  """
  return jax.nn.logsumexp(logits, axis=-1) ** 2
