"""Loading of checkpoints: checks of headers first, then one tensor after another onto devices."""

import functools
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
from jaxrl_llm.models import image_slots
from jaxrl_llm.models.config import DTYPES, ModelConfig
from jaxrl_llm.models.files.hf_folder import open_hf_folder, read_hf_config
from jaxrl_llm.models.files.tensor_names import HEAD, IGNORED_SUFFIXES, TensorEntry, entries, piece_of, to_params_layout
from jaxrl_llm.models.files.tensor_source import TensorSource
from jaxrl_llm.models.model import Model, make_model
from jaxrl_llm.models.params import at_path
from jaxrl_llm.pretrained import where
from jaxrl_llm.types import Params

# Fields in which a model may differ from the config of its checkpoint.
_OUR_CHOICES = ("dtype", "param_dtype", "remat", "lora", "attention", "decode_attention", "exact", "max_positions", "train_tower")


def open_source(path: str | os.PathLike) -> tuple[ModelConfig, TensorSource]:
  """Opens a checkpoint, and reads no more than the headers of its files.

  Args:
    path: Folder that transformers saved, or a `.gguf` file; see `pretrained.where.resolve`.

  Returns:
    The config of the model, and the source of its tensors.

  Raises:
    ValueError: If there is no checkpoint, or it cannot be read; the message has one line.
  """
  place = where.resolve(path)
  if place.is_dir():
    return open_hf_folder(place)
  if place.suffix != ".gguf":
    raise ValueError(
      f"{place}: found a file, expected a folder with config.json and model.safetensors, or a .gguf file"
    )
  from jaxrl_llm.models.files.gguf import open_gguf

  return open_gguf(place)


def read_config(path: str | os.PathLike) -> ModelConfig:
  """Reads the `ModelConfig` of a checkpoint.

  Of the tensors, it reads no more than whether a tied head is another one; see `read_hf_config`.

  Args:
    path: Folder that transformers saved, or a `.gguf` file; see `pretrained.where.resolve`.

  Raises:
    ValueError: If there is no checkpoint, or its config cannot be read; the message has one line.
  """
  place = where.resolve(path)
  return read_hf_config(place) if place.is_dir() else open_source(place)[0]


def check_tensors(config: ModelConfig, source: TensorSource, table: Sequence[TensorEntry] | None = None) -> None:
  """Compares the tensors of a checkpoint with a table.

  Args:
    config: Config of the model.
    source: Tensors of the checkpoint.
    table: Expected tensors; None is `entries(config)`, those of a language model.

  Raises:
    ValueError: If a tensor is missing, is not expected, or has another shape.
  """
  expected = {name: entry.shape for entry in (entries(config) if table is None else table) for name in entry.names}
  missing = [name for name in expected if name not in source.shapes]
  # The head of a tied model that is stored too equals the embedding; see `hf_folder`.
  ignored = (*IGNORED_SUFFIXES, HEAD) if config.tie_embeddings else IGNORED_SUFFIXES
  foreign = [name for name in source.shapes if name not in expected and not name.endswith(ignored)]
  others = lambda names: f" and {len(names) - 1} others" if len(names) > 1 else ""
  if missing:
    hint = did_you_mean(missing[0], foreign, "; it has {}, which no model of this family has", cutoff=0.8)
    raise ValueError(f"{source.path}: {missing[0]}{others(missing)} missing, expected for its {config.num_layers} layers{hint}")
  if foreign:
    file = source.files[foreign[0]]
    raise ValueError(f"{source.path}: found {foreign[0]}{others(foreign)} in {file}, expected no such tensor in a model of this family")
  for name, shape in expected.items():
    if tuple(source.shapes[name]) != shape:
      stored = tuple(source.shapes[name])
      raise ValueError(
        f"{source.path}: {name} in {source.files[name]} has shape {stored}, expected {shape} by the sizes in the config"
      )


def check_same_model(config: ModelConfig, source_config: ModelConfig, source: TensorSource) -> None:
  """Refuses the weights of another model.

  Args:
    config: Config of the model that was built.
    source_config: Config of the checkpoint.
    source: Source of the checkpoint's tensors, for the message.

  Raises:
    ValueError: If the two configs differ; the message names the field.
  """
  for field in ModelConfig._fields:
    stored, built = getattr(source_config, field), getattr(config, field)
    if field not in _OUR_CHOICES and stored != built:
      raise ValueError(
        f"{source.path}: {field}: found {stored!r} in the checkpoint, expected {built!r}, "
        "with which the model was built"
      )


def load(
  path: str | os.PathLike, *, dtype: str = "float32", compute_dtype: str | None = None, mesh: Mesh | None = None, remat: str = "none"
) -> tuple[Model, Params]:
  """Loads a model and its weights from a checkpoint of transformers or a GGUF file.

  The families are those of `families.FAMILIES`.

  Args:
    path: Folder with `config.json` and safetensors, or a `.gguf` file; see
      `pretrained.where.resolve`.
    dtype: Dtype of the weights. Scales of norms and routers stay float32.
    compute_dtype: Dtype of activations and matrix products; None is `dtype`.
    mesh: Mesh over which the weights are sharded; None is one device.
    remat: Rematerialisation policy; see `ModelConfig`.

  Returns:
    The model, and its params on their devices.

  Raises:
    ValueError: If path, files, config or mesh are wrong. The message has one line, and no memory
      for the weights has been taken.
  """
  for name, value in (("dtype", dtype), ("compute_dtype", compute_dtype or dtype)):
    if value not in DTYPES:
      raise ValueError(f"{name}: found {value!r}, expected one of {', '.join(DTYPES)}")
  config, source = open_source(path)
  check_tensors(config, source)
  config = config._replace(param_dtype=dtype, dtype=compute_dtype or dtype, remat=remat)
  model = _prefix_errors(source, lambda: make_model(config, mesh=mesh))
  return model, load_table(source, model, mesh, None)


def load_params(path: str | os.PathLike, model: Model, *, mesh: Mesh | None = None, key: Array | None = None) -> Params:
  """Loads the weights of a checkpoint for a model that is already built.

  For example, `make_model(read_config(path)._replace(...))` builds it.

  Args:
    path: Folder with `config.json` and safetensors, or a `.gguf` file; see
      `pretrained.where.resolve`.
    model: The checkpoint's model, with any dtype, and with or without adapters.
    mesh: Mesh over which the weights are sharded; None is the model's.
    key: Key for the adapters, which no checkpoint has; None is key 0.

  Raises:
    ValueError: If `load` would raise it, or the checkpoint belongs to another model.
  """
  config, source = open_source(path)
  check_same_model(model.config, config, source)
  check_tensors(config, source)
  return load_table(source, model, model.mesh if mesh is None else mesh, key)


def _prefix_errors(source: TensorSource, call: Callable[[], Any]) -> Any:
  """Returns the result of a call, and prefixes its error with the path of the checkpoint."""
  try:
    return call()
  except ValueError as error:
    raise ValueError(f"{source.path}: {error}") from error


def load_table(
  source: TensorSource, model: Any, mesh: Mesh | None, key: Array | None, *, table: Sequence[TensorEntry] | None = None
) -> Params:
  """Makes empty params on their devices, then reads every entry of a table into its place.

  Args:
    source: Checkpoint whose tensors have been checked.
    model: Model with `config`, `init` and `logical_axes`.
    mesh: Mesh over which the weights are sharded; None is one device.
    key: Key for the weights that are not in the table; None is key 0.
    table: Entries to read; None is `entries(model.config)`, those of a language model.
  """
  key = jax.random.key(0) if key is None else key
  shapes = jax.eval_shape(model.init, key)
  make_shardings = lambda: param_shardings(mesh, model.logical_axes, shapes)
  shardings = None if mesh is None else _prefix_errors(source, make_shardings)
  table = entries(model.config) if table is None else table
  params = _empty(model, shapes, shardings, {entry.path for entry in table}, key)
  for entry in table:
    *parents, leaf = entry.path
    branch = at_path(params, parents)
    sharding = None if shardings is None else at_path(shardings, entry.path)
    part = _place(source, entry, sharding)
    # Without layer and names, so that all layers share one program.
    layout = entry._replace(layer=None, names=())
    branch[leaf] = _writer(sharding)(branch[leaf], part, entry.layer, layout=layout)
    # One tensor in flight: otherwise the host would read ahead of slow devices and hold all tensors
    # that it has read.
    jax.block_until_ready(branch[leaf])
  return params


def _empty(model: Any, shapes: PyTree, shardings: PyTree | None, filled: set[tuple[str, ...]], key: Array) -> Params:
  """Makes zeros for the table's arrays and fresh values for the adapters, all in one program."""

  def start(key):
    is_filled = lambda path: tuple(part.key for part in path) in filled
    fresh = shapes
    if not all(is_filled(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)):
      fresh = model.init(key)  # The compiler keeps only the adapters.
    zeros_or = lambda path, x, y: jnp.zeros(x.shape, x.dtype) if is_filled(path) else y
    return jax.tree_util.tree_map_with_path(zeros_or, shapes, fresh)

  return jax.jit(start, out_shardings=shardings)(key)


@functools.lru_cache(maxsize=64)
def _writer(sharding: NamedSharding | None) -> Callable[..., Array]:
  """Makes the jitted `(array, part, layer, *, layout) -> array`, which writes in place."""

  def write(array: Array, part: Array, layer: Array | None, *, layout: TensorEntry) -> Array:
    part = to_params_layout(layout, part).astype(array.dtype)
    start = (0,) * array.ndim if layer is None else (layer,) + (0,) * (array.ndim - 1)
    return jax.lax.dynamic_update_slice(array, part if layer is None else part[None], start)

  return jax.jit(write, donate_argnums=0, static_argnames="layout", out_shardings=sharding)


def _place(source: TensorSource, entry: TensorEntry, sharding: NamedSharding | None) -> Array:
  """Puts the tensors of an entry on their devices; each device gets only its own slice.

  The tensors keep transformers' layout, but with the heads split off.
  """
  read = functools.cache(lambda name: piece_of(entry, source.read(name)))

  def piece(index: tuple[slice, ...]) -> np.ndarray:
    if not entry.over_experts:
      return read(entry.names[0])[index]
    return np.stack([read(name)[index[1:]] for name in entry.names[index[0]]])

  experts = (len(entry.names),) if entry.over_experts else ()
  if sharding is None:
    return jnp.asarray(piece((slice(None),) * (len(experts) + len(entry.piece))))
  ours = tuple(sharding.spec)[0 if entry.layer is None else 1 :]
  lead, ours = ours[: len(experts)], ours[len(experts) :]
  spec = PartitionSpec(*lead, *(ours[entry.order.index(axis)] for axis in range(len(entry.order))))
  return jax.make_array_from_callback((*experts, *entry.piece), NamedSharding(sharding.mesh, spec), piece)


def logits(
  model: Model,
  params: Params,
  tokens: Any,
  *,
  segments: Any = None,
  positions: Any = None,
  images: Sequence[Sequence[Any]] | None = None,
) -> Float[Array, "B T V"]:
  """Computes the logits of rows of tokens in one compiled call; those at t predict token t + 1.

  Args:
    model: Model.
    params: Params of the model.
    tokens: Token ids, [B T], as an array or as lists of one length.
    segments: Number of each token's sequence in its row, from 1; 0 is padding. None is one sequence
      per row.
    positions: Position of each token in its sequence; None counts from 0 in each sequence.
    images: Pictures that each row shows, in order, as uint8 arrays [H W 3] or Pillow's pictures.
      Tokens then hold the image token once for each square of patches, of which
      `pretrained.pictures.num_slots` says the number. A row has one sequence, with padding at
      either end.

  Returns:
    Logits in float32.

  Raises:
    ValueError: If the tokens are not [B T], the model does not have an id or a vision tower, or the
      image tokens do not fit the pictures.

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
      raise ValueError(f"{name}: found shape {tuple(x.shape)}, expected the shape of the tokens, {tuple(tokens.shape)}")
  if images is None:
    return _compiled(model.logits)(params, jnp.asarray(tokens, jnp.int32), segments, positions)
  if positions is not None:
    raise ValueError("positions: found positions beside images, expected None: they follow from the pictures")
  positions, shown = image_slots.show(model.config, np.asarray(tokens), np.asarray(segments), images)
  return _compiled(model.logits)(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(segments), positions, shown)


def _host_tokens(tokens: Any, vocab_size: int) -> np.ndarray:
  """Converts tokens to an array, and checks their range.

  The embedding would silently clamp ids that are out of range.
  """
  try:
    tokens = np.asarray(tokens)
  except ValueError as error:
    raise ValueError(
      "tokens: found rows of different lengths, expected one length; pad them, with segment 0 on the padding"
    ) from error
  if tokens.size and not (np.issubdtype(tokens.dtype, np.integer) and tokens.min() >= 0 and tokens.max() < vocab_size):
    raise ValueError(f"tokens: found {tokens.dtype} from {tokens.min()} to {tokens.max()}, expected ids from 0 to {vocab_size - 1}")
  return tokens


@functools.lru_cache(maxsize=16)
def _compiled(forward: Callable[..., Array]) -> Callable[..., Array]:
  """Jits the forward pass of a model, and keeps it so that the next call does not compile again."""

  def run(params, tokens, segments, positions, images=None):
    if positions is None:
      slots = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
      begins = segments != jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
      positions = slots - jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)
    return forward(params, tokens, positions, segments) if images is None else forward(params, tokens, positions, segments, images)

  return jax.jit(run)
