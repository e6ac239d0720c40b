"""The table from tensors of a transformers checkpoint to arrays of the params, and back."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.models.config import ModelConfig


class TensorEntry(NamedTuple):
  """A place in the params and the tensors that fill it.

  `tensor.reshape(split).transpose(order)` has the layout of the params. Linear maps are [out, in]
  in transformers, and [in, out] in the params, with the heads as an axis of their own.

  Attributes:
    path: Path of the array in the params tree.
    layer: Index on the array's leading axis; None for an array that is not stacked.
    names: Name of the tensor, or one name for each expert in the order of the experts.
    shape: Shape of each tensor.
    split: Shape with the heads split off.
    order: Axes of `split` in the order of the params.
    over_experts: Whether each expert has a tensor of its own; the array then has an axis of experts
      after the axis of layers.
    part: Axis of `split` along which several arrays lie in one tensor, and the index of this one;
      None if the tensor is one array. `order` leaves the axis out.
  """

  path: tuple[str, ...]
  layer: int | None
  names: tuple[str, ...]
  shape: tuple[int, ...]
  split: tuple[int, ...]
  order: tuple[int, ...]
  over_experts: bool = False
  part: tuple[int, int] | None = None

  @property
  def piece(self) -> tuple[int, ...]:
    """The shape of this array in a tensor, with the heads split off."""
    return self.split if self.part is None else (*self.split[: self.part[0]], *self.split[self.part[0] + 1 :])


# Tensors that some exporters store although they follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

# Names of a block's norms. That behind attention has the name that others give the MLP's own.
_NORMS = {
  "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
  "after": {"attention_end_norm": "post_attention_layernorm", "mlp_end_norm": "post_feedforward_layernorm"},
  "both": {
    "attention_norm": "input_layernorm",
    "attention_end_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_end_norm": "post_feedforward_layernorm",
  },
}


def _attention_rows(config: ModelConfig) -> list[tuple]:
  """Lists the tensors of attention and norms of a block.

  Each row is the path in the block, the name and shape in transformers, the shape with heads, and
  the order of the axes.
  """
  d, c = config.d_model, config.head_dim
  rows = [
    *(_vector(f"{ours}/scale", f"{name}.weight", d) for ours, name in _NORMS[config.norms].items()),
    ("attention/o", "self_attn.o_proj.weight", (d, config.num_heads * c), (d, config.num_heads, c), (1, 2, 0)),
  ]
  for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
    rows.append((f"attention/{part}", f"self_attn.{part}_proj.weight", (heads * c, d), (heads, c, d), (2, 0, 1)))
    if config.qkv_bias:
      rows.append((f"attention/{part}_bias", f"self_attn.{part}_proj.bias", (heads * c,), (heads, c), (0, 1)))
    if config.qk_norm and part != "v":
      name, shape = f"self_attn.{part}_norm.weight", (heads, c) if config.qk_norm_joint else (c,)
      rows.append((f"attention/{part}_norm/scale", name, (math.prod(shape),), shape, tuple(range(len(shape)))))
  return rows


def _mlp_rows(config: ModelConfig, sparse: bool) -> list[tuple]:
  """Lists the tensors of the MLP of a block, as in `_attention_rows`.

  `*` in a name stands for the expert. A last item of a row is `TensorEntry.part`.
  """
  d, e = config.d_model, config.experts
  if not sparse:
    shapes = {"gate": (config.d_ff, d), "up": (config.d_ff, d), "down": (d, config.d_ff)}
    return [(f"mlp/{part}", f"mlp.{part}_proj.weight", shape, shape, (1, 0)) for part, shape in shapes.items()]
  router = ("mlp/router", "mlp.gate.weight", (e.num_experts, d), (e.num_experts, d), (1, 0))
  if config.vision is None:
    shapes = {"gate": (e.d_ff, d), "up": (e.d_ff, d), "down": (d, e.d_ff)}
    return [*((f"mlp/{part}", f"mlp.experts.*.{part}_proj.weight", shape, shape, (1, 0)) for part, shape in shapes.items()), router]
  # With a tower, all experts are in one tensor, in the layout of the params.
  both, down = (e.num_experts, d, 2 * e.d_ff), (e.num_experts, e.d_ff, d)
  split = (e.num_experts, d, 2, e.d_ff)
  rows = [(f"mlp/{part}", "mlp.experts.gate_up_proj", both, split, (0, 1, 2), (2, i)) for i, part in enumerate(("gate", "up"))]
  return [*rows, ("mlp/down", "mlp.experts.down_proj", down, down, (0, 1, 2)), router]


def _linear_rows(path: str, name: str, ins: int, outs: int) -> list[tuple]:
  """Lists the tensors of a linear map of the tower."""
  weight = (f"{path}/weight", f"{name}.weight", (outs, ins), (outs, ins), (1, 0))
  return [weight, _vector(f"{path}/bias", f"{name}.bias", outs)]


def _vector(path: str, name: str, width: int) -> tuple:
  return path, name, (width,), (width,), (0,)


def _norm_rows(path: str, name: str, width: int) -> list[tuple]:
  """Lists the tensors of a LayerNorm of the tower."""
  return [_vector(f"{path}/scale", f"{name}.weight", width), _vector(f"{path}/bias", f"{name}.bias", width)]


def _merger_rows(config: ModelConfig, path: str, name: str, *, is_deep: bool) -> list[tuple]:
  vision = config.vision
  width = vision.d_model * vision.merge_size**2
  return [
    *_norm_rows(f"{path}/norm", f"{name}.norm", width if is_deep else vision.d_model),
    *_linear_rows(f"{path}/up", f"{name}.linear_fc1", width, width),
    *_linear_rows(f"{path}/down", f"{name}.linear_fc2", width, config.d_model),
  ]


def tower_entries(config: ModelConfig) -> list[TensorEntry]:
  """Makes the table of the vision tower of a model."""
  vision = config.vision
  w, (size, time), table = vision.d_model, vision.pictures[:2], []
  patch = (3, time, size, size)

  def add(rows: Sequence[tuple], layer: int | None = None) -> None:
    for path, name, shape, split, order, *part in rows:
      names = (f"model.visual.{name}",)
      table.append(TensorEntry(("tower", *path.split("/")), layer, names, shape, split, order, part=part[0] if part else None))

  # The convolution over a patch is a linear map of all of its values.
  add([("patches/weight", "patch_embed.proj.weight", (w, *patch), (w, vision.patch_width), (1, 0))])
  add([_vector("patches/bias", "patch_embed.proj.bias", w)])
  side = (vision.grid_side**2, w)
  add([("positions", "pos_embed.weight", side, side, (0, 1))])
  for layer in range(vision.num_layers):
    name = f"blocks.{layer}"
    rows = _norm_rows("layers/attention_norm", f"{name}.norm1", w) + _norm_rows("layers/mlp_norm", f"{name}.norm2", w)
    of_part = lambda kind, shape, split, order, name=name: [
      (f"layers/attention/{part}/{kind}", f"{name}.attn.qkv.{kind}", shape, split, order, (0, i)) for i, part in enumerate("qkv")
    ]
    rows += of_part("weight", (3 * w, w), (3, w, w), (1, 0)) + of_part("bias", (3 * w,), (3, w), (0,))
    rows += _linear_rows("layers/attention/o", f"{name}.attn.proj", w, w)
    rows += _linear_rows("layers/up", f"{name}.mlp.linear_fc1", w, vision.d_ff)
    rows += _linear_rows("layers/down", f"{name}.mlp.linear_fc2", vision.d_ff, w)
    add(rows, layer)
  add(_merger_rows(config, "merger", "merger", is_deep=False))
  for i in range(len(vision.deep_layers)):
    add(_merger_rows(config, f"deep_merger_{i}", f"deepstack_merger_list.{i}", is_deep=True))
  return table


def prefix_of(config: ModelConfig) -> str:
  """Returns the beginning of the names of the decoder's tensors.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> prefix_of(preset("nano", vocab_size=264)), prefix_of(preset("nano-vl", vocab_size=264))
    ('model.', 'model.language_model.')
  """
  return "model." if config.vision is None else "model.language_model."


def entries(config: ModelConfig) -> list[TensorEntry]:
  """Makes the table of a model in the order of a checkpoint's files.

  The order is the embedding, layer after layer, the final norm, the vision tower, and the head.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> table = entries(preset("nano", vocab_size=264))
    >>> table[3].names, table[3].path, table[3].layer
    (('model.layers.0.self_attn.o_proj.weight',), ('layers', 'attention', 'o'), 0)
  """
  v, d = config.vocab_size, config.d_model
  prefix = prefix_of(config)
  table = [TensorEntry(("embedding",), None, (f"{prefix}{EMBEDDING}",), (v, d), (v, d), (0, 1))]
  sparse_layers, dense_layers = config.sparse_layers, config.dense_layers
  for layer in range(config.num_layers):
    sparse = layer in sparse_layers
    stack, index = ("sparse_layers", sparse_layers.index(layer)) if sparse else ("layers", dense_layers.index(layer))
    for path, name, shape, split, order, *part in _attention_rows(config) + _mlp_rows(config, sparse):
      name = f"{prefix}layers.{layer}.{name}"
      over_experts = "*" in name
      names = tuple(name.replace("*", str(e)) for e in range(config.experts.num_experts)) if over_experts else (name,)
      table.append(TensorEntry((stack, *path.split("/")), index, names, shape, split, order, over_experts, part[0] if part else None))
  table.append(TensorEntry(("final_norm", "scale"), None, (f"{prefix}norm.weight",), (d,), (d,), (0,)))
  if config.vision is not None:
    table += tower_entries(config)
  if not config.tie_embeddings:
    table.append(TensorEntry(("head",), None, (HEAD,), (v, d), (v, d), (1, 0)))
  return table


def piece_of(entry: TensorEntry, tensor: Any) -> Any:
  """Returns the part of a tensor that is the array of an entry, with the heads split off."""
  tensor = tensor.reshape(entry.split)
  return tensor if entry.part is None else tensor[(slice(None),) * entry.part[0] + (entry.part[1],)]


def to_params_layout(entry: TensorEntry, piece: Any) -> Any:
  """Brings a piece of a tensor of transformers into the layout of the params.

  Args:
    entry: Entry of the tensor.
    piece: Piece of the tensor, or for experts a stack of them along a leading axis. NumPy or JAX.

  Returns:
    A view of the piece.
  """
  if not entry.over_experts:
    return piece.reshape(entry.piece).transpose(entry.order)
  order = (0, *(axis + 1 for axis in entry.order))
  return piece.reshape(-1, *entry.piece).transpose(order)


def to_hf_layout(parts: Sequence[TensorEntry], arrays: Sequence[Any]) -> Any:
  """Inverts `to_params_layout` for one tensor, without the axis of experts.

  Args:
    parts: Entries of the tensor, one for each array in it.
    arrays: Arrays of these entries.
  """
  pieces = [array.transpose(sorted(range(len(e.order)), key=e.order.__getitem__)) for e, array in zip(parts, arrays, strict=True)]
  tensor = pieces[0] if parts[0].part is None else np.stack(pieces, axis=parts[0].part[0])
  return tensor.reshape(parts[0].shape)


def num_params(config: ModelConfig) -> int:
  """Counts the weights of a model without adapters.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> num_params(preset("qwen3-0.6b"))
    596049920
  """
  return sum(len(entry.names) * math.prod(entry.piece) for entry in entries(config))


def num_active_params(config: ModelConfig) -> int:
  """Counts the weights that take part in one token, which visits only some of the experts."""
  experts = config.experts

  def visited(entry: TensorEntry) -> float:
    if entry.over_experts:
      return experts.top_k
    # All experts in one tensor.
    return experts.top_k / experts.num_experts if entry.path[1:2] == ("mlp",) and len(entry.piece) == 3 else 1

  return round(sum(visited(entry) * math.prod(entry.piece) for entry in entries(config)))
