"""Saving of params to folders that transformers, vLLM and related tools open."""

import contextlib
import functools
import itertools
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxrl_llm.models.config import DTYPES, Vision
from jaxrl_llm.models.files.families import to_hf_config
from jaxrl_llm.models.files.hf_folder import CONFIG, INDEX, WEIGHTS, read_json
from jaxrl_llm.models.files.safetensors import write_file
from jaxrl_llm.models.files.tensor_names import TensorEntry, entries, to_hf_layout
from jaxrl_llm.models.lora import merge
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.params import at_path
from jaxrl_llm.pretrained import pictures
from jaxrl_llm.pretrained.tokenizer_files import TOKENIZER_FILES, copy_files
from jaxrl_llm.types import Params

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_hf(
  path: str | os.PathLike,
  model: Model,
  params: Params,
  *,
  dtype: str | None = None,
  max_shard_bytes: int = 2_000_000_000,
  tokenizer_from: str | os.PathLike | None = None,
) -> None:
  """Saves a model in the layout of published checkpoints, with adapters merged into their weights.

  Host memory holds one tensor at a time (for experts, one kind of one layer). The folder appears
  only when it is complete.

  Args:
    path: Folder to write, which must be new or empty.
    model: Model.
    params: Params of the model, on any devices.
    dtype: Dtype of the saved weights. None saves each array in its own dtype, so that norms and
      routers of bfloat16 weights stay float32.
    max_shard_bytes: Size above which the weights are split into several files with an index.
    tokenizer_from: Folder from which tokenizer, chat template, processors of pictures and
      generation config are copied, such as the one from which the model was loaded.

  Raises:
    ValueError: If the folder is not empty, the dtype is unknown, `tokenizer_from` has no tokenizer,
      or transformers does not have the model.

  Note:
    On several hosts all of them must call this; the first one writes.
  """
  options = dict(dtype=dtype, max_shard_bytes=max_shard_bytes, tokenizer_from=tokenizer_from)
  _check(path, **options)  # Before the adapters are merged, which takes a while.
  raw = to_hf_config(model.config)
  if model.config.lora is not None:
    model, params = merge(model, params)
  notes = picture_notes(model.config.vision, tokenizer_from)
  save_table(path, raw, entries(model.config), params, notes=notes, **options)


def picture_notes(vision: Vision | None, tokenizer_from: str | os.PathLike | None) -> dict[str, dict]:
  """Returns the files that say how a model reads pictures, which may be smaller than published.

  Args:
    vision: Tower of the model; None if it reads text alone.
    tokenizer_from: Folder with the files of a processor; None if there is none.
  """
  if vision is None:
    return {}
  values = pictures.to_values(vision.pictures)
  notes, processor = {pictures.FILES[0]: values}, pathlib.Path(tokenizer_from or "", pictures.FILES[1])
  # transformers prefers the settings within the processor's.
  if tokenizer_from is not None and processor.is_file() and "image_processor" in (content := read_json(processor)):
    notes[processor.name] = {**content, "image_processor": values}
  return notes


def save_table(
  path: str | os.PathLike,
  raw: Mapping[str, Any],
  table: Sequence[TensorEntry],
  params: Params,
  *,
  dtype: str | None = None,
  max_shard_bytes: int = 2_000_000_000,
  tokenizer_from: str | os.PathLike | None = None,
  notes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
  """Saves the tensors of a table.

  `save_hf` does this for a language model, and describes the other arguments.

  Args:
    raw: Content of `config.json`. `dtype` replaces its own dtype, and the token ids beside the
      tokenizer replace its ids that are null.
    table: Tensors and their places in the params.
    notes: Further JSON files by name, which replace those of `tokenizer_from`.
  """
  path = pathlib.Path(path)
  _check(path, dtype, max_shard_bytes, tokenizer_from)
  raw = {**raw, "torch_dtype": dtype or raw["torch_dtype"]}
  raw |= {name: x for name, x in _token_ids(tokenizer_from).items() if raw.get(name) is None}
  shards = _plan(table, params, dtype, max_shard_bytes)
  tensors = _tensors(table, params, dtype)
  if jax.process_index():
    for _ in tensors:  # Takes part in gathering every tensor, and discards it.
      continue
    return
  with whole_folder(path, tokenizer_from, {CONFIG: raw, **notes}) as folder:
    _write_shards(folder, shards, tensors)


@contextlib.contextmanager
def whole_folder(
  path: pathlib.Path, tokenizer_from: str | os.PathLike | None, notes: Mapping[str, Mapping[str, Any]]
) -> Iterator[pathlib.Path]:
  """Yields a folder for weights, with what belongs beside them, and moves it to `path` at the end.

  Args:
    path: Path of the folder, which must be new or empty.
    tokenizer_from: Folder with the tokenizer and other files to copy; None copies none.
    notes: Further JSON files by name.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
    folder = pathlib.Path(temporary) / path.name
    folder.mkdir()
    if tokenizer_from is not None:
      copy_files(pathlib.Path(tokenizer_from), folder)
    for name, content in notes.items():
      write_json(folder / name, dict(content))
    yield folder
    folder.rename(path)


def _check(path: str | os.PathLike, dtype: str | None, max_shard_bytes: int, tokenizer_from: str | os.PathLike | None) -> None:
  """Refuses wrong arguments before anything is computed."""
  path = pathlib.Path(path)
  if dtype is not None and dtype not in DTYPES:
    raise ValueError(
      f"dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}, or None for the dtypes of the params"
    )
  if max_shard_bytes < 1:
    raise ValueError(f"max_shard_bytes: found {max_shard_bytes}, expected a positive number of bytes")
  check_folder(path)
  if tokenizer_from is not None and not any((pathlib.Path(tokenizer_from) / name).is_file() for name in TOKENIZER_FILES):
    raise ValueError(
      f"tokenizer_from: found no tokenizer in {tokenizer_from}, expected a folder with tokenizer.json or a similar file"
    )


def check_folder(path: pathlib.Path) -> None:
  """Refuses to save over anything.

  Raises:
    ValueError: If the path is a file, or a folder that is not empty.
  """
  if path.exists() and not (path.is_dir() and not any(path.iterdir())):
    raise ValueError(f"{path}: found a {'folder that is not empty' if path.is_dir() else 'file'}, expected no such path or an empty folder")


def _token_ids(tokenizer_from: str | os.PathLike | None) -> dict:
  """Reads the token ids in the config beside the tokenizer."""
  if tokenizer_from is None or not (pathlib.Path(tokenizer_from) / CONFIG).is_file():
    return {}
  source = read_json(pathlib.Path(tokenizer_from) / CONFIG)
  return {name: source[name] for name in _TOKEN_IDS if name in source}


def _by_tensor(table: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
  """Groups the entries whose arrays are parts of one tensor."""
  return [list(group) for _, group in itertools.groupby(table, key=lambda entry: entry.names)]


def _plan(table: Sequence[TensorEntry], params: Params, dtype: str | None, max_shard_bytes: int) -> list[dict]:
  """Plans the files: for each one the shape and dtype of its tensors by name, in table order."""
  shards, used = [{}], 0
  for entry, *_ in _by_tensor(table):
    stored = dtype or jnp.dtype(at_path(params, entry.path).dtype).name
    num_bytes = math.prod(entry.shape) * jnp.dtype(stored).itemsize
    for name in entry.names:
      if shards[-1] and used + num_bytes > max_shard_bytes:
        shards.append({})
        used = 0
      shards[-1][name] = (entry.shape, stored)
      used += num_bytes
  return shards


def _tensors(table: Sequence[TensorEntry], params: Params, dtype: str | None) -> Iterator[np.ndarray]:
  """Yields all tensors in the order of the table."""
  for parts in _by_tensor(table):
    arrays = [on_host(at_path(params, entry.path), entry.layer, dtype) for entry in parts]
    for of_tensor in zip(*arrays, strict=True) if parts[0].over_experts else [arrays]:
      yield to_hf_layout(parts, of_tensor)


def on_host(array, layer: int | None, dtype: str | None) -> np.ndarray:
  """Copies an array, or one layer of it, to the host, whole and in the stored dtype."""
  if not isinstance(array, jax.Array):
    array = array if layer is None else array[layer]
    return np.asarray(array).astype(jnp.dtype(dtype or array.dtype))
  sharding = array.sharding
  # Gathered onto every device, so that each host has the array.
  whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
  return np.asarray(_gather_fn(whole, dtype or array.dtype.name)(array, layer))


@functools.lru_cache(maxsize=64)
def _gather_fn(whole: Sharding, dtype: str) -> Callable[..., jax.Array]:
  """Makes the jitted `(array, layer) -> array`, and keeps it so that layers share one program."""

  def take(array, layer):
    array = array if layer is None else jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
    return array.astype(dtype)

  return jax.jit(take, out_shardings=whole)


def _write_shards(folder: pathlib.Path, shards: list[dict], tensors: Iterator[np.ndarray]) -> None:
  """Writes the weights and, if there are several files, their index."""
  if len(shards) == 1:
    write_file(folder / WEIGHTS, shards[0], tensors)
    return
  weight_map, total = {}, 0
  for i, shard in enumerate(shards, 1):
    name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    write_file(folder / name, shard, itertools.islice(tensors, len(shard)))
    weight_map |= dict.fromkeys(shard, name)
    total += sum(math.prod(shape) * jnp.dtype(stored).itemsize for shape, stored in shard.values())
  write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: pathlib.Path, content: dict) -> None:
  """Writes a JSON file as transformers does, with sorted keys."""
  path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
