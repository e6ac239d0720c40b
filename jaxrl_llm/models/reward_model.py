"""Reward models: a decoder's trunk with a scalar head, read at the last token of a response.

Checkpoints are read and written in the format of transformers.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.critic import ValueModel
from jaxrl_llm.models.files.families import from_hf_config, to_hf_config
from jaxrl_llm.models.files.hf_folder import CONFIG, open_hf_folder, read_json
from jaxrl_llm.models.files.loading import check_same_model, check_tensors, load_table, open_source
from jaxrl_llm.models.files.saving import save_table
from jaxrl_llm.models.files.tensor_names import TensorEntry, entries
from jaxrl_llm.models.model import pure
from jaxrl_llm.pretrained import where
from jaxrl_llm.types import Params

HEAD = "score.weight"
_LANGUAGE_MODEL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


class RewardModel(NamedTuple):
  """A reward model as pure functions of its params.

  Attributes:
    config: Config of the trunk, without an output head.
    init: Function `(key) -> params` with a random trunk and a head of zeros.
    token_rewards: Function `(params, tokens, positions, segments) -> float32 [B T]` over packed
      rows. Each value is the reward if the sequence ended with that token.
    rewards: Function `(params, tokens [B T], lengths [B]) -> float32 [B]` over rows padded on the
      right. Each value is the reward at the last token of the row.
    logical_axes: Logical axes of the params, in the form of `Model.logical_axes`.
    num_params: Number of weights.
    mesh: Device mesh; None is one device.
  """

  config: ModelConfig
  init: Callable[[Array], Params]
  token_rewards: Callable[..., Float[Array, "B T"]]
  rewards: Callable[..., Float[Array, " B"]]
  logical_axes: PyTree
  num_params: int
  mesh: Mesh | None = None


def make_reward_model(config: ModelConfig, *, mesh: Mesh | None = None) -> RewardModel:
  """Makes a reward model with the trunk of a decoder.

  All of its weights are trained. Nothing is allocated until `init` runs.

  Example:
    >>> import jax
    >>> from jaxrl_llm.models import preset
    >>> model = make_reward_model(preset("nano", vocab_size=264))
    >>> params = model.init(jax.random.key(0))
    >>> model.rewards(params, jnp.zeros((2, 4), jnp.int32), jnp.array([4, 2])).tolist()
    [0.0, 0.0]
  """
  config = trunk_config(config)
  bind, init, logical_axes, num_params = pure(lambda rngs: ValueModel(config, rngs=rngs, mesh=mesh, has_bias=False))

  def token_rewards(params: Params, *rows: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return bind(params)(*rows)

  def rewards(params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, " B"]:
    slots = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    of_tokens = token_rewards(params, tokens, slots, (slots < lengths[:, None]).astype(jnp.int32))
    return jnp.take_along_axis(of_tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]

  return RewardModel(config, init, token_rewards, rewards, logical_axes, num_params, mesh)


def trunk_config(config: ModelConfig) -> ModelConfig:
  """Returns a decoder's config without an output head of its own and without adapters."""
  return config._replace(tie_embeddings=True, lora=None)


def reward_entries(config: ModelConfig, *, head: bool = True) -> list[TensorEntry]:
  """Maps the tensors of a transformers sequence classifier to the params of a reward model.

  Without the head, the table covers only the trunk, which is the same in a language model.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> reward_entries(preset("nano", vocab_size=264))[-1].names
    ('score.weight',)
  """
  d = config.d_model
  trunk = [entry._replace(path=("trunk", *entry.path)) for entry in entries(trunk_config(config))]
  return trunk + [TensorEntry(("value_head",), None, (HEAD,), (1, d), (d,), (0,))] * head


def is_classifier(path: str | os.PathLike) -> bool:
  """Returns whether the config of a checkpoint names a sequence classifier; reads no tensors.

  Raises:
    ValueError: If `pretrained.where.resolve` rejects the path.
  """
  place = where.resolve(path)
  return place.is_dir() and (place / CONFIG).exists() and _architecture(read_json(place / CONFIG)).endswith(_CLASSIFIER)


def read_reward_config(path: str | os.PathLike) -> ModelConfig:
  """Reads the config of the trunk of a reward model, from headers alone.

  The folder is one of transformers: `AutoModelForSequenceClassification` with one label.

  Raises:
    ValueError: If the folder does not exist, holds a language model (which has no reward head), has
      several labels, or its tensors do not fit. The message has one line.
  """
  return _open(path)[0]


def pad_id(path: str | os.PathLike) -> int | None:
  """Returns the padding id in a reward model's `config.json`; None if it has none.

  Transformers reads the reward at the last token that is not padding.
  """
  token_id = read_json(where.resolve(path) / CONFIG).get("pad_token_id")
  return token_id if isinstance(token_id, int) and token_id >= 0 else None


def load_reward_params(path: str | os.PathLike, model: RewardModel, *, key: Array | None = None) -> Params:
  """Loads the weights of a reward model, or those of a language model's trunk with a head of zeros.

  Args:
    path: Folder of either model, or a `.gguf` file of a language model.
    model: Model with the trunk of the checkpoint, in any dtype.
    key: Random key for initialisation; None is key 0. No weight that it draws is kept.

  Raises:
    ValueError: If the checkpoint is of another model, or `read_reward_config` or `load_params`
      rejects it.
  """
  if is_classifier(path):
    config, source = _open(path)
    table = reward_entries(config)
  else:
    config, source = open_source(path)
    check_tensors(config, source)
    table = reward_entries(config, head=False)
  check_same_model(model.config, trunk_config(config), source)
  return load_table(source, model, model.mesh, key, table=table)


def save_reward_model(
  path: str | os.PathLike,
  model: RewardModel,
  params: Params,
  *,
  pad_token_id: int,
  dtype: str | None = None,
  tokenizer_from: str | os.PathLike | None = None,
  notes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
  """Saves a reward model in the format of transformers.

  Both `AutoModelForSequenceClassification.from_pretrained` and `load_reward_params` can read it.

  Args:
    path: Folder to create. It must not exist or must be empty.
    model: Reward model.
    params: Params of the model, on any devices.
    pad_token_id: Padding id. Transformers reads the reward at the last token that is not padding.
    dtype: Dtype of the saved weights; None keeps the dtype of each array.
    tokenizer_from: Folder to copy the tokenizer from.
    notes: Further JSON files by name.

  Raises:
    ValueError: If `save_hf` would reject the arguments.
  """
  raw = to_hf_config(model.config)
  (name,) = raw["architectures"]
  raw |= {
    "architectures": [name.replace(_LANGUAGE_MODEL, _CLASSIFIER)],
    "id2label": {"0": "LABEL_0"},  # How transformers writes num_labels=1.
    "label2id": {"LABEL_0": 0},
    "pad_token_id": pad_token_id,
  }
  save_table(path, raw, reward_entries(model.config), params, dtype=dtype, tokenizer_from=tokenizer_from, notes=notes)


def _open(path: str | os.PathLike):
  folder = where.resolve(path)
  if not folder.is_dir():
    raise ValueError(
      f"{folder}: found a file, expected a folder of a reward model as transformers saves it, with config.json"
    )
  config = _read_config(folder)
  _, source = open_hf_folder(folder, config=config)
  if HEAD not in source.shapes:
    raise ValueError(f"{folder}: found no {HEAD}, expected it in a reward model; train one: configs/reward_model.py")
  check_tensors(config, source, reward_entries(config))
  return config, source


def _read_config(folder: pathlib.Path) -> ModelConfig:
  file = folder / CONFIG
  raw = read_json(file)
  name = _architecture(raw)
  if name.endswith(_LANGUAGE_MODEL):
    raise ValueError(
      f"{file}: architectures: found {name!r}, a language model without a reward head, expected "
      f"{name.replace(_LANGUAGE_MODEL, _CLASSIFIER)!r}; train a reward model from it: "
      f"--config=configs/reward_model.py --config.model.path={folder}"
    )
  labels = raw.get("num_labels")
  if labels is None:
    # Transformers omits its default, 2.
    labels = len(raw["id2label"]) if isinstance(raw.get("id2label"), dict) else 2
  if name.endswith(_CLASSIFIER) and labels != 1:
    raise ValueError(f"{file}: found {labels} labels, expected 1 (num_labels=1): a reward model returns one number")
  config = from_hf_config({**raw, "architectures": [name.replace(_CLASSIFIER, _LANGUAGE_MODEL)]} if name else raw, where=str(file))
  return trunk_config(config)


def _architecture(raw: Any) -> str:
  names = raw.get("architectures") if isinstance(raw, dict) else None
  return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
