"""The shape of a decoder, whatever its family: what `presets`, `files.families` and `files.gguf` produce and every layer reads."""

from typing import NamedTuple

DTYPES = ("float32", "bfloat16")


class RopeScaling(NamedTuple):
  """Llama 3's stretching of the slow rotary frequencies, by which a model reads beyond the context it was first trained on.

  Attributes:
    factor: by which frequencies of long wavelength are divided.
    low_freq_factor: wavelengths above `original_max_positions` / this are divided in full.
    high_freq_factor: wavelengths below `original_max_positions` / this stay; between the two the division fades in.
    original_max_positions: context of the first training, in tokens.

  References:
    The Llama 3 herd of models, arXiv:2407.21783, 2024.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


class Experts(NamedTuple):
  """A mixture of experts in the place of the feed-forward layer.

  Attributes:
    num_experts: experts of a layer (E).
    top_k: experts that a token visits (K).
    d_ff: width of the hidden layer of one expert.
    norm_top_k: the gates of the visited experts sum to 1; otherwise they are probabilities over all experts.
    layers: which layers have experts, counted from 0; the others keep their dense feed-forward layer. None is all layers.

  References:
    Qwen3 technical report, arXiv:2505.09388, 2025.
  """

  num_experts: int
  top_k: int
  d_ff: int
  norm_top_k: bool = True
  layers: tuple[int, ...] | None = None


class Lora(NamedTuple):
  """Low-rank adapters beside frozen linear maps: y = x·W + (alpha / rank)·(x·A)·B.

  Attributes:
    rank: inner width of an adapter.
    alpha: an adapter counts alpha / rank.
    targets: regular expressions; a linear map whose path (such as `attention/q` or `mlp/down`) matches one of them whole gets an adapter.

  References:
    LoRA: Low-rank adaptation of large language models, arXiv:2106.09685, 2021.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = ("attention/.*", "mlp/.*")


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
    dtype: of activations and matrix products; norms, router, softmax and logits are float32.
    remat: what the backward pass keeps of each block: key of `remat.POLICIES`.
    param_dtype: of the weights as they are held and trained.
    max_positions: longest sequence that the model is meant for, in tokens; None where nobody says.
    rope_scaling: Llama 3's; None is none.
    experts: None is a dense model.
    lora: adapters; None is none.
    attention: key of `attention.BACKENDS`, or "auto" for what suits the platform.
    head_tokens: tokens whose logits exist at a time on a device; None is what suits the platform.
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
  remat: str = "none"
  param_dtype: str = "float32"
  max_positions: int | None = None
  rope_scaling: RopeScaling | None = None
  experts: Experts | None = None
  lora: Lora | None = None
  attention: str = "auto"
  head_tokens: int | None = None

  @property
  def sparse_layers(self) -> tuple[int, ...]:
    """Layers that have experts, in rising order."""
    if self.experts is None:
      return ()
    return tuple(range(self.num_layers)) if self.experts.layers is None else tuple(sorted(self.experts.layers))

  @property
  def dense_layers(self) -> tuple[int, ...]:
    """Layers that have a dense feed-forward layer, in rising order."""
    sparse = set(self.sparse_layers)
    return tuple(layer for layer in range(self.num_layers) if layer not in sparse)
