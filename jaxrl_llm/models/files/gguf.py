"""GGUF checkpoints of llama.cpp, under the tensor names, shapes and row order of Hugging Face.

The code after this module therefore need not know from which format a tensor comes.
"""

import math
import os
import re
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.models.config import Experts, ModelConfig, RopeScaling
from jaxrl_llm.models.files.tensor_source import TensorSource
from jaxrl_llm.pretrained.gguf_header import Header, TensorInfo, read_header

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")

_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Published quantizations that `gguf.quants.dequantize` supports.
_QUANTIZED = (
  "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "MXFP4"
)  # fmt: skip

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
  "ffn_gate_inp": "mlp.gate",
}
_PER_EXPERT = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FREQS = "rope_freqs.weight"
# The settings of every Llama 3.1, 3.2 and 3.3. The file does not hold these numbers, but only the
# divisors that follow from them.
_LLAMA3_SCALING = RopeScaling(factor=math.nan, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


class _Slot(NamedTuple):
  """The place of one of Hugging Face's tensors in the file.

  It is a whole tensor of the file, or one expert's part of a fused tensor.

  Attributes:
    tensor: Tensor of the file.
    kind: Type of its elements, such as "F32" or "Q4_1".
    shape: Shape under Hugging Face's name.
    heads: Number of heads within which rows are interleaved; 0 is no interleaving.
    expert: Index of the expert in a fused tensor.
  """

  tensor: TensorInfo
  kind: str
  shape: tuple[int, ...]
  heads: int = 0
  expert: int = 0


def open_gguf(path: str | os.PathLike) -> tuple[ModelConfig, TensorSource]:
  """Reads the header of a GGUF file, whose tensors are read and dequantized one by one on request.

  Args:
    path: Path of a `.gguf` file of one of `ARCHITECTURES`.

  Returns:
    The model's sizes and options, and the tensors under Hugging Face's names. Fused experts appear
    as one tensor per expert. For the architecture `llama`, whose rows of queries and keys llama.cpp
    interleaves, the rows are back in half-split order.

  Raises:
    ValueError: If the file is not a whole GGUF file, or an architecture, option, tensor or
      quantization is not supported. The message has one line, and no tensor has been read.
    MissingPackageError: If the package gguf is not installed.
  """
  header = read_header(path)
  types, block_sizes = _ggml_types()
  architecture = header.metadata.get("general.architecture")
  if architecture not in ARCHITECTURES:
    raise ValueError(f"{header.path}: general.architecture is {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
  kinds = _checked_kinds(header, types, block_sizes)
  config = _config(header, _rope_divisors(header, kinds))
  slots = {}
  for name, tensor in header.tensors.items():
    if name != _ROPE_FREQS:
      slots |= _slots_of(header, config, architecture, name, tensor, kinds[name])
  source = TensorSource(
    path=header.path,
    shapes={name: slot.shape for name, slot in slots.items()},
    dtypes={name: _PLAIN[slot.kind].name if slot.kind in _PLAIN else slot.kind for name, slot in slots.items()},
    read=lambda name: _read(header, slots[name], block_sizes),
    files=dict.fromkeys(slots, header.path.name),
  )
  return config, source


def _ggml_types() -> tuple[dict[int, str], dict[str, tuple[int, int]]]:
  """Returns the names of ggml's types by number, and by name the elements and bytes of a block."""
  try:
    import gguf
  except ImportError as error:
    raise MissingPackageError("GGUF checkpoints need the package gguf: pip install 'jaxrl-llm[hf]'") from error
  return {kind.value: kind.name for kind in gguf.GGMLQuantizationType}, {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}


def _checked_kinds(header: Header, types: dict[int, str], block_sizes: dict[str, tuple[int, int]]) -> dict[str, str]:
  """Returns the type of each tensor, after a check that it is supported and lies in the file."""
  kinds = {}
  for name, tensor in header.tensors.items():
    kind = types.get(tensor.ggml_type, f"number {tensor.ggml_type}")
    if kind not in _PLAIN and kind not in _QUANTIZED:
      raise ValueError(
        f"{header.path}: {name} is of type {kind}, expected one of {', '.join((*_PLAIN, *_QUANTIZED))}; "
        "load another quantization of the model"
      )
    block, num_bytes = block_sizes[kind]
    if not tensor.shape or tensor.shape[-1] % block:
      raise ValueError(f"{header.path}: {name} has shape {tensor.shape}, but {kind} comes in rows of {block}; the file is damaged")
    if tensor.offset + math.prod(tensor.shape) // block * num_bytes > header.num_bytes:
      raise ValueError(f"{header.path}: ends after {header.num_bytes:,} bytes, inside {name}; copy or download it again")
    kinds[name] = kind
  return kinds


def _get(header: Header, key: str, default: Any = None) -> Any:
  """Returns a metadata entry of the architecture.

  Without a default it is an entry that the model's shape needs, so that it must be present.
  """
  key = f"{header.metadata['general.architecture']}.{key}"
  value = header.metadata.get(key, default)
  if isinstance(value, list):  # One value per layer.
    if len(set(value)) != 1:
      raise ValueError(f"{header.path}: {key} differs from layer to layer, which is not supported")
    value = value[0]
  if value is None:
    raise ValueError(f"{header.path}: has no {key}, which the model's shape needs; the file is damaged or incomplete")
  return value


def _config(header: Header, divisors: np.ndarray | None) -> ModelConfig:
  """Reads the model's sizes and options from the metadata and the names of the tensors."""
  if "token_embd.weight" not in header.tensors:
    raise ValueError(f"{header.path}: has no token_embd.weight; expected a whole language model, not an adapter or a projector")
  d_model, num_heads = _get(header, "embedding_length"), _get(header, "attention.head_count")
  head_dim = _get(header, "attention.key_length", d_model // num_heads)
  must_be = {
    "attention.value_length": head_dim,
    "rope.dimension_count": head_dim,
    "rope.scaling.type": "none",
    "attention.sliding_window": 0,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
  }
  for key, expected in must_be.items():
    if (value := _get(header, key, expected)) != expected:
      architecture = header.metadata["general.architecture"]
      raise ValueError(
        f"{header.path}: {architecture}.{key} is {value!r}, expected {expected!r}; this option is not supported"
      )
  experts = _experts(header)
  theta = _shortest(_get(header, "rope.freq_base", 1e4))
  return ModelConfig(
    vocab_size=header.tensors["token_embd.weight"].shape[0],
    num_layers=_get(header, "block_count"),
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=_get(header, "attention.head_count_kv", num_heads),
    head_dim=head_dim,
    d_ff=_get(header, "feed_forward_length", 0 if experts else None),
    rope_theta=theta,
    norm_eps=_shortest(_get(header, "attention.layer_norm_rms_epsilon")),
    qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
    qkv_bias="blk.0.attn_q.bias" in header.tensors,
    tie_embeddings="output.weight" not in header.tensors,
    max_positions=_get(header, "context_length", 0) or None,
    rope_scaling=None if divisors is None else _llama3_scaling(header, divisors, theta=theta, head_dim=head_dim),
    experts=experts,
  )


def _experts(header: Header) -> Experts | None:
  """Reads the mixture of experts, if the model has one."""
  architecture, num_experts = header.metadata["general.architecture"], _get(header, "expert_count", 0)
  if not num_experts:
    return None
  if architecture != "qwen3moe":
    raise ValueError(f"{header.path}: found {architecture} with {num_experts} experts; of mixtures of experts, only qwen3moe is supported")
  num_layers = _get(header, "block_count")
  sparse = tuple(layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors)
  return Experts(
    num_experts,
    top_k=_get(header, "expert_used_count"),
    d_ff=_get(header, "expert_feed_forward_length"),
    # A constant of llama.cpp for this architecture, and therefore often left out.
    norm_top_k=_get(header, "expert_weights_norm", True),
    layers=None if len(sparse) == num_layers else sparse,
  )


def _shortest(x: float) -> float:
  """Returns the shortest decimal of a float32, the number that was meant.

  For example, it is 1e-05 for 9.999999747378752e-06.
  """
  return float(str(np.float32(x)))


def _rope_divisors(header: Header, kinds: dict[str, str]) -> np.ndarray | None:
  """Reads the divisors of the rotary frequencies; None if the file does not have them."""
  if _ROPE_FREQS not in header.tensors:
    return None
  if kinds[_ROPE_FREQS] != "F32":
    raise ValueError(f"{header.path}: {_ROPE_FREQS} is of type {kinds[_ROPE_FREQS]}, expected F32")
  tensor = header.tensors[_ROPE_FREQS]
  return np.fromfile(header.path, np.float32, math.prod(tensor.shape), offset=tensor.offset)


def _llama3_scaling(header: Header, divisors: np.ndarray, *, theta: float, head_dim: int) -> RopeScaling | None:
  """Finds the scaling that gives the divisors of the file.

  llama.cpp stores the divisors instead of the numbers from which they follow.
  """
  if np.allclose(divisors, 1.0):
    return None
  scaling = _LLAMA3_SCALING._replace(factor=_shortest(float(divisors.max())))
  low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
  # Turns of each pair within the original context.
  turns = length * theta ** (-np.arange(head_dim // 2) / (head_dim // 2)) / (2 * math.pi)
  smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
  expected = 1 / ((1 - smooth) / scaling.factor + smooth)
  if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
    raise ValueError(
      f"{header.path}: {_ROPE_FREQS} is not Llama 3's (original context {length}, low and high frequency factors {low:g} and {high:g}), "
      "and the file does not record the actual settings; load the model's safetensors folder instead"
    )
  return scaling


def _slots_of(
  header: Header, config: ModelConfig, architecture: str, name: str, tensor: TensorInfo, kind: str
) -> dict[str, _Slot]:
  """Returns the slots of a tensor of the file by their names at Hugging Face."""
  match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
  layer, part, suffix = match.groups() if match else (None, None, None)
  if layer is None and part in _WHOLE:
    return {f"{_WHOLE[part]}.{suffix}": _Slot(tensor, kind, tensor.shape)}
  prefix = f"model.layers.{layer}"
  if layer is not None and part in _PER_EXPERT and len(tensor.shape) == 3:
    part = _PER_EXPERT[part]
    names = [f"{prefix}.mlp.experts.{expert}.{part}.{suffix}" for expert in range(tensor.shape[0])]
    return {name: _Slot(tensor, kind, tensor.shape[1:], expert=expert) for expert, name in enumerate(names)}
  if layer is not None and part in _PER_LAYER:
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part, 0) if architecture == "llama" else 0
    return {f"{prefix}.{_PER_LAYER[part]}.{suffix}": _Slot(tensor, kind, tensor.shape, heads)}
  raise ValueError(f"{header.path}: holds {name} of shape {tensor.shape}, which a {architecture} model of this framework does not have")


def _read(header: Header, slot: _Slot, block_sizes: dict[str, tuple[int, int]]) -> np.ndarray:
  """Reads and dequantizes one tensor, and nothing else of the file."""
  block, num_bytes = block_sizes[slot.kind]
  row_bytes = slot.shape[-1] // block * num_bytes
  size = math.prod(slot.shape[:-1]) * row_bytes
  raw = np.fromfile(header.path, np.uint8, size, offset=slot.tensor.offset + slot.expert * size)
  if raw.size != size:
    raise ValueError(f"{header.path}: became shorter while it was read; copy or download it again")
  if slot.kind in _PLAIN:
    values = raw.view(_PLAIN[slot.kind]).reshape(slot.shape)
  else:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(raw.reshape(*slot.shape[:-1], row_bytes), GGMLQuantizationType[slot.kind])
  return _half_split(values, slot.heads) if slot.heads else values


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
  """Undoes llama.cpp's order, in which the two rows that rotate together are neighbours.

  Within each head the even rows come first, then the odd ones.
  """
  return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
