"""Folders that transformers saves: `config.json`, and safetensors in one file or with an index."""

import functools
import json
import os
import pathlib
import re
from typing import Any

import numpy as np
from absl import logging

from jaxrl_llm.models.config import ModelConfig, Vision
from jaxrl_llm.models.files import safetensors
from jaxrl_llm.models.files.families import from_hf_config
from jaxrl_llm.models.files.safetensors import Stored
from jaxrl_llm.models.files.tensor_names import EMBEDDING, HEAD, IGNORED_SUFFIXES, prefix_of
from jaxrl_llm.models.files.tensor_source import TensorSource
from jaxrl_llm.pretrained import pictures

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(path: pathlib.Path) -> Any:
  """Reads the content of a JSON file.

  Raises:
    ValueError: If there is no such file, or it is not JSON.
  """
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError as error:
    raise ValueError(f"{path}: found no such file; expected a folder that transformers saved, or a .gguf file") from error
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: found a file that is not JSON ({error}), expected one as transformers writes it") from error


def read_hf_config(folder: str | os.PathLike) -> ModelConfig:
  """Reads the `ModelConfig` of a folder from its `config.json`.

  If the config ties the head to the embedding and the files hold another head, as tools that merge
  adapters leave it, the head is used and the config is no longer tied, as in transformers.

  Raises:
    ValueError: If there is no such file, or `from_hf_config` refuses its content.
  """
  path = pathlib.Path(folder) / CONFIG
  ggufs = sorted(file.name for file in path.parent.glob("*.gguf"))
  if not path.exists() and ggufs:
    raise ValueError(f"{path.parent}: found no {CONFIG} but {', '.join(ggufs)}; give the path of the .gguf file itself")
  config = from_hf_config(read_json(path), where=str(path))
  if config.vision is not None:
    config = config._replace(vision=_with_picture_settings(config.vision, path.parent))
  if config.tie_embeddings and _has_own_head(path.parent, config):
    _tell(f"{path}: found tie_word_embeddings true and another {HEAD} in the files; the head is used, and no longer tied")
    return config._replace(tie_embeddings=False)
  return config


@functools.cache
def _tell(line: str) -> None:
  """Warns once: a start of a run reads a config several times."""
  logging.warning(line)


def _has_own_head(folder: pathlib.Path, config: ModelConfig) -> bool:
  """Returns whether the files hold a head that is not the embedding; False without any files."""
  stored = _read_headers(folder) if any((folder / name).exists() for name in (WEIGHTS, INDEX)) else {}
  embedding, head = stored.get(f"{prefix_of(config)}{EMBEDDING}"), stored.get(HEAD)
  return embedding is not None and head is not None and not safetensors.is_equal(embedding, head)


def _with_picture_settings(vision: Vision, folder: pathlib.Path) -> Vision:
  """Reads how pictures become patches, if the folder says so beside the sizes of its config."""
  if not any((folder / name).exists() for name in pictures.FILES):
    return vision
  stored = pictures.read_config(folder)
  for field in ("patch_size", "temporal_patch_size", "merge_size"):
    ours, theirs = getattr(vision.pictures, field), getattr(stored, field)
    if ours != theirs:
      raise ValueError(f"{folder}: {field}: found {theirs} in the settings of pictures, expected {ours}, as in {CONFIG}")
  return vision._replace(pictures=stored)


def open_hf_folder(folder: str | os.PathLike, *, config: ModelConfig | None = None) -> tuple[ModelConfig, TensorSource]:
  """Opens a folder, and reads no more than the headers of its files.

  Args:
    folder: Folder with `config.json` and safetensors.
    config: Config of the model, for one whose `config.json` has a form of its own, such as a model
      with another head; None reads it from `config.json`.

  Returns:
    The config and the source of the tensors. Experts that transformers 5 has fused into one tensor
    appear one by one under the published names, unless the published checkpoints fuse them too.

  Raises:
    ValueError: If files are missing, cut off or of another format, or `from_hf_config` refuses the
      config.
  """
  folder = pathlib.Path(folder)
  config, has_head = (read_hf_config(folder), True) if config is None else (config, False)
  stored = _read_headers(folder)
  embedding = f"{prefix_of(config)}{EMBEDDING}"
  if has_head and config.tie_embeddings and embedding not in stored and HEAD in stored:
    stored[embedding] = stored.pop(HEAD)  # Of the two that are one, this tool kept the head.
  if config.vision is None:
    stored = _split_fused_experts(stored)
  for name, tensor in stored.items():
    if tensor.dtype not in safetensors.DTYPES and not name.endswith(IGNORED_SUFFIXES):
      raise ValueError(f"{tensor.file}: {name} is stored as {tensor.dtype}, expected one of {', '.join(safetensors.DTYPES)}")
  turned = set() if config.vision is None else {name for name, tensor in stored.items() if _is_turned(name, tensor, config)}

  def read(name: str) -> np.ndarray:
    tensor = safetensors.read_tensor(stored[name])
    return tensor.swapaxes(1, 2) if name in turned else tensor

  source = TensorSource(
    path=folder,
    shapes={name: _turned(tensor.shape) if name in turned else tensor.shape for name, tensor in stored.items()},
    dtypes={name: safetensors.DTYPES.get(tensor.dtype, tensor.dtype) for name, tensor in stored.items()},
    read=read,
    files={name: tensor.file.name for name, tensor in stored.items()},
  )
  return config, source


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
  return (shape[0], shape[2], shape[1])


def _is_turned(name: str, tensor: Stored, config: ModelConfig) -> bool:
  """Returns whether a tensor of all experts is stored as transformers 5 computes with it.

  It is [E, 2·F, D] or [E, D, F] then. Published checkpoints have [E, D, 2·F] and [E, F, D]. As in
  transformers, the first is meant if both have the same shape.
  """
  fused = re.fullmatch(r".*\.mlp\.experts\.(gate_up|down)_proj", name)
  if not fused or config.experts is None:
    return False
  e, width = config.experts, config.d_model
  return tensor.shape == (e.num_experts, *((2 * e.d_ff, width) if fused[1] == "gate_up" else (width, e.d_ff)))


def _read_headers(folder: pathlib.Path) -> dict[str, Stored]:
  """Returns the places of all tensors of a folder.

  As in transformers, a whole file counts more than the index of other files beside it.
  """
  weight_map = _read_index(folder / INDEX) if (folder / INDEX).exists() else None
  if (folder / WEIGHTS).exists() and (weight_map is None or WEIGHTS not in weight_map.values()):
    return safetensors.read_header(folder / WEIGHTS)
  if weight_map is not None:
    return _read_shards(folder, weight_map)
  files = {file.name for file in folder.iterdir() if file.is_file()}
  pickles = sorted(name for name in files if name.startswith("pytorch_model") and name.endswith((".bin", ".bin.index.json")))
  if pickles:
    raise ValueError(
      f"{folder}: found {pickles[0]}, a pickle, which can run code and is never opened; expected {WEIGHTS}: convert it with transformers "
      "(from_pretrained, then save_pretrained)"
    )
  others = sorted(name for name in files if name.endswith(".safetensors"))
  shown = f"only {', '.join(others[:3])}" if others else "no weights"
  hint = "; merge the adapter into its base model first" if any("adapter" in name for name in others) else ""
  raise ValueError(f"{folder}: found {shown}, expected {WEIGHTS} or {INDEX}{hint}")


def _read_index(index: pathlib.Path) -> dict[str, str]:
  """Returns the file of each tensor by an index."""
  content = read_json(index)
  weight_map = content.get("weight_map") if isinstance(content, dict) else None
  if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
    raise ValueError(
      f"{index}: weight_map: found {type(weight_map).__name__}, expected an object that maps tensors to files"
    )
  for shard in set(weight_map.values()):
    if pathlib.PurePath(shard).name != shard:
      raise ValueError(f"{index}: found the file {shard!r}, expected the name of a file in the same folder")
  return weight_map


def _read_shards(folder: pathlib.Path, weight_map: dict[str, str]) -> dict[str, Stored]:
  """Returns the places of all tensors of a folder whose index must agree with its files."""
  shards = sorted(set(weight_map.values()))
  missing = [shard for shard in shards if not (folder / shard).exists()]
  if missing:
    raise ValueError(f"{folder}: {missing[0]} is missing, {len(missing)} of the {len(shards)} files that {INDEX} names; fetch them again")
  stored = {}
  for shard in shards:
    stored |= safetensors.read_header(folder / shard)
  for name, shard in weight_map.items():
    if name not in stored or stored[name].file.name != shard:
      raise ValueError(f"{folder / shard}: {name} is missing, though {INDEX} says it is in this file; fetch both again")
  return stored


def _split_fused_experts(stored: dict[str, Stored]) -> dict[str, Stored]:
  """Splits fused experts into the byte ranges of each expert's matrices.

  Fused tensors are [E, 2·F, D], with the gates first, and [E, D, F].
  """
  split = {}
  for name, tensor in stored.items():
    fused = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|down)_proj", name)
    if not fused or len(tensor.shape) != 3:
      split[name] = tensor
      continue
    parts = fused[2].split("_")
    num_experts, rows, columns = tensor.shape
    num_bytes = tensor.num_bytes // max(num_experts * len(parts), 1)
    for i in range(num_experts * len(parts)):
      expert, part = divmod(i, len(parts))
      split[f"{fused[1]}.{expert}.{parts[part]}_proj.weight"] = tensor._replace(
        shape=(rows // len(parts), columns), offset=tensor.offset + i * num_bytes, num_bytes=num_bytes
      )
  return split
