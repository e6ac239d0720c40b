"""Checkpoints into params: tensor after tensor to its place on its devices, after every check that headers allow."""

import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from jaxrl_llm.devices.mesh import param_shardings
from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.models.config import DTYPES, ModelConfig
from jaxrl_llm.models.files.hf_folder import open_hf_folder, read_hf_config
from jaxrl_llm.models.files.tensor_names import IGNORED_SUFFIXES, TIED_HEAD, Entry, entries, to_params_layout
from jaxrl_llm.models.files.tensor_source import TensorSource
from jaxrl_llm.models.model import Model, make_model
from jaxrl_llm.pretrained import where
from jaxrl_llm.types import Params

# What may differ between the model that is built and the config that lies beside the weights.
_OUR_CHOICES = ("dtype", "param_dtype", "remat", "lora", "attention", "max_positions")


def open_source(path: str | os.PathLike) -> tuple[ModelConfig, TensorSource]:
  """The model and the tensors of a checkpoint, of which only headers are read.

  Args:
    path: a folder that transformers saved, or a `.gguf` file; see `pretrained.where.resolve`.

  Raises:
    ValueError: nothing there, or nothing that we can read; one line.
  """
  found = where.resolve(path)
  if found.is_dir():
    return open_hf_folder(found)
  if found.suffix != ".gguf":
    raise ValueError(f"{found}: found a file, expected a folder with config.json and model.safetensors, or a .gguf file")
  from jaxrl_llm.models.files.gguf import open_gguf

  return open_gguf(found)


def read_config(path: str | os.PathLike) -> ModelConfig:
  """The model that a checkpoint holds; reads no tensors. Path and errors are those of `open_source`."""
  found = where.resolve(path)
  return read_hf_config(found) if found.is_dir() else open_source(found)[0]


def check_tensors(config: ModelConfig, source: TensorSource, table: Sequence[Entry] | None = None) -> None:
  """Holds the tensors of a checkpoint against a table; None is `entries(config)`, that of a language model.

  Raises:
    ValueError: a tensor that is missing, that nobody expects, or that has another shape.
  """
  expected = {name: entry.shape for entry in (entries(config) if table is None else table) for name in entry.names}
  missing = [name for name in expected if name not in source.shapes]
  foreign = [name for name in source.shapes if name not in expected and name != TIED_HEAD and not name.endswith(IGNORED_SUFFIXES)]
  if TIED_HEAD in source.shapes and TIED_HEAD not in expected and not config.tie_embeddings:
    foreign.append(TIED_HEAD)
  others = lambda names: f" and {len(names) - 1} others" if len(names) > 1 else ""
  if missing:
    hint = did_you_mean(missing[0], foreign, "; it has {}, which no model of this family has", cutoff=0.8)
    raise ValueError(f"{source.path}: {missing[0]}{others(missing)} missing, expected for its {config.num_layers} layers{hint}")
  if foreign:
    file = source.files[foreign[0]]
    raise ValueError(f"{source.path}: found {foreign[0]}{others(foreign)} in {file}, expected no such tensor in a model of this family")
  for name, shape in expected.items():
    if tuple(source.shapes[name]) != shape:
      found = tuple(source.shapes[name])
      raise ValueError(f"{source.path}: {name} in {source.files[name]} has shape {found}, expected {shape} by the sizes in the config")


def check_same_model(config: ModelConfig, source_config: ModelConfig, source: TensorSource) -> None:
  """Refuses weights that belong to another model than the one that was built.

  Raises:
    ValueError: names the field in which the two differ.
  """
  for field in ModelConfig._fields:
    found, asked = getattr(source_config, field), getattr(config, field)
    if field not in _OUR_CHOICES and found != asked:
      raise ValueError(f"{source.path}: {field}: found {found!r} in the checkpoint, expected {asked!r}, which the model was built with")


def load(
  path: str | os.PathLike, *, dtype: str = "float32", compute_dtype: str | None = None, mesh: Mesh | None = None, remat: str = "none"
) -> tuple[Model, Params]:
  """A model and its weights from a checkpoint of transformers (Llama 3, SmolLM2, Qwen2, Qwen2.5, Qwen3, Qwen3-MoE) or a GGUF file.

  Args:
    path: a folder with `config.json` and safetensors, or a `.gguf` file; see `pretrained.where.resolve`.
    dtype: of the weights. Scales of norms and routers stay float32.
    compute_dtype: of activations and matrix products; None is `dtype`.
    mesh: devices to spread the weights over; None is one device.
    remat: see `ModelConfig`.

  Returns:
    The model, and its params on their devices.

  Raises:
    ValueError: whatever is wrong with path, files, config or mesh, in one line, before memory for the weights is taken.
  """
  for name, value in (("dtype", dtype), ("compute_dtype", compute_dtype or dtype)):
    if value not in DTYPES:
      raise ValueError(f"{name}: found {value!r}, expected one of {', '.join(DTYPES)}")
  config, source = open_source(path)
  check_tensors(config, source)
  config = config._replace(param_dtype=dtype, dtype=compute_dtype or dtype, remat=remat)
  model = _named(source, lambda: make_model(config, mesh=mesh))
  return model, load_table(source, model, mesh, None)


def load_params(path: str | os.PathLike, model: Model, *, mesh: Mesh | None = None, key: Array | None = None) -> Params:
  """The weights of a checkpoint for a model that is already built, such as by `make_model(read_config(path)._replace(...))`.

  Args:
    path: as `load`.
    model: the same model as the checkpoint's, of any dtype, with or without adapters.
    mesh: devices to spread the weights over; None is the model's.
    key: draws what no checkpoint has, the adapters; None is key 0.

  Raises:
    ValueError: see `load`, and a checkpoint of another model.
  """
  config, source = open_source(path)
  check_same_model(model.config, config, source)
  check_tensors(config, source)
  return load_table(source, model, model.mesh if mesh is None else mesh, key)


def _named(source: TensorSource, call: Callable[[], Any]) -> Any:
  """The call's result; its error begins with the checkpoint."""
  try:
    return call()
  except ValueError as error:
    raise ValueError(f"{source.path}: {error}") from error


def load_table(source: TensorSource, model: Any, mesh: Mesh | None, key: Array | None, *, table: Sequence[Entry] | None = None) -> Params:
  """Makes empty params on their devices, then reads every entry of a table into its place.

  Args:
    source: Checkpoint whose tensors have been checked.
    model: Model with `config`, `init` and `logical_axes`.
    mesh: Devices to spread the weights over; None is one device.
    key: Draws what the table leaves out; None is key 0.
    table: Entries to read; None is `entries(model.config)`, those of a language model.
  """
  key = jax.random.key(0) if key is None else key
  shapes = jax.eval_shape(model.init, key)
  shardings = None if mesh is None else _named(source, lambda: param_shardings(mesh, model.logical_axes, shapes))
  table = entries(model.config) if table is None else table
  params = _empty(model, shapes, shardings, {entry.path for entry in table}, key)
  for entry in table:
    *parents, leaf = entry.path
    branch = functools.reduce(operator.getitem, parents, params)
    sharding = None if shardings is None else functools.reduce(operator.getitem, entry.path, shardings)
    part = _place(source, entry, sharding)
    layout = entry._replace(layer=None, names=())  # What the program depends on, so that layers share one.
    branch[leaf] = _writer(sharding)(branch[leaf], part, entry.layer, layout=layout)
    # One tensor in flight: without this the host would read ahead of slow devices, and hold all that it has read.
    jax.block_until_ready(branch[leaf])
  return params


def _empty(model: Any, shapes: PyTree, shardings: PyTree | None, filled: set[tuple[str, ...]], key: Array) -> Params:
  """Zeros where the table will write, and fresh adapters elsewhere, all in one program."""

  def start(key):
    is_filled = lambda path: tuple(part.key for part in path) in filled
    fresh = shapes
    if not all(is_filled(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)):
      fresh = model.init(key)  # The compiler drops all of it but the adapters.
    zeros_or = lambda path, x, y: jnp.zeros(x.shape, x.dtype) if is_filled(path) else y
    return jax.tree_util.tree_map_with_path(zeros_or, shapes, fresh)

  return jax.jit(start, out_shardings=shardings)(key)


@functools.lru_cache(maxsize=64)
def _writer(sharding: NamedSharding | None) -> Callable[..., Array]:
  """The jitted `(array, tensors, layer, *, layout) -> array`, in place."""

  def write(array: Array, part: Array, layer: Array | None, *, layout: Entry) -> Array:
    part = to_params_layout(layout, part).astype(array.dtype)
    start = (0,) * array.ndim if layer is None else (layer,) + (0,) * (array.ndim - 1)
    return jax.lax.dynamic_update_slice(array, part if layer is None else part[None], start)

  return jax.jit(write, donate_argnums=0, static_argnames="layout", out_shardings=sharding)


def _place(source: TensorSource, entry: Entry, sharding: NamedSharding | None) -> Array:
  """The tensors of an entry on their devices, each with its own slice of them, in transformers' layout with the heads split off."""
  read = functools.cache(lambda name: source.read(name).reshape(entry.split))

  def piece(index: tuple[slice, ...]) -> np.ndarray:
    if not entry.over_experts:
      return read(entry.names[0])[index]
    return np.stack([read(name)[index[1:]] for name in entry.names[index[0]]])

  experts = (len(entry.names),) if entry.over_experts else ()
  if sharding is None:
    return jnp.asarray(piece((slice(None),) * (len(experts) + len(entry.split))))
  ours = tuple(sharding.spec)[0 if entry.layer is None else 1 :]
  lead, ours = ours[: len(experts)], ours[len(experts) :]
  spec = PartitionSpec(*lead, *(ours[entry.order.index(axis)] for axis in range(len(entry.order))))
  return jax.make_array_from_callback((*experts, *entry.split), NamedSharding(sharding.mesh, spec), piece)


def logits(model: Model, params: Params, tokens: Any, *, segments: Any = None, positions: Any = None) -> Float[Array, "B T V"]:
  """Logits of rows of tokens, in one compiled call; those at t are for token t + 1.

  Args:
    model: the model.
    params: its params.
    tokens: ids [B T], an array or lists of one length.
    segments: which sequence of the row a token belongs to, from 1; 0 is padding. None is one sequence a row.
    positions: of each token in its sequence; None counts from 0 in each.

  Returns:
    float32.

  Raises:
    ValueError: tokens that are not [B T], or ids that the model does not have.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> model = make_model(preset("nano", vocab_size=264))
    >>> logits(model, model.init(jax.random.key(0)), [[1, 2, 3], [4, 5, 6]]).shape
    (2, 3, 264)
  """
  if not isinstance(tokens, jax.Array):
    tokens = _host_tokens(tokens, model.config.vocab_size)
  if tokens.ndim != 2:
    raise ValueError(f"tokens: found shape {tuple(tokens.shape)}, expected rows of tokens, [B T]")
  segments = np.ones(tokens.shape, np.int32) if segments is None else segments
  segments, positions = (None if x is None else jnp.asarray(x, jnp.int32) for x in (segments, positions))
  for name, x in (("segments", segments), ("positions", positions)):
    if x is not None and x.shape != tokens.shape:
      raise ValueError(f"{name}: found shape {tuple(x.shape)}, expected that of the tokens, {tuple(tokens.shape)}")
  return _compiled(model.logits)(params, jnp.asarray(tokens, jnp.int32), segments, positions)


def _host_tokens(tokens: Any, vocab_size: int) -> np.ndarray:
  """Tokens as an array; ids out of range would be clamped by the embedding in silence."""
  try:
    tokens = np.asarray(tokens)
  except ValueError as error:
    raise ValueError("tokens: found rows of different lengths, expected one length; pad them, with segments 0 on the padding") from error
  if tokens.size and not (np.issubdtype(tokens.dtype, np.integer) and tokens.min() >= 0 and tokens.max() < vocab_size):
    raise ValueError(f"tokens: found {tokens.dtype} from {tokens.min()} to {tokens.max()}, expected ids from 0 to {vocab_size - 1}")
  return tokens


@functools.lru_cache(maxsize=16)
def _compiled(forward: Callable[..., Array]) -> Callable[..., Array]:
  """The jitted forward pass of one model, kept so that the next call finds it compiled."""

  def run(params, tokens, segments, positions):
    if positions is None:
      slots = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
      begins = segments != jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
      positions = slots - jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)
    return forward(params, tokens, positions, segments)

  return jax.jit(run)
