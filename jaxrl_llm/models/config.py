"""The config of a decoder of any family.

`presets`, `files.families` and `files.gguf` produce it, and every layer reads it.
"""

from typing import NamedTuple

from jaxrl_llm.pretrained.pictures import PictureConfig

DTYPES = ("float32", "bfloat16")


class RopeScaling(NamedTuple):
  """Llama 3's scaling of slow rotary frequencies, which extends the context of a trained model.

  Attributes:
    factor: Divisor of the frequencies of long wavelength.
    low_freq_factor: Lower bound of the transition. Frequencies with wavelengths above
      `original_max_positions` / `low_freq_factor` are divided in full.
    high_freq_factor: Upper bound of the transition. Frequencies with wavelengths below
      `original_max_positions` / `high_freq_factor` stay; between the bounds the division fades in.
    original_max_positions: Context length of the original training, in tokens.

  References:
    The Llama 3 herd of models, arXiv:2407.21783, 2024.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


class Linear(NamedTuple):
  """A scaling that divides all rotary frequencies by `factor`.

  References:
    Extending context window of large language models via positional interpolation,
    arXiv:2306.15595, 2023.
  """

  factor: float


class Yarn(NamedTuple):
  """YaRN's scaling of slow rotary frequencies, with longer queries and keys.

  Attributes:
    factor: Divisor of the frequencies that turn too rarely in the original context.
    original_max_positions: Context length of the original training, in tokens.
    attention_factor: Factor of all sines and cosines.
    beta_fast: Number of turns in the original context above which a frequency stays.
    beta_slow: Number of turns below which it is divided in full; the division fades in between.
    truncate: Whether the two bounds are rounded to whole frequencies.

  References:
    YaRN: Efficient context window extension of large language models, arXiv:2309.00071, 2023.
  """

  factor: float
  original_max_positions: int
  attention_factor: float
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True


class SlidingWindow(NamedTuple):
  """Layers in which a token sees only the last tokens of its sequence.

  Attributes:
    size: Number of tokens that a token sees, itself included.
    layers: Indices of these layers, from 0.
    rope_theta: Base of the rotary frequencies of these layers, which are not scaled; None if they
      rotate as the others do.

  References:
    Longformer, arXiv:2004.05150, 2020.
  """

  size: int
  layers: tuple[int, ...]
  rope_theta: float | None = None


class Experts(NamedTuple):
  """A mixture of experts in place of the feed-forward layer.

  Attributes:
    num_experts: Number of experts per layer (E).
    top_k: Number of experts that a token visits (K).
    d_ff: Width of the hidden layer of one expert.
    norm_top_k: Whether the gates of the visited experts sum to 1. Otherwise they are probabilities
      over all experts.
    layers: Indices of the layers with experts, from 0. The others keep a dense feed-forward layer.
      None is all layers.

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
    rank: Inner width of an adapter.
    alpha: Numerator of an adapter's scale, alpha / rank.
    targets: Regular expressions. A linear map gets an adapter if one of them matches its whole
      path, such as `attention/q` or `mlp/down`.

  References:
    LoRA: Low-rank adaptation of large language models, arXiv:2106.09685, 2021.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = ("attention/.*", "mlp/.*")


class Vision(NamedTuple):
  """A vision tower, which turns pictures into features at the slots of image tokens.

  Attributes:
    num_layers: Number of transformer blocks of the tower.
    d_model: Width of the tower.
    num_heads: Number of heads of the tower.
    d_ff: Width of the hidden layer of a block of the tower.
    deep_layers: Layers of the tower whose outputs also become features, from 0. Those of entry i
      are added behind layer i of the decoder (DeepStack).
    pictures: Settings with which pictures become patches.
    grid_side: Edge of the square of learned positions, which is stretched over each picture.
    rope_sections: Numbers of the decoder's rotary frequencies for time, height and width.
    image_token: Id of the image token.
    video_token: Id of the video token, which no prompt may contain.
    start_token: Id of the token before a picture.
    end_token: Id of the token behind a picture.

  References:
    Qwen3-VL technical report, arXiv:2511.21631, 2025; DeepStack, arXiv:2406.04334, 2024.
  """

  num_layers: int
  d_model: int
  num_heads: int
  d_ff: int
  deep_layers: tuple[int, ...] = (8, 16, 24)
  pictures: PictureConfig = PictureConfig()
  grid_side: int = 48
  rope_sections: tuple[int, int, int] = (24, 20, 20)
  image_token: int = 151655
  video_token: int = 151656
  start_token: int = 151652
  end_token: int = 151653

  @property
  def patch_width(self) -> int:
    """The number of values of a patch: its channels, frames and pixels."""
    return 3 * self.pictures.temporal_patch_size * self.pictures.patch_size**2

  @property
  def merge_size(self) -> int:
    """The edge in patches of the square that one image token stands for."""
    return self.pictures.merge_size


class ModelConfig(NamedTuple):
  """Sizes and options of one decoder.

  Attributes:
    vocab_size: Number of rows of the embedding (V).
    num_layers: Number of transformer blocks (L).
    d_model: Width of the residual stream (D).
    num_heads: Number of query heads (H).
    num_kv_heads: Number of key-value heads (K), each shared by H / K query heads.
    head_dim: Width of a head (C).
    d_ff: Width of the hidden layer (F) of a gated feed-forward layer.
    rope_theta: Base of the rotary frequencies.
    norm_eps: Epsilon of every RMSNorm.
    qk_norm: Whether queries and keys pass an RMSNorm before the rotation (Qwen3).
    qk_norm_joint: Whether that norm is over all heads together (OLMo 2), not over each.
    qkv_bias: Whether the query, key and value projections have biases (Qwen2).
    query_width: Number whose inverse root scales the scores of attention; None for a head's width.
    norms: Places of the RMSNorms: "before" attention and feed-forward layer, "after" them, where
      their outputs are added (OLMo 2), or "both" (Gemma 3).
    centred_norms: Whether norms multiply by 1 plus their weight (Gemma).
    activation: Function of the feed-forward layer's gate, a key of `linear.GATED`.
    scale_embeddings: Whether embeddings are multiplied by √D (Gemma).
    window: Layers with a sliding window; None if all tokens see all before them.
    tie_embeddings: Whether the output head is the transposed embedding.
    dtype: Dtype of activations and matrix products. Norms, router, softmax and logits are float32.
    remat: Rematerialisation policy of the backward pass, a key of `remat.POLICIES`.
    param_dtype: Dtype in which weights are stored and trained.
    max_positions: Longest sequence that the model is meant for, in tokens; None if not stated.
    rope_scaling: Scaling of rotary frequencies; None if not scaled.
    experts: Mixture of experts; None for a dense model.
    lora: Low-rank adapters; None if there are none.
    attention: Attention backend, a key of `attention.BACKENDS`, or "auto" for the platform's.
    decode_attention: Attention of a decoding step: "xla", which reads all columns of the cache,
      "ragged", the kernel for TPUs or GPUs that reads the tokens that rows hold (CPUs emulate it),
      or "auto" for the kernel on TPUs.
    exact: Whether all programs add in one order, on CPUs, so that a sampler's log-probabilities are
      the learner's to the last bit.
    decode_weights: Format of the weights of linear maps in a decoding step, one of
      `quantized.FORMATS`; None keeps them in `dtype`.
    head_tokens: Number of tokens per device whose logits exist at a time; None for the default of
      the platform.
    vision: Vision tower in front of the decoder; None for a language model.
    train_tower: Whether the tower is trained too. Otherwise its features are computed once.
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
  qk_norm_joint: bool = False
  qkv_bias: bool = False
  query_width: float | None = None
  norms: str = "before"
  centred_norms: bool = False
  activation: str = "silu"
  scale_embeddings: bool = False
  window: SlidingWindow | None = None
  tie_embeddings: bool = True
  dtype: str = "float32"
  remat: str = "none"
  param_dtype: str = "float32"
  max_positions: int | None = None
  rope_scaling: RopeScaling | Linear | Yarn | None = None
  experts: Experts | None = None
  lora: Lora | None = None
  attention: str = "auto"
  decode_attention: str = "auto"
  decode_weights: str | None = None
  exact: bool = False
  head_tokens: int | None = None
  vision: Vision | None = None
  train_tower: bool = False

  def window_of(self, layer: int) -> int | None:
    """Returns the size of a layer's sliding window; None without one."""
    return self.window.size if self.window is not None and layer in self.window.layers else None

  @property
  def sparse_layers(self) -> tuple[int, ...]:
    """The indices of the layers with experts, in ascending order."""
    if self.experts is None:
      return ()
    return tuple(range(self.num_layers)) if self.experts.layers is None else tuple(sorted(self.experts.layers))

  @property
  def dense_layers(self) -> tuple[int, ...]:
    """The indices of the layers with a dense feed-forward layer, in ascending order."""
    sparse = set(self.sparse_layers)
    return tuple(layer for layer in range(self.num_layers) if layer not in sparse)
