"""The critic: a decoder's trunk with a value head in place of the output head."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from jaxrl_llm.kernels.precision import precision_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import merged
from jaxrl_llm.models.model import pure
from jaxrl_llm.models.striping import in_row_order
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.types import Params


class ValueModel(nnx.Module):
  """A trunk with a scalar head on each of its final hidden states."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None, has_bias: bool = True):
    # A tied trunk has no output head of its own, so none of its weights stays unused.
    self.trunk = Transformer(config._replace(tie_embeddings=True, lora=None), rngs=rngs, mesh=mesh)
    # Zeros: before its first update the critic predicts 0, whatever its trunk.
    self.value_head = nnx.Param(jnp.zeros((config.d_model,), jnp.float32), axes=("embed",))
    self.has_bias = has_bias
    if has_bias:
      self.value_bias = nnx.Param(jnp.zeros((), jnp.float32), axes=())

  def __call__(
    self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segments: Int[Array, "B T"], prefixes: Int[Array, "B T"] | None = None
  ) -> Float[Array, "B T"]:
    x = self.trunk.hidden_in_stripes(tokens, positions, segments, prefixes=prefixes).hidden.astype(jnp.float32)
    head = self.value_head[...]
    values = in_row_order(jnp.matmul(x, head, precision=precision_of(x, head)), self.trunk.mesh)
    return values + self.value_bias[...] if self.has_bias else values


class Critic(NamedTuple):
  """A value model as pure functions of its params.

  Attributes:
    init: Function `(key) -> params` that makes all params from scratch, the trunk included.
    from_policy: Function `(policy's params) -> params` that copies the policy's trunk and adds a
      value head of zeros.
    values: Function `(params, tokens, positions, segments, prefixes=None) -> float32 [B T]`. The
      value at t is that of the state after token t.
    logical_axes: Logical axes of the params, in the form of `Model.logical_axes`.
    num_params: Number of weights.
  """

  init: Callable[[Array], Params]
  from_policy: Callable[[Params], Params]
  values: Callable[..., Float[Array, "B T"]]
  logical_axes: PyTree
  num_params: int


def make_critic(config: ModelConfig, *, mesh: Mesh | None = None) -> Critic:
  """Makes a critic for a policy with the given config.

  Nothing is allocated until `init` or `from_policy` runs. The critic shares no parameters with the
  policy, and all of its own are trained. Adapters of the policy are merged into the copied trunk.

  Example:
    >>> from jaxrl_llm.models import make_model, preset
    >>> config = preset("nano", vocab_size=264)
    >>> critic, policy = make_critic(config), make_model(config)
    >>> params = critic.from_policy(policy.init(jax.random.key(0)))
    >>> tokens = jnp.zeros((1, 4), jnp.int32)
    >>> critic.values(params, tokens, jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32)).tolist()
    [[0.0, 0.0, 0.0, 0.0]]
  """
  bind, init, logical_axes, num_params = pure(lambda rngs: ValueModel(config, rngs=rngs, mesh=mesh))

  def from_policy(policy: Params) -> Params:
    fresh, policy = init(jax.random.key(0)), merged(config, policy)
    return fresh | {"trunk": {name: jax.tree.map(jnp.copy, policy[name]) for name in fresh["trunk"]}}

  def values(params: Params, *rows: Int[Array, "B T"] | None, **options) -> Float[Array, "B T"]:
    return bind(params)(*rows, **options)

  return Critic(init, from_policy, values, logical_axes, num_params)
