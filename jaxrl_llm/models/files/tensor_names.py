"""The table from tensors of a transformers checkpoint to arrays of the params, and back."""

import math
from typing import Any, NamedTuple

from jaxrl_llm.models.config import ModelConfig


class Entry(NamedTuple):
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
    over_experts: Whether the array has an axis of experts after the axis of layers.
  """

  path: tuple[str, ...]
  layer: int | None
  names: tuple[str, ...]
  shape: tuple[int, ...]
  split: tuple[int, ...]
  order: tuple[int, ...]
  over_experts: bool = False


# Tensors that some exporters store although they follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
TIED_HEAD = "lm_head.weight"


def _attention_rows(config: ModelConfig) -> list[tuple]:
  """Lists the tensors of attention and norms of a block.

  Each row is the path in the block, the name and shape in transformers, the shape with heads, and
  the order of the axes.
  """
  d, c = config.d_model, config.head_dim
  rows = [
    ("attention_norm/scale", "input_layernorm.weight", (d,), (d,), (0,)),
    ("mlp_norm/scale", "post_attention_layernorm.weight", (d,), (d,), (0,)),
    ("attention/o", "self_attn.o_proj.weight", (d, config.num_heads * c), (d, config.num_heads, c), (1, 2, 0)),
  ]
  for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
    rows.append((f"attention/{part}", f"self_attn.{part}_proj.weight", (heads * c, d), (heads, c, d), (2, 0, 1)))
    if config.qkv_bias:
      rows.append((f"attention/{part}_bias", f"self_attn.{part}_proj.bias", (heads * c,), (heads, c), (0, 1)))
    if config.qk_norm and part != "v":
      rows.append((f"attention/{part}_norm/scale", f"self_attn.{part}_norm.weight", (c,), (c,), (0,)))
  return rows


def _mlp_rows(config: ModelConfig, sparse: bool) -> list[tuple]:
  """Lists the tensors of the MLP of a block, as in `_attention_rows`.

  `*` in a name stands for the expert.
  """
  d = config.d_model
  width = config.experts.d_ff if sparse else config.d_ff
  prefix = "mlp.experts.*." if sparse else "mlp."
  shapes = {"gate": (width, d), "up": (width, d), "down": (d, width)}
  rows = [(f"mlp/{part}", f"{prefix}{part}_proj.weight", shape, shape, (1, 0)) for part, shape in shapes.items()]
  if sparse:
    shape = (config.experts.num_experts, d)
    rows.append(("mlp/router", "mlp.gate.weight", shape, shape, (1, 0)))
  return rows


def entries(config: ModelConfig) -> list[Entry]:
  """Makes the table of a model in the order of a checkpoint's files.

  The order is the embedding, layer after layer, the final norm, and the head.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> table = entries(preset("nano", vocab_size=264))
    >>> table[3].names, table[3].path, table[3].layer
    (('model.layers.0.self_attn.o_proj.weight',), ('layers', 'attention', 'o'), 0)
  """
  v, d = config.vocab_size, config.d_model
  table = [Entry(("embedding",), None, ("model.embed_tokens.weight",), (v, d), (v, d), (0, 1))]
  sparse_layers, dense_layers = config.sparse_layers, config.dense_layers
  for layer in range(config.num_layers):
    sparse = layer in sparse_layers
    stack, index = ("sparse_layers", sparse_layers.index(layer)) if sparse else ("layers", dense_layers.index(layer))
    for path, name, *shapes_and_order in _attention_rows(config) + _mlp_rows(config, sparse):
      name = f"model.layers.{layer}.{name}"
      over_experts = "*" in name
      names = tuple(name.replace("*", str(e)) for e in range(config.experts.num_experts)) if over_experts else (name,)
      table.append(Entry((stack, *path.split("/")), index, names, *shapes_and_order, over_experts))
  table.append(Entry(("final_norm", "scale"), None, ("model.norm.weight",), (d,), (d,), (0,)))
  if not config.tie_embeddings:
    table.append(Entry(("head",), None, (TIED_HEAD,), (v, d), (v, d), (1, 0)))
  return table


def to_params_layout(entry: Entry, tensor: Any) -> Any:
  """Brings a tensor of transformers into the layout of the params.

  Args:
    entry: Entry of the tensor.
    tensor: Tensor, or for experts a stack of tensors along a leading axis. NumPy or JAX.

  Returns:
    A view of the tensor.
  """
  if not entry.over_experts:
    return tensor.reshape(entry.split).transpose(entry.order)
  order = (0, *(axis + 1 for axis in entry.order))
  return tensor.reshape(-1, *entry.split).transpose(order)


def to_hf_layout(entry: Entry, array: Any) -> Any:
  """Inverts `to_params_layout` for one tensor, without the axis of experts."""
  inverse = sorted(range(len(entry.order)), key=entry.order.__getitem__)
  return array.transpose(inverse).reshape(entry.shape)


def num_params(config: ModelConfig) -> int:
  """Counts the weights of a model without adapters.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> num_params(preset("qwen3-0.6b"))
    596049920
  """
  return sum(len(entry.names) * math.prod(entry.shape) for entry in entries(config))


def num_active_params(config: ModelConfig) -> int:
  """Counts the weights that take part in one token, which visits only some of the experts."""
  visited = lambda entry: config.experts.top_k if entry.over_experts else 1
  return sum(visited(entry) * math.prod(entry.shape) for entry in entries(config))
