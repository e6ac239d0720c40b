"""The shape of a decoder, and the presets by name."""

import difflib
from typing import NamedTuple


class ModelConfig(NamedTuple):
  """Sizes and options of one decoder.

  Attributes:
    vocab_size: rows of the embedding (V).
    num_layers: transformer blocks (L).
    d_model: width of the residual stream (D).
    num_heads: query heads (H).
    num_kv_heads: key-value heads (K), shared by H / K query heads each.
    head_dim: width of a head (C).
    d_ff: width of the SwiGLU hidden layer (F).
    rope_theta: base of the rotary frequencies.
    norm_eps: epsilon of every RMSNorm.
    qk_norm: RMSNorm on queries and keys before the rotation (Qwen3).
    qkv_bias: biases on the query, key and value projections (Qwen2).
    tie_embeddings: the output head is the embedding transposed.
    dtype: of activations and matrix products; weights, norms, softmax and logits are float32.
    remat: recompute each block's activations in the backward pass.
  """

  vocab_size: int
  num_layers: int
  d_model: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int
  rope_theta: float = 1e4
  norm_eps: float = 1e-6
  qk_norm: bool = False
  qkv_bias: bool = False
  tie_embeddings: bool = True
  dtype: str = "float32"
  remat: bool = False


PRESETS = {
  # 0.8M parameters at a byte vocabulary: learns the laptop job in minutes on two CPU cores.
  "tiny": ModelConfig(
    vocab_size=264, num_layers=4, d_model=128, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=384, qk_norm=True
  ),
  # For tests of plumbing: compiles and runs in no time, learns nothing worth having.
  "nano": ModelConfig(
    vocab_size=264, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, qk_norm=True
  ),
}

DTYPES = ("float32", "bfloat16")


def preset(name: str, *, vocab_size: int, dtype: str = "float32", remat: bool = False) -> ModelConfig:
  """A preset by name, for a tokenizer of `vocab_size` ids.

  Raises:
    ValueError: unknown name or dtype.

  Example:
    >>> preset("tiny", vocab_size=264).num_layers
    4
  """
  if name not in PRESETS:
    near = difflib.get_close_matches(str(name), PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"model.preset: unknown preset {name!r}, expected one of {', '.join(PRESETS)}{hint}")
  if dtype not in DTYPES:
    raise ValueError(f"model.dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
  return PRESETS[name]._replace(vocab_size=vocab_size, dtype=dtype, remat=remat)
