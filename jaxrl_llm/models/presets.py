"""Model configs by name: small ones for laptops and tests, and published sizes.

The published sizes are those of the families that `load` can read.
"""

from jaxrl_llm.messages import Problem, did_you_mean
from jaxrl_llm.models.config import DTYPES, Experts, ModelConfig, RopeScaling, SlidingWindow, Vision, Yarn
from jaxrl_llm.pretrained.pictures import PictureConfig


def _qwen2(num_layers, d_model, num_heads, num_kv_heads, d_ff, *, head_dim=128, norm_eps=1e-6, max_positions=32768, tie=False):
  """Makes a Qwen2.5; the untied sizes have the larger vocabulary."""
  sizes = (151936 if tie else 152064, num_layers, d_model, num_heads, num_kv_heads, head_dim, d_ff)
  return ModelConfig(*sizes, rope_theta=1e6, norm_eps=norm_eps, qkv_bias=True, tie_embeddings=tie, max_positions=max_positions)


def _qwen3(num_layers, d_model, num_heads, num_kv_heads, d_ff, *, tie=False, experts=None):
  """Makes a Qwen3, dense or with experts in every layer."""
  sizes = (151936, num_layers, d_model, num_heads, num_kv_heads, 128, d_ff)
  return ModelConfig(*sizes, rope_theta=1e6, qk_norm=True, tie_embeddings=tie, max_positions=40960, experts=experts)


def _qwen3_vl(text: ModelConfig, *, is_small: bool = False):
  """Makes a Qwen3-VL: a Qwen3 behind the smaller or the larger of two towers."""
  tower = Vision(24, 1024, 16, 4096, deep_layers=(5, 11, 17)) if is_small else Vision(27, 1152, 16, 4304)
  return text._replace(rope_theta=5e6, max_positions=262144, vision=tower)


def _llama3(num_layers, d_model, num_heads, d_ff, *, head_dim=128, factor=8.0, tie=False):
  """Makes a Llama 3.1 or later, with the context extended to 128k tokens."""
  sizes, scaling = (128256, num_layers, d_model, num_heads, 8, head_dim, d_ff), RopeScaling(factor, 1.0, 4.0, 8192)
  return ModelConfig(*sizes, rope_theta=5e5, norm_eps=1e-5, tie_embeddings=tie, max_positions=131072, rope_scaling=scaling)


def _smollm2(num_layers, d_model, num_heads, num_kv_heads, d_ff, *, rope_theta=1e5):
  """Makes a SmolLM2, a Llama with tied embeddings."""
  sizes = (49152, num_layers, d_model, num_heads, num_kv_heads, 64, d_ff)
  return ModelConfig(*sizes, rope_theta=rope_theta, norm_eps=1e-5, tie_embeddings=True, max_positions=8192)


def _gemma3(num_layers, d_model, num_heads, num_kv_heads, d_ff):
  """Makes a Gemma 3 without a vision tower: every sixth layer sees all tokens, the others 512."""
  sizes = (262144, num_layers, d_model, num_heads, num_kv_heads, 256, d_ff)
  return _as_gemma3(ModelConfig(*sizes, rope_theta=1e6, max_positions=32768), SlidingWindow(512, _but_every(6, num_layers), 1e4))


def _as_gemma3(sizes: ModelConfig, window: SlidingWindow) -> ModelConfig:
  options = dict(norms="both", centred_norms=True, scale_embeddings=True, activation="gelu_tanh", query_width=256)
  return sizes._replace(qk_norm=True, window=window, **options)


def _olmo3(num_layers, d_model, num_heads, num_kv_heads, d_ff):
  """Makes an OLMo 3 with the context extended to 64k tokens in every fourth layer."""
  sizes, window = (100278, num_layers, d_model, num_heads, num_kv_heads, 128, d_ff), _but_every(4, num_layers)
  return ModelConfig(
    *sizes, rope_theta=5e5, qk_norm=True, qk_norm_joint=True, norms="after", tie_embeddings=False, max_positions=65536,
    rope_scaling=Yarn(8.0, 8192, 1.2079441541679836), window=SlidingWindow(4096, window, 5e5),
  )  # fmt: skip


def _but_every(period: int, num_layers: int) -> tuple[int, ...]:
  return tuple(layer for layer in range(num_layers) if (layer + 1) % period)


# Small models of this project, not published; their vocabulary is the tokenizer's.
LOCAL = ("tiny", "nano", "tiny-moe", "nano-moe", "tiny-vl", "nano-vl", "tiny-window", "nano-window")

# 0.8M parameters with a byte vocabulary: learns the laptop job in minutes on two CPU cores.
_TINY = ModelConfig(vocab_size=264, num_layers=4, d_model=128, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=384, qk_norm=True)
# For tests of the plumbing: compiles and runs in no time, but learns nothing useful.
_NANO = ModelConfig(vocab_size=264, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, qk_norm=True)

def _with_tower(config: ModelConfig, tower: Vision) -> ModelConfig:
  """Puts a small tower, for small drawings, in front of a decoder with a byte vocabulary.

  White pixels become 0. With the usual mean of 0.5, all patches are nearly alike: white paper adds
  the same large vector to each, and random towers take hundreds of updates to see past it.
  """
  quarter = config.head_dim // 8
  sections = (config.head_dim // 2 - 2 * quarter, quarter, quarter)
  tokens = dict(image_token=259, video_token=260, start_token=261, end_token=262)
  pictures = PictureConfig(patch_size=8, min_pixels=256, max_pixels=4096, image_mean=(1.0,) * 3, image_std=(0.25,) * 3)
  return config._replace(vision=tower._replace(pictures=pictures, grid_side=8, rope_sections=sections, **tokens))


# Published sizes have the values of the base checkpoint's config.json. For Qwen2.5 of 14b and more,
# the instruct checkpoints differ: norm_eps 1e-6, and a context of 32,768 tokens. `load` always uses
# the values in the checkpoint's own file.
PRESETS = {
  "tiny": _TINY,
  "nano": _NANO,
  # As many active weights per token as in "tiny", and four times as many in the experts.
  "tiny-moe": _TINY._replace(experts=Experts(8, 2, 192)),
  "nano-moe": _NANO._replace(experts=Experts(8, 2, 32)),
  "tiny-vl": _with_tower(_TINY._replace(num_layers=2), Vision(2, 96, 4, 192, deep_layers=(0,))),
  "nano-vl": _with_tower(_NANO, Vision(2, 32, 2, 64, deep_layers=(0,))),
  # Gemma 3's blocks, with windows shorter than the prompts of the laptop job.
  "tiny-window": _as_gemma3(_TINY, SlidingWindow(8, (0, 1, 2), 1e3))._replace(query_width=32),
  "nano-window": _as_gemma3(_NANO, SlidingWindow(5, (0,), 1e2))._replace(query_width=12),
  "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, head_dim=64, tie=True),
  "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, max_positions=131072, tie=True),
  "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, tie=True),
  "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, max_positions=131072),
  "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, norm_eps=1e-5, max_positions=131072),
  "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648, norm_eps=1e-5, max_positions=131072),
  "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, norm_eps=1e-5, max_positions=131072),
  "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tie=True),
  "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tie=True),
  "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tie=True),
  "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
  "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
  "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
  "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 6144, experts=Experts(num_experts=128, top_k=8, d_ff=768)),
  "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 12288, experts=Experts(num_experts=128, top_k=8, d_ff=1536)),
  "qwen3-vl-2b": _qwen3_vl(_qwen3(28, 2048, 16, 8, 6144, tie=True), is_small=True),
  "qwen3-vl-4b": _qwen3_vl(_qwen3(36, 2560, 32, 8, 9728, tie=True), is_small=True),
  "qwen3-vl-8b": _qwen3_vl(_qwen3(36, 4096, 32, 8, 12288)),
  "qwen3-vl-32b": _qwen3_vl(_qwen3(64, 5120, 64, 8, 25600)),
  "qwen3-vl-30b-a3b": _qwen3_vl(_qwen3(48, 2048, 32, 4, 6144, experts=Experts(num_experts=128, top_k=8, d_ff=768))),
  "qwen3-vl-235b-a22b": _qwen3_vl(_qwen3(94, 4096, 64, 4, 12288, experts=Experts(num_experts=128, top_k=8, d_ff=1536))),
  "llama3.1-8b": _llama3(32, 4096, 32, 14336),
  "llama3.1-70b": _llama3(80, 8192, 64, 28672),
  "llama3.2-1b": _llama3(16, 2048, 32, 8192, head_dim=64, factor=32.0, tie=True),
  "llama3.2-3b": _llama3(28, 3072, 24, 8192, factor=32.0, tie=True),
  "llama3.3-70b": _llama3(80, 8192, 64, 28672),
  "smollm2-135m": _smollm2(30, 576, 9, 3, 1536),
  "smollm2-360m": _smollm2(32, 960, 15, 5, 2560),
  "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, rope_theta=130000.0),
  "gemma3-270m": _gemma3(18, 640, 4, 1, 2048),
  "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912),
  "olmo3-7b": _olmo3(32, 4096, 32, 32, 11008),
  "olmo3-32b": _olmo3(64, 5120, 40, 8, 27648),
}


def preset(name: str, *, vocab_size: int | None = None, dtype: str = "float32", remat: str = "none") -> ModelConfig:
  """Returns a preset by name, for a tokenizer of `vocab_size` ids.

  Args:
    name: Key of `PRESETS`.
    vocab_size: Number of ids of the tokenizer. Published sizes do not need it: they keep the rows
      of their embedding, which may be more.
    dtype: Dtype of activations; see `ModelConfig`.
    remat: Rematerialisation policy; see `ModelConfig`.

  Raises:
    ValueError: If the name or dtype is unknown, or the vocabulary is missing or does not fit.

  Example:
    >>> preset("tiny", vocab_size=264).num_layers
    4
    >>> preset("qwen3-0.6b", vocab_size=151669).vocab_size
    151936
  """
  if name not in PRESETS:
    hint = did_you_mean(str(name).lower(), PRESETS)
    # Too many for a line: of published models, one of each family.
    families = {model.rstrip("0123456789.abm").removesuffix("-"): model for model in reversed(PRESETS) if model not in LOCAL}
    expected = f"one of {', '.join(LOCAL)}, or as {', '.join(reversed(families.values()))}"
    raise ValueError(Problem("model.preset", repr(name), f"{expected}{hint}"))
  if dtype not in DTYPES:
    raise ValueError(Problem("model.dtype", repr(dtype), f"one of {', '.join(DTYPES)}"))
  config = PRESETS[name]._replace(dtype=dtype, remat=remat)
  if name in LOCAL:
    if vocab_size is None:
      raise ValueError(
        f"model.preset: {name!r} has no vocabulary of its own, expected the tokenizer's vocab_size as an argument"
      )
    return config._replace(vocab_size=vocab_size)
  if vocab_size is not None and vocab_size > config.vocab_size:
    raise ValueError(
      f"model.preset: the tokenizer has {vocab_size} ids, but the embedding of {name!r} has {config.vocab_size} rows; "
      "choose the tokenizer of this model"
    )
  return config
