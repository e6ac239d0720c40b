"""`Model`: a decoder as the pure functions that the rest of the framework uses."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_llm import segments as segments_lib
from jaxrl_llm.devices.mesh import EXPERT_AXES, Serving, platform_of
from jaxrl_llm.devices.xla_flags import check_exact
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoding import make_steps
from jaxrl_llm.models.decoding_weights import DecodingWeights
from jaxrl_llm.models.head import Teacher, chunk_tokens, token_logprobs
from jaxrl_llm.models.striping import in_row_order, striped, stripes_of
from jaxrl_llm.models.taps import tap
from jaxrl_llm.models.transformer import STACKS, Transformer
from jaxrl_llm.types import Comparer, Forward, Images, Params, Patches, TrainBatch


class Model(NamedTuple):
  """A decoder as pure functions of its params (a nested dict of arrays).

  Attributes:
    config: Sizes and options.
    init: Function `(key) -> params` that draws random weights.
    logits: Forward pass `(params, tokens, positions, segments, images=None) -> float32 [B T V]`.
      Logits at t score token t + 1. With images, positions are [B T 3].
    forward: Forward pass `(params, tokens, positions, segments, routing=None, *, prefixes=None,
      router_losses=False, images=None) -> Forward`. Like `logits`, but also replays recorded routes
      and returns what the routers did.
    hidden: Forward pass with the arguments of `forward` that stops at the final hidden states.
    unembed: Output head `(params, hidden) -> float32 logits`. It reads only the head's weights.
    logprobs: Function `(params, batch, sources, *, filter_logits, learns_entropy=False,
      router_losses=False, teacher=None) -> (logprobs, entropy, Forward)`. See `LogprobsFn` of
      `train_step`. With a teacher, `Forward.comparison` compares the two.
    teacher: Function `(params, batch, sources, comparer) -> Teacher`, the frozen model for another
      one's `logprobs` on the same batch. It takes the live routes.
    features: Vision tower `(params, patches) -> features [I S F D]` of I pictures, those of the
      image token and of the deep layers; only for models with one.
    prefill: Forward pass over prompts `(params, tokens [n P], mask [n P], *, dtype, positions=None,
      images=None) -> (cache, routes [n P L K] or None)`. The cache has no room for responses yet.
    grow: Function `(cache, rows, columns, *, dtype, most=None) -> cache` that adds room for
      `columns` more tokens in each row. The cache may be None if prompts have one token, because
      the last token of a prompt is decoded, not prefilled. A cache for `decode` names the `most`
      columns that it may grow to, so that layers with a sliding window have as few as they need.
    resume: Function `(params, tokens [B W], mask [B W], cache) -> cache` for rows that already have
      tokens. It fills the blocks with the rightmost keys and values, one for each column.
    map_prompts: Function `(function, cache) -> cache` that applies a function to the tree of arrays
      [n ...] with the prompts' keys and values.
    decoding_weights: Function `(params) -> weights` that lays out a copy of the params for
      `decode`, once before a loop of steps.
    decode: Decoding step `(weights, tokens [B], positions [B], cache, *, column, ages, lengths,
      prompts_seen, rows, sequences, step) -> (float32 logits [B V], cache, routes [B L K] or None)`
      for one more token per row. The caller says what the token sees of the cache; see `View`.
      Steps are counted from 0, and the columns of `resume` were written in the steps before.
    extend: Function `(weights, tokens [N T], cache, starts [N], counts [N], rows=None, *,
      positions=None, images=None, scores_all=False) -> (float32 logits [N V], cache, routes
      [N T L K] or None)` for a cache in which token c of a row is in column c: a cache of `grow`
      alone. Adds the first `counts` of up to T tokens to each of `rows` from column `starts` on,
      and scores the token after the last one, or after each one of given rows with `scores_all`.
      Rows are 0 to N - 1 if not given; a mesh that splits them counts them in pieces, see
      `cache.Spans`. Positions are the columns if not given; with images they are [N T 3]. Spans of
      one row may follow each other in one call.
    whole_rows: Function `(x [B ...]) -> x` that leaves rows where decoding has those of the logits,
      and keeps each of them whole on all devices that share its vocabulary.
    logical_axes: Params tree with a tuple of logical axis names in place of each array. The axes of
      stacked blocks begin with `layers`.
    num_params: Number of weights.
    mesh: Device mesh; None is one device.
  """

  config: ModelConfig
  init: Callable[[Array], Params]
  logits: Callable[..., Float[Array, "B T V"]]
  forward: Callable[..., Forward]
  hidden: Callable[..., Forward]
  unembed: Callable[[Params, Float[Array, "*batch D"]], Float[Array, "*batch V"]]
  logprobs: Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"], Forward]]
  teacher: Callable[..., Teacher]
  features: Callable[[Params, Patches], Float[Array, "I S F D"]]
  prefill: Callable[..., tuple[Cache, Int[Array, "n P L K"] | None]]
  grow: Callable[..., Cache]
  resume: Callable[..., Cache]
  map_prompts: Callable[..., Cache]
  decoding_weights: Callable[[Params], DecodingWeights]
  decode: Callable[..., tuple[Float[Array, "B V"], Cache, Int[Array, "B L K"] | None]]
  extend: Callable[..., tuple[Float[Array, "N *tokens V"], Cache, Int[Array, "N T L K"] | None]]
  whole_rows: Callable[[Array], Array]
  logical_axes: PyTree
  num_params: int
  mesh: Mesh | None = None


def pure(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Callable[[Params], nnx.Module], Callable[[Array], Params], PyTree, int]:
  """Splits the module that `make` builds into a static graph and params.

  Returns:
    `bind`, from params to module; `init`, from key to params; the params tree with logical axes in
    place of arrays; the number of weights.
  """
  graph, abstract = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

  def bind(params: Params) -> nnx.Module:
    # Copy the structure, so that filling it leaks no tracers into `abstract`.
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)

  def init(key: Array) -> Params:
    return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1])

  def axes(path, variable: nnx.Variable) -> tuple[str, ...]:
    names = variable.get_metadata()["axes"]
    return ("layers", *names) if any(getattr(part, "key", None) in STACKS for part in path) else names

  is_variable = lambda x: isinstance(x, nnx.Variable)
  logical_axes = nnx.to_pure_dict(jax.tree_util.tree_map_with_path(axes, abstract, is_leaf=is_variable))
  return bind, init, logical_axes, sum(x.size for x in jax.tree.leaves(abstract))


def _check_exact(config: ModelConfig, mesh: Mesh | None) -> None:
  platform, context = platform_of(mesh), 1 if mesh is None else mesh.shape["context"]
  if platform != "cpu":
    raise ValueError(f"config.numerics.exact: found True on a {platform}, expected False: only programs for CPUs add in one order so far")
  if context > 1:
    raise ValueError(f"config.mesh.context: found {context}, expected 1, because with numerics.exact one device adds up a sequence")
  if config.decode_weights is not None:
    raise ValueError(f"config.serving.weights: found {config.decode_weights!r}, expected None, because numerics.exact is True")
  check_exact()


def make_model(config: ModelConfig, *, mesh: Mesh | None = None, serving: Serving | None = None) -> Model:
  """Splits a `Transformer` into a static graph and params, and wraps its methods as pure functions.

  Args:
    config: Sizes and options.
    mesh: Device mesh for the parts that XLA cannot shard by itself (experts, attention kernels);
      None is one device.
    serving: Layout of the weights for `decode`; None keeps that of the params. Prompts are always
      prefilled with the layout of the params.

  Returns:
    The model. Nothing is allocated until `init` runs.

  Raises:
    ValueError: If the number of key-value heads does not divide the number of query heads, or the
      experts do not fit the layers; or if it is to be exact where it cannot.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxrl_llm.models import preset
    >>> model = make_model(preset("nano", vocab_size=264))
    >>> params = model.init(jax.random.key(0))
    >>> tokens = jnp.zeros((1, 4), jnp.int32)
    >>> model.logits(params, tokens, jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32)).shape
    (1, 4, 264)
  """
  check_sizes(config)
  if config.exact:
    _check_exact(config, mesh)
  bind, init, logical_axes, num_params = pure(lambda rngs: Transformer(config, rngs=rngs, mesh=mesh))
  bind_decoder = bind
  if serving is not None:
    bind_decoder, *_ = pure(lambda rngs: Transformer(config, rngs=rngs, mesh=serving.mesh, expert_axes=EXPERT_AXES))

  def hidden(params: Params, *rows: Int[Array, "..."] | None, **options) -> Forward:
    return bind(params).hidden(*rows, **options)

  def features(params: Params, patches: Patches) -> Float[Array, "I S F D"]:
    return bind(params).features(patches)

  def unembed(params: Params, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    return bind(params).unembed(hidden)

  def forward(params: Params, *rows: Int[Array, "..."] | None, **options) -> Forward:
    out = hidden(params, *rows, **options)
    return out._replace(logits=unembed(params, out.hidden), hidden=None)

  def logits(
    params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T *axes"], segments: Int[Array, "B T"], images: Images | None = None
  ) -> Float[Array, "B T V"]:
    return forward(params, tokens, positions, segments, images=images).logits

  def logprobs(
    params: Params,
    batch: TrainBatch,
    sources: Int[Array, "B T"],
    *,
    filter_logits: Callable,
    learns_entropy: bool = False,
    router_losses: bool = False,
    teacher: Teacher | None = None,
  ) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Forward]:
    rows = (batch.tokens, batch.positions, batch.segments, batch.routing)
    options = dict(prefixes=batch.prefixes, router_losses=router_losses, images=batch.images)
    out = bind(params).hidden_in_stripes(*rows, **options)
    states, targets, counted, aligned = paired(out.hidden, sources, batch, mesh=mesh)
    tap_rows(batch, states, counted)
    chunk = config.head_tokens or chunk_tokens(config.vocab_size, mesh) // (1 if teacher is None else 2)
    options = dict(unembed=unembed, filter_logits=filter_logits, chunk=chunk, learns_entropy=learns_entropy, mesh=mesh, teacher=teacher)
    further = jax.tree.map(partial(in_row_order, mesh=mesh), out._replace(hidden=None))
    of_tokens, entropy, comparison, score_norm = token_logprobs(head_weights(params), states, targets, counted, **options)
    further = further._replace(comparison=jax.tree.map(aligned, comparison), score_norm=aligned(score_norm))
    return aligned(of_tokens), aligned(entropy), further

  def head_weights(params: Params) -> Params:
    names = ("embedding",) if config.tie_embeddings else ("head", "head_lora_a", "head_lora_b")
    return {name: params[name] for name in names if name in params}

  def teacher(params: Params, batch: TrainBatch, sources: Int[Array, "B T"], comparer: Comparer) -> Teacher:
    seen = batch if batch.taught is None else batch.taught
    states = bind(params).hidden_in_stripes(seen.tokens, seen.positions, seen.segments, prefixes=seen.prefixes).hidden
    if batch.taught is None:
      states, *_ = paired(states, sources, batch, mesh=mesh)
    else:
      states = segments_lib.at_slots(states, batch.taught.sources, in_order=False)
      # Without shared prompts, pairs lie in the slot before; see `paired`.
      states = states if batch.prefixes is not None else jnp.roll(states, -1, axis=1)
    return Teacher(head_weights(params), states, unembed, comparer)

  steps = make_steps(config, bind, bind_decoder, logical_axes=logical_axes, mesh=mesh, serving=serving)
  rest = dict(logical_axes=logical_axes, num_params=num_params, mesh=mesh)
  return Model(config, init, logits, forward, hidden, unembed, logprobs, teacher, features, **steps, **rest)


def tap_rows(batch: TrainBatch, states: Float[Array, "B T D"], counted: Bool[Array, "B T"]) -> None:
  """Taps the states that predict tokens, and where rows have those and their sequences."""
  nowhere = jnp.zeros_like(batch.segments) if batch.prefixes is None else batch.prefixes
  for name, x in (("segments", batch.segments), ("prefixes", nowhere), ("counted", counted)):
    tap(name, x, 0)
  tap("states", states)


def paired(
  hidden: Float[Array, "B T D"], sources: Int[Array, "B T"], batch: TrainBatch, *, mesh: Mesh | None
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"], Bool[Array, "B T"], Callable]:
  """Pairs each hidden state with the token that it predicts, on the device that holds the state.

  Args:
    hidden: Hidden states in the order of the stripes; see `Transformer.hidden_in_stripes`.
    sources: Slot of the state that predicts each token; -1 is none.
    batch: Rows, of which `tokens`, `prefixes` and `mask` are read.
    mesh: Device mesh; None is one device.

  Returns:
    The states, the tokens that they predict, and whether those count. Also the function that puts
    an array of one number per pair in the order of the batch's tokens.
  """
  counted = (batch.mask > 0) & (sources >= 0)
  move, back = partial(striped, mesh=mesh), partial(in_row_order, mesh=mesh)
  if batch.prefixes is None:
    # Each token is predicted in the slot before: ids move, which are smaller than states.
    shift = partial(jnp.roll, axis=1)
    return hidden, move(shift(batch.tokens, -1)), move(shift(counted, -1)), lambda x: shift(back(x), 1)
  # One state, the last one of a shared prompt, predicts several tokens.
  if (stripes := stripes_of(hidden.shape[1], mesh)) is not None:
    places = jnp.asarray(np.argsort(stripes.slots))
    sources = move(places[sources])  # The state of a token without a source is never read.
  states = segments_lib.at_slots(hidden, sources, in_order=False)
  return states, move(batch.tokens), move(counted), back


def check_sizes(config: ModelConfig) -> None:
  """Rejects inconsistent sizes.

  Raises:
    ValueError: If two sizes are inconsistent. The message names the size, its value and the
      expected one.
  """
  if config.num_heads % config.num_kv_heads:
    raise ValueError(f"model: num_heads={config.num_heads} must be a multiple of num_kv_heads={config.num_kv_heads}")
  if config.experts is None:
    return
  if not 1 <= config.experts.top_k <= config.experts.num_experts:
    raise ValueError(f"model: experts.top_k={config.experts.top_k} must be from 1 to experts.num_experts={config.experts.num_experts}")
  if not config.sparse_layers or not set(config.sparse_layers) <= set(range(config.num_layers)):
    raise ValueError(f"model: experts.layers={config.experts.layers} must be one or more of the layers 0 to {config.num_layers - 1}")
