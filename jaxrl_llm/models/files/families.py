"""The supported families of decoders, and their `config.json` in both layouts of transformers.

An option that is not implemented is refused, never ignored: a model that runs with the wrong rotary
frequencies answers fluently and wrongly.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.models.config import Experts, ModelConfig, Vision
from jaxrl_llm.models.files.json_fields import BOOL, INT, LAYERS, NUMBER, OBJECT, get
from jaxrl_llm.models.files.rotary import Windows, is_writable, read_rope, read_window, to_json
from jaxrl_llm.pretrained.pictures import PictureConfig


class Family(NamedTuple):
  """An architecture of transformers with its defaults for missing fields.

  Attributes:
    model_type: Short name in transformers.
    options: Fields of `ModelConfig` that all of its models share.
    query_width: Field of `ModelConfig.query_width`, and its default; None if the family has none.
    has_experts: Whether it is a mixture of experts.
    num_kv_heads: Default number of key-value heads; None is the number of query heads.
    head_dim: Default width of a head; None is the model's width over the number of query heads.
    max_positions: Default context length in tokens.
    rope_theta: Default base of the rotary frequencies.
    norm_eps: Default epsilon of the norms.
    tie_embeddings: Default of whether the head is the embedding.
    activation: Field of the activation, and its only value.
    refused: Fields that would change the numbers and are not implemented; false or null is fine.
    windows: Layers with sliding windows; None if the family reads no such field.
    has_tower: Whether it has a vision tower. The decoder's fields are then below `text_config`, and
      the gates of its experts always sum to 1.
  """

  model_type: str
  options: Mapping[str, Any] = MappingProxyType({})
  query_width: tuple[str, int] | None = None
  has_experts: bool = False
  num_kv_heads: int | None = 32
  head_dim: int | None = None
  max_positions: int = 32768
  rope_theta: float = 1e4
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  activation: tuple[str, str] = ("hidden_act", "silu")
  refused: tuple[str, ...] = ()
  windows: Windows | None = Windows()
  has_tower: bool = False


_SWITCHED = Windows(switch="use_sliding_window", from_layer=True, size=4096)
_QWEN3 = Family("qwen3", options=dict(qk_norm=True), head_dim=128, refused=("attention_bias",), windows=_SWITCHED)
_QWEN3_VL = _QWEN3._replace(model_type="qwen3_vl", max_positions=128000, rope_theta=5e5, windows=None, has_tower=True)
_OLMO2 = Family(
  "olmo2", options=dict(qk_norm=True, qk_norm_joint=True, norms="after"), num_kv_heads=None, max_positions=2048, norm_eps=1e-5,
  refused=("attention_bias",), windows=None,
)  # fmt: skip
_GEMMA3 = Family(
  "gemma3_text",
  options=dict(qk_norm=True, norms="both", centred_norms=True, scale_embeddings=True, activation="gelu_tanh"),
  query_width=("query_pre_attn_scalar", 256),
  num_kv_heads=4, head_dim=256, max_positions=131072, rope_theta=1e6, tie_embeddings=True,
  activation=("hidden_activation", "gelu_pytorch_tanh"),
  refused=("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
  windows=Windows(period=6, size=4096, local_theta=("rope_local_base_freq", 1e4)),
)  # fmt: skip

FAMILIES = {
  "LlamaForCausalLM": Family("llama", num_kv_heads=None, max_positions=2048, refused=("attention_bias", "mlp_bias"), windows=None),
  "Qwen2ForCausalLM": Family("qwen2", options=dict(qkv_bias=True), windows=_SWITCHED),
  "Qwen3ForCausalLM": _QWEN3,
  "Qwen3MoeForCausalLM": _QWEN3._replace(
    model_type="qwen3_moe", has_experts=True, num_kv_heads=4, head_dim=None, windows=_SWITCHED._replace(from_layer=False)
  ),
  "Qwen3VLForConditionalGeneration": _QWEN3_VL,
  "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL._replace(
    model_type="qwen3_vl_moe", has_experts=True, num_kv_heads=16, head_dim=None
  ),
  "MistralForCausalLM": Family("mistral", num_kv_heads=8, max_positions=131072, windows=Windows(size=4096)),
  "Olmo2ForCausalLM": _OLMO2,
  "Olmo3ForCausalLM": _OLMO2._replace(
    model_type="olmo3", rope_theta=5e5, windows=Windows(period=4, size=4096, local_theta=("rope_theta", 5e5))
  ),
  "Gemma3ForCausalLM": _GEMMA3,
}

# Fields of the vision tower by their names in `Vision`.
_TOWER_SIZES = {
  "num_layers": "depth",
  "d_model": "hidden_size",
  "num_heads": "num_heads",
  "d_ff": "intermediate_size",
}
_PATCH_SIZES = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}
_TOWER_FIXED = {"in_channels": 3, "hidden_act": "gelu_pytorch_tanh"}
_VISION_TOKENS = {
  "image_token": "image_token_id",
  "video_token": "video_token_id",
  "start_token": "vision_start_token_id",
  "end_token": "vision_end_token_id",
}

def _architecture(raw: dict[str, Any], where: str) -> str:
  """Returns the one architecture that the config names."""
  named = raw.get("architectures")
  if named is None:  # A config written by hand may have `model_type` alone.
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    named = [by_type.get(raw.get("model_type"), raw.get("model_type"))]
  if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
    raise ValueError(f"{where}: architectures: found {named!r}, expected a list of one of {', '.join(FAMILIES)}")
  if named[0] not in FAMILIES:
    hint = did_you_mean(named[0], FAMILIES, cutoff=0.75)
    raise ValueError(f"{where}: unknown architecture {named[0]!r}, expected one of {', '.join(FAMILIES)}{hint}")
  return named[0]


def _refuse_unimplemented(raw: dict[str, Any], family: Family, where: str) -> None:
  """Raises ValueError on every option that would change the numbers and is not implemented."""

  def refuse(field: str, expected: str):
    raise ValueError(f"{where}: {field}: found {raw[field]!r}, expected {expected}")

  field, expected = family.activation
  if raw.get(field, expected) != expected:
    refuse(field, f"{expected!r}, the only activation that is implemented")
  for field in family.refused:
    if raw.get(field):
      refuse(field, "false or null: it is not implemented")
  if raw.get("quantization_config"):
    method = raw["quantization_config"]
    method = method.get("quant_method", method) if isinstance(method, dict) else method
    raise ValueError(f"{where}: quantization_config: found {method!r}, expected none; load the checkpoint in bfloat16, or a .gguf file")
  if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
    refuse("partial_rotary_factor", "1.0: rotating a part of a head is not implemented")


def _experts(raw: dict[str, Any], family: Family, num_layers: int, where: str) -> Experts:
  """Reads the mixture of experts.

  transformers 5 calls the number of experts `num_local_experts`.
  """
  field = "num_local_experts" if raw.get("num_experts") is None and "num_local_experts" in raw else "num_experts"
  num_experts = get(raw, field, INT, where=where)
  top_k = get(raw, "num_experts_per_tok", INT, where=where)
  if top_k > num_experts:
    raise ValueError(f"{where}: num_experts_per_tok: found {top_k}, expected at most {field}={num_experts}")
  step = get(raw, "decoder_sparse_step", INT, 1, where=where)
  dense = get(raw, "mlp_only_layers", LAYERS, [], where=where)
  sparse = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
  return Experts(
    num_experts=num_experts,
    top_k=top_k,
    d_ff=get(raw, "moe_intermediate_size", INT, where=where),
    norm_top_k=family.has_tower or get(raw, "norm_topk_prob", BOOL, False, where=where),
    layers=None if len(sparse) == num_layers else sparse,
  )


def from_hf_config(raw: Any, *, where: str) -> ModelConfig:
  """Converts a `config.json` of transformers to a `ModelConfig`.

  Missing fields take transformers' defaults for the family. The sizes of the model have no default.

  Args:
    raw: Content of the file, a dict.
    where: Path of the file, for messages.

  Raises:
    ValueError: If an architecture or an option is not implemented, a field is missing, or a type is
      wrong.

  Example:
    >>> sizes = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    >>> config = from_hf_config({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, **sizes}, where="config.json")
    >>> config.head_dim, config.qkv_bias, config.rope_theta
    (16, True, 10000.0)
  """
  if not isinstance(raw, dict):
    raise ValueError(f"{where}: found {type(raw).__name__}, expected an object with architectures, hidden_size, ...")
  family, vision, tied = FAMILIES[_architecture(raw, where)], None, raw.get("tie_word_embeddings")
  if family.has_tower:
    vision = _vision(raw, where)
    raw, where = get(raw, "text_config", OBJECT, where=where), f"{where}: text_config"
    # Published checkpoints have it outside, and transformers 5 writes it to both.
    raw = raw if tied is None else {**raw, "tie_word_embeddings": tied}
  num_layers, d_model, num_heads, d_ff, vocab_size = (
    get(raw, field, INT, where=where)
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
  )
  _refuse_unimplemented(raw, family, where)
  default_kv_heads = num_heads if family.num_kv_heads is None or "num_key_value_heads" in raw else family.num_kv_heads
  num_kv_heads = get(raw, "num_key_value_heads", INT, default_kv_heads, where=where)
  if num_heads % num_kv_heads:
    raise ValueError(f"{where}: num_key_value_heads: found {num_kv_heads}, expected a divisor of num_attention_heads={num_heads}")
  head_dim = get(raw, "head_dim", INT, family.head_dim or d_model // num_heads, where=where)
  if head_dim % 2 or not head_dim:
    raise ValueError(
      f"{where}: head_dim: found {head_dim}, expected an even number: rotation pairs the two halves of a head"
    )
  max_positions = get(raw, "max_position_embeddings", INT, family.max_positions, where=where)
  rope_theta, rope_scaling, of_window = read_rope(raw, max_positions, where, theta=family.rope_theta, windows=family.windows)
  window = read_window(raw, num_layers, where, family.windows)
  if window is not None and (of_window, None) != (rope_theta, rope_scaling):
    window = window._replace(rope_theta=of_window)
  if vision is not None:
    vision = vision._replace(rope_sections=_rope_sections(raw, head_dim // 2, where))
  return ModelConfig(
    vocab_size=vocab_size,
    num_layers=num_layers,
    d_model=d_model,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    d_ff=d_ff,
    rope_theta=rope_theta,
    norm_eps=float(get(raw, "rms_norm_eps", NUMBER, family.norm_eps, where=where)),
    tie_embeddings=get(raw, "tie_word_embeddings", BOOL, family.tie_embeddings, where=where),
    max_positions=max_positions,
    rope_scaling=rope_scaling,
    window=window,
    experts=_experts(raw, family, num_layers, where) if family.has_experts else None,
    vision=vision,
    **family.options,
    query_width=family.query_width and get(raw, family.query_width[0], NUMBER, family.query_width[1], where=where),
  )


def _vision(raw: dict[str, Any], where: str) -> Vision:
  """Reads the vision tower."""
  inner, where = get(raw, "vision_config", OBJECT, where=where), f"{where}: vision_config"
  sizes = {ours: get(inner, field, INT, where=where) for ours, field in _TOWER_SIZES.items()}
  positions = get(inner, "num_position_embeddings", INT, 2304, where=where)
  side = math.isqrt(positions)
  if side * side != positions:
    raise ValueError(f"{where}: num_position_embeddings: found {positions}, expected the square of an integer")
  for field, expected in _TOWER_FIXED.items():
    if inner.get(field, expected) != expected:
      raise ValueError(f"{where}: {field}: found {inner[field]!r}, expected {expected!r}, the only value that is implemented")
  deep = tuple(get(inner, "deepstack_visual_indexes", LAYERS, [8, 16, 24], where=where))
  if list(deep) != sorted(set(deep)) or (deep and deep[-1] >= sizes["num_layers"]):
    raise ValueError(f"{where}: deepstack_visual_indexes: found {list(deep)}, expected ascending layers below {sizes['num_layers']}")
  if sizes["d_model"] % (4 * sizes["num_heads"]):
    raise ValueError(f"{where}: hidden_size: found {sizes['d_model']}, expected a multiple of 4 times num_heads={sizes['num_heads']}")
  tokens = {ours: raw.get(field, Vision._field_defaults[ours]) for ours, field in _VISION_TOKENS.items()}
  pictures = PictureConfig(**{ours: get(inner, field, INT, where=where) for ours, field in _PATCH_SIZES.items()})
  return Vision(**sizes, deep_layers=deep, pictures=pictures, grid_side=side, **tokens)


def _rope_sections(raw: dict[str, Any], half: int, where: str) -> tuple[int, int, int]:
  """Reads how many rotary frequencies time, height and width have."""
  rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
  sections = rope.get("mrope_section", [24, 20, 20])
  if len(sections) != 3 or sum(sections) != half:
    raise ValueError(f"{where}: mrope_section: found {sections}, expected three numbers that sum to {half}, half of a head")
  if rope.get("mrope_interleaved", True) is not True:
    raise ValueError(f"{where}: mrope_interleaved: found {rope['mrope_interleaved']!r}, expected true, the only order that is implemented")
  return tuple(sections)


def architecture(config: ModelConfig) -> str:
  """Returns the name that transformers gives the architecture of a model.

  Raises:
    ValueError: If no architecture of transformers has this combination of options.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> architecture(preset("nano", vocab_size=264))
    'Qwen3ForCausalLM'
  """
  shared = {name for family in FAMILIES.values() for name in family.options}
  options = {name: getattr(config, name) for name in shared if getattr(config, name) != ModelConfig._field_defaults[name]}
  for name, family in FAMILIES.items():
    has_parts = (config.experts is not None, config.vision is not None) == (family.has_experts, family.has_tower)
    has_width = config.query_width is None or family.query_width is not None
    if options == family.options and has_parts and has_width and is_writable(config, family.windows):
      return name
  parts = dict(experts=config.experts, vision=config.vision, window=config.window, query_width=config.query_width)
  shown = ", ".join(f"{name}={value}" for name, value in {**dict(sorted(options.items())), **parts}.items() if value is not None)
  raise ValueError(
    f"model: no architecture of transformers has {shown or 'these options'}; expected the options of one of {', '.join(FAMILIES)}"
  )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
  """Converts a `ModelConfig` to a `config.json`; inverts `from_hf_config`.

  Raises:
    ValueError: If no architecture of transformers has this combination of options.

  Note:
    Token ids are written as null, because a family's defaults (1 and 2 for Llama) would be wrong
    for most tokenizers.
  """
  name = architecture(config)
  family = FAMILIES[name]
  raw = {
    "architectures": [name],
    "model_type": family.model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "intermediate_size": config.d_ff,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    family.activation[0]: family.activation[1],
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tie_embeddings,
    "torch_dtype": config.param_dtype,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
  }
  raw |= {field: False if field.endswith("bias") else None for field in family.refused}
  if family.query_width is not None:
    raw[family.query_width[0]] = config.query_width or config.head_dim
  raw |= to_json(config, family.windows)
  if config.max_positions is not None:
    raw["max_position_embeddings"] = config.max_positions
  if config.experts is not None:
    raw |= {
      "num_experts": config.experts.num_experts,
      "num_experts_per_tok": config.experts.top_k,
      "moe_intermediate_size": config.experts.d_ff,
      "norm_topk_prob": config.experts.norm_top_k,
      "decoder_sparse_step": 1,
      "mlp_only_layers": list(config.dense_layers),
    }
  return raw if config.vision is None else _with_tower(raw, config)


def _with_tower(raw: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
  """Puts the fields of the decoder below `text_config`, beside those of the tower."""
  vision, model_type = config.vision, raw["model_type"]
  outside = ("architectures", "model_type", "torch_dtype", "tie_word_embeddings")
  raw["rope_scaling"] = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": list(vision.rope_sections)}
  text = {name: x for name, x in raw.items() if name not in outside} | {"model_type": f"{model_type}_text"}
  tower = {
    "model_type": f"{model_type}_vision" if config.experts else model_type,
    "out_hidden_size": config.d_model,
    "num_position_embeddings": vision.grid_side**2,
    "deepstack_visual_indexes": list(vision.deep_layers),
    **{field: getattr(vision, ours) for ours, field in _TOWER_SIZES.items()},
    **{field: getattr(vision.pictures, ours) for ours, field in _PATCH_SIZES.items()},
    **_TOWER_FIXED,
  }
  tokens = {field: getattr(vision, ours) for ours, field in _VISION_TOKENS.items()}
  return {**{name: raw[name] for name in outside}, **tokens, "text_config": text, "vision_config": tower}
