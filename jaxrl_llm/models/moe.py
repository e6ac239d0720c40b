"""A mixture of experts without dropped tokens: the router, the dispatch to experts on this or other devices, and an oracle for tests."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards
from jaxrl_llm.models import permutations, routing
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.linear import adapter, param, swiglu


class Routed(NamedTuple):
  """The experts that each token visited, the router's own choice (which differs if recorded routes are replayed), float32 logits."""

  experts: Int[Array, "B T K"]
  live: Int[Array, "B T K"]
  logits: Float[Array, "B T E"]


def route(
  logits: Float[Array, "*batch E"], replay: Int[Array, "*batch K"] | None, *, top_k: int, norm_top_k: bool
) -> tuple[Float[Array, "*batch K"], Int[Array, "*batch K"], Int[Array, "*batch K"]]:
  """Gates and experts: g = softmax over the visited experts' logits, or their part of the softmax over all.

  Only the choice of experts is replayed; the gates are computed from the live logits, so the router still learns.

  Args:
    logits: Float32 logits of the router.
    replay: Experts to visit instead of the top k, -1 for the live router's; None is live everywhere.
    top_k: See `Experts`.
    norm_top_k: See `Experts`.

  Returns:
    Gates, the experts that they belong to, and the experts of the live router.

  Example:
    >>> gates, experts, live = route(jnp.array([0.0, 2.0, 1.0]), jnp.array([0, 2]), top_k=2, norm_top_k=True)
    >>> experts.tolist(), live.tolist(), gates.round(3).tolist()
    ([0, 2], [1, 2], [0.269, 0.731])

  References:
    Stabilizing MoE reinforcement learning by aligning training and inference routers (R3), arXiv:2510.11370, 2025.
  """
  _, live = jax.lax.top_k(logits, top_k)
  experts = routing.replayed(replay, live)
  chosen = jnp.take_along_axis(logits, experts, axis=-1)
  gates = jax.nn.softmax(chosen, axis=-1) if norm_top_k else jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
  return gates, experts, live


class Weights(NamedTuple):
  """Weights of the experts; adapters are None where there are none."""

  gate: Float[Array, "E D F"]
  up: Float[Array, "E D F"]
  down: Float[Array, "E F D"]
  gate_lora: tuple[Float[Array, "E D r"], Float[Array, "E r F"]] | None = None
  up_lora: tuple[Float[Array, "E D r"], Float[Array, "E r F"]] | None = None
  down_lora: tuple[Float[Array, "E F r"], Float[Array, "E r D"]] | None = None


def dispatch(
  x: Float[Array, "N D"], gates: Float[Array, "N K"], experts: Int[Array, "N K"], weights: Weights, *, first=0, scale: float = 1.0
) -> Float[Array, "N D"]:
  """Σ_k g_k · expert_k(x) over the experts at hand; the others count 0.

  Token copies are sorted by expert, so that each weight matrix meets its tokens in one run: no capacity, no dropped token.

  Args:
    x: Tokens.
    gates: Gates of the visited experts.
    experts: Numbers of the visited experts.
    weights: Weights of the experts at hand.
    first: Number of the first expert at hand.
    scale: alpha / rank of the adapters.
  """
  num_tokens, top_k = experts.shape
  num_local = weights.gate.shape[0]
  local = experts.reshape(-1) - first
  local = jnp.where((local >= 0) & (local < num_local), local, num_local)  # Copies for other devices go to the end.
  order = jnp.argsort(local, stable=True)
  sizes = jnp.bincount(local, length=num_local + 1)[:num_local].astype(jnp.int32)
  place = permutations.inverse(order)
  rows = _copied(x, order, place)

  def linear(rows, weight, lora):
    y = jax.lax.ragged_dot(rows, weight.astype(rows.dtype), sizes)
    if lora is None:
      return y
    a, b = (w.astype(rows.dtype) for w in lora)
    return y + scale * jax.lax.ragged_dot(jax.lax.ragged_dot(rows, a, sizes), b, sizes)

  hidden = swiglu(linear(rows, weights.gate, weights.gate_lora), linear(rows, weights.up, weights.up_lora))
  y = linear(hidden, weights.down, weights.down_lora)
  # What a ragged product leaves behind its last group differs between platforms.
  y = jnp.where((jnp.arange(len(order)) < jnp.sum(sizes))[:, None], y, 0)
  y = permutations.permuted(y, place, order).reshape(num_tokens, top_k, -1)
  return jnp.einsum("nkd,nk->nd", y, gates.astype(y.dtype), preferred_element_type=jnp.float32).astype(x.dtype)


@jax.custom_vjp
def _copied(x: Array, order: Array, place: Array) -> Array:
  """K = len(order) / len(x) copies of each token, in order. The gradient is a sum over gathered copies, where JAX would scatter them."""
  return x[order // (len(order) // len(x))]


def _copied_bwd(saved: tuple[Array, Array], ct: Array) -> tuple[Array, None, None]:
  tokens, place = saved
  copies = ct[place].reshape(len(tokens), -1, ct.shape[-1])
  return jnp.sum(copies, axis=1, dtype=jnp.float32).astype(ct.dtype), None, None


_copied.defvjp(lambda x, order, place: (_copied(x, order, place), (x[:, 0], place)), _copied_bwd)


def over_mesh(
  x: Float[Array, "B T D"], gates: Float[Array, "B T K"], experts: Int[Array, "B T K"], weights: Weights, *, mesh: Mesh | None, scale: float
) -> Float[Array, "B T D"]:
  """`dispatch` where the experts lie on several devices.

  The tokens of the devices that share a set of experts are gathered, each device adds what its own experts say of them, and the sums are
  scattered back to where the tokens came from. Nothing is dropped and nothing is padded, whatever the load. Rows lie over the mesh axes
  data, fsdp and expert, their slots over context; experts over expert, their hidden layers over tensor.
  """

  def flat(x, gates, experts, weights, first=0):
    y = dispatch(*(a.reshape(-1, a.shape[-1]) for a in (x, gates, experts)), weights, first=first, scale=scale)
    return y.reshape(x.shape)

  if mesh is None or mesh.size == 1:
    return flat(x, gates, experts, weights)
  # A batch that does not divide, such as a single prompt by hand, lies whole on every device; so do slots that do not.
  is_split = x.shape[0] % num_row_shards(mesh) == 0
  rows = PartitionSpec(BATCH_AXES if is_split else None, "context" if x.shape[1] % mesh.shape["context"] == 0 else None)
  wide, tall, thin = PartitionSpec("expert", None, "tensor"), PartitionSpec("expert", "tensor", None), PartitionSpec("expert", None, None)
  loras = ((thin, wide), (thin, wide), (tall, thin))
  specs = Weights(wide, wide, tall, *(lora and spec for lora, spec in zip(weights[3:], loras, strict=True)))

  @partial(jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=rows, check_vma=False)
  def sharded(x, gates, experts, weights):
    first = jax.lax.axis_index("expert") * weights.gate.shape[0]
    if is_split:
      x, gates, experts = (jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, gates, experts))
    y = jax.lax.psum(flat(x, gates, experts, weights, first), "tensor")
    return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True) if is_split else jax.lax.psum(y, "expert")

  return sharded(x, gates, experts, weights)


class MoE(nnx.Module):
  """y = Σ_k g_k · SwiGLU_k(x) over the K experts that the router picks for each token.

  References:
    Qwen3 technical report, arXiv:2505.09388, 2025.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None):
    d, e, f = config.d_model, config.experts.num_experts, config.experts.d_ff
    # float32 whatever the other weights are: a route that flips with rounding is a jump of the policy.
    self.router = param(rngs, (d, e), ("embed", "router"), fan_in=d)
    self.gate = param(rngs, (e, d, f), ("expert", "embed", "mlp"), fan_in=d, dtype=config.param_dtype)
    self.up = param(rngs, (e, d, f), ("expert", "embed", "mlp"), fan_in=d, dtype=config.param_dtype)
    self.down = param(rngs, (e, f, d), ("expert", "mlp", "embed"), fan_in=f * 2 * config.num_layers, dtype=config.param_dtype)
    for name in ("gate", "up", "down"):
      adapter(self, name, f"mlp/{name}", config, rngs=rngs, lead=1)
    self.config = config
    self.mesh = mesh

  @jax.named_scope("moe")
  def __call__(self, x: Float[Array, "B T D"], replay: Int[Array, "B T K"] | None) -> tuple[Float[Array, "B T D"], Routed]:
    """The mixture, and what the router did."""
    experts = self.config.experts
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), self.router[...])
    gates, visited, live = route(logits, replay, top_k=experts.top_k, norm_top_k=experts.norm_top_k)

    def lora(name):
      return (getattr(self, f"{name}_lora_a")[...], getattr(self, f"{name}_lora_b")[...]) if hasattr(self, f"{name}_lora_a") else None

    weights = Weights(self.gate[...], self.up[...], self.down[...], lora("gate"), lora("up"), lora("down"))
    scale = self.config.lora.alpha / self.config.lora.rank if self.config.lora else 1.0
    return over_mesh(x, gates, visited, weights, mesh=self.mesh, scale=scale), Routed(visited, live, logits)


def balance_loss(
  logits: Float[Array, "B T E"], experts: Int[Array, "B T K"], segments: Int[Array, "B T"], prefixes: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
  """E/K · Σ_e f_e p_te at each token, f_e the fraction of its sequence's tokens that visited expert e, without gradient; 1 where even.

  Logits and experts are those of `Routed`; a token's sequence is its segment and the prefix before it, see `Rows`.

  References:
    DeepSeek-V2, arXiv:2405.04434, 2024 (balance within a sequence); Switch transformers, arXiv:2101.03961, 2021.

  Note:
    Switch's fractions are over a batch. Over a sequence the loss is a weighted sum of tokens, which no split of the batch can change.
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
  """(log Σ_e exp z_te)² at each token: keeps router logits small.

  References:
    ST-MoE, arXiv:2202.08906, 2022.
  """
  return jax.nn.logsumexp(logits, axis=-1) ** 2
