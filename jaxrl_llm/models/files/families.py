"""The supported families of decoders, and their `config.json` in both layouts of transformers.

An option that is not implemented is refused, never ignored: a model that runs with the wrong rotary
frequencies answers fluently and wrongly.
"""

import math
from typing import Any, NamedTuple

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.models.config import Experts, ModelConfig, RopeScaling, Vision
from jaxrl_llm.pretrained.pictures import PictureConfig

MISSING = object()


class Family(NamedTuple):
  """An architecture of transformers with its defaults for missing fields.

  Attributes:
    model_type: Short name in transformers.
    qk_norm: Whether queries and keys are normalised; see `ModelConfig`.
    qkv_bias: Whether queries, keys and values have biases; see `ModelConfig`.
    has_experts: Whether it is a mixture of experts.
    num_kv_heads: Default number of key-value heads; None is the number of query heads.
    head_dim: Default width of a head; None is the model's width over the number of query heads.
    max_positions: Default context length in tokens.
    refused_biases: Fields that would give linear maps a bias that is not implemented.
    window_switch: Field without which `sliding_window` has no effect, "" if it never has one; None
      if it always has one.
    has_tower: Whether it has a vision tower. The decoder's fields are then below `text_config`, and
      the gates of its experts always sum to 1.
  """

  model_type: str
  qk_norm: bool = False
  qkv_bias: bool = False
  has_experts: bool = False
  num_kv_heads: int | None = 32
  head_dim: int | None = None
  max_positions: int = 32768
  refused_biases: tuple[str, ...] = ()
  window_switch: str | None = None
  has_tower: bool = False


_QWEN3 = Family("qwen3", qk_norm=True, head_dim=128, refused_biases=("attention_bias",), window_switch="use_sliding_window")

FAMILIES = {
  "LlamaForCausalLM": Family(
    "llama", num_kv_heads=None, max_positions=2048, refused_biases=("attention_bias", "mlp_bias"), window_switch=""
  ),
  "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window_switch="use_sliding_window"),
  "Qwen3ForCausalLM": _QWEN3,
  "Qwen3MoeForCausalLM": _QWEN3._replace(model_type="qwen3_moe", has_experts=True, num_kv_heads=4, head_dim=None),
  "Qwen3VLForConditionalGeneration": _QWEN3._replace(model_type="qwen3_vl", max_positions=128000, has_tower=True),
  "Qwen3VLMoeForConditionalGeneration": _QWEN3._replace(
    model_type="qwen3_vl_moe", has_experts=True, num_kv_heads=16, head_dim=None, max_positions=128000, has_tower=True
  ),
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

# Tests of a field's value, by the name of its type in messages. In Python a bool is an int, but in
# a config it is not.
_TYPES = {
  "a positive integer": lambda x: isinstance(x, int) and not isinstance(x, bool) and x > 0,
  "a positive number": lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < float("inf"),
  "true or false": lambda x: isinstance(x, bool),
  "a list of layers, counted from 0": lambda x: isinstance(x, list) and all(type(y) is int and y >= 0 for y in x),
  "an object": lambda x: isinstance(x, dict),
}
_INT, _NUMBER, _BOOL, _LAYERS, _OBJECT = _TYPES


def _get(raw: dict[str, Any], field: str, kind: str, default: Any = MISSING, *, where: str) -> Any:
  """Returns a field after a check of its type; null counts as missing."""
  value = raw.get(field)
  if value is None:
    if default is MISSING:
      raise ValueError(f"{where}: {field} is missing, expected {kind}")
    return default
  if not _TYPES[kind](value):
    raise ValueError(f"{where}: {field}: found {value!r}, expected {kind}")
  return value


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


def _refuse_unimplemented(raw: dict[str, Any], family: Family, num_layers: int, where: str) -> None:
  """Raises ValueError on every option that would change the numbers and is not implemented."""

  def refuse(field: str, expected: str):
    raise ValueError(f"{where}: {field}: found {raw[field]!r}, expected {expected}")

  if raw.get("hidden_act", "silu") != "silu":
    refuse("hidden_act", "'silu', the only activation that is implemented")
  for field in family.refused_biases:
    if raw.get(field):
      refuse(field, "false: this bias is not implemented")
  if raw.get("quantization_config"):
    method = raw["quantization_config"]
    method = method.get("quant_method", method) if isinstance(method, dict) else method
    raise ValueError(f"{where}: quantization_config: found {method!r}, expected none; load the checkpoint in bfloat16, or a .gguf file")
  if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
    refuse("partial_rotary_factor", "1.0: rotating a part of a head is not implemented")
  switch = family.window_switch
  if raw.get("sliding_window") is not None and (switch is None or raw.get(switch)):
    # The first layer with the sliding window.
    first = 0 if family.has_experts or switch is None else raw.get("max_window_layers", 28)
    if not isinstance(first, int) or first < num_layers:
      expected = "null" if switch is None else "false"
      refuse(switch or "sliding_window", f"{expected}: attention within a sliding window is not implemented")
  if isinstance(raw.get("layer_types"), list) and set(raw["layer_types"]) - {"full_attention"}:
    refuse("layer_types", "full_attention everywhere")


def _rope(raw: dict[str, Any], max_positions: int, where: str, *, default: float) -> tuple[float, RopeScaling | None]:
  """Reads the base and scaling of the rotary frequencies.

  It accepts both layouts: `rope_theta` with `rope_scaling`, and `rope_parameters`.
  """
  field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
  rope = raw.get(field)
  if rope is not None and not isinstance(rope, dict):
    raise ValueError(f"{where}: {field}: found {rope!r}, expected an object with rope_type")
  rope = rope or {}
  inner = f"{where}: {field}"
  theta = float(_get(rope, "rope_theta", _NUMBER, None, where=inner) or _get(raw, "rope_theta", _NUMBER, default, where=where))
  if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
    raise ValueError(f"{inner}.partial_rotary_factor: found {rope['partial_rotary_factor']!r}, expected 1.0")
  rope_type = rope.get("rope_type", rope.get("type", "default"))
  if rope_type == "default":
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
      raise ValueError(f"{inner}: found settings by layer type ({', '.join(nested)}), expected one rope_type for all layers")
    return theta, None
  if rope_type != "llama3":
    raise ValueError(
      f"{inner}.rope_type: found {rope_type!r}, expected 'default' or 'llama3'; no other type is implemented"
    )
  scaling = RopeScaling(
    factor=float(_get(rope, "factor", _NUMBER, where=inner)),
    low_freq_factor=float(_get(rope, "low_freq_factor", _NUMBER, where=inner)),
    high_freq_factor=float(_get(rope, "high_freq_factor", _NUMBER, where=inner)),
    original_max_positions=_get(rope, "original_max_position_embeddings", _INT, max_positions, where=inner),
  )
  if scaling.low_freq_factor >= scaling.high_freq_factor:
    raise ValueError(
      f"{inner}: found low_freq_factor {scaling.low_freq_factor} >= high_freq_factor {scaling.high_freq_factor}, expected less"
    )
  return theta, scaling


def _experts(raw: dict[str, Any], family: Family, num_layers: int, where: str) -> Experts:
  """Reads the mixture of experts.

  transformers 5 calls the number of experts `num_local_experts`.
  """
  field = "num_local_experts" if raw.get("num_experts") is None and "num_local_experts" in raw else "num_experts"
  num_experts = _get(raw, field, _INT, where=where)
  top_k = _get(raw, "num_experts_per_tok", _INT, where=where)
  if top_k > num_experts:
    raise ValueError(f"{where}: num_experts_per_tok: found {top_k}, expected at most {field}={num_experts}")
  step = _get(raw, "decoder_sparse_step", _INT, 1, where=where)
  dense = _get(raw, "mlp_only_layers", _LAYERS, [], where=where)
  sparse = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
  return Experts(
    num_experts=num_experts,
    top_k=top_k,
    d_ff=_get(raw, "moe_intermediate_size", _INT, where=where),
    norm_top_k=family.has_tower or _get(raw, "norm_topk_prob", _BOOL, False, where=where),
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
    raw, where = _get(raw, "text_config", _OBJECT, where=where), f"{where}: text_config"
    # Published checkpoints have it outside, and transformers 5 writes it to both.
    raw = raw if tied is None else {**raw, "tie_word_embeddings": tied}
  num_layers, d_model, num_heads, d_ff, vocab_size = (
    _get(raw, field, _INT, where=where)
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
  )
  _refuse_unimplemented(raw, family, num_layers, where)
  default_kv_heads = num_heads if family.num_kv_heads is None or "num_key_value_heads" in raw else family.num_kv_heads
  num_kv_heads = _get(raw, "num_key_value_heads", _INT, default_kv_heads, where=where)
  if num_heads % num_kv_heads:
    raise ValueError(f"{where}: num_key_value_heads: found {num_kv_heads}, expected a divisor of num_attention_heads={num_heads}")
  head_dim = _get(raw, "head_dim", _INT, family.head_dim or d_model // num_heads, where=where)
  if head_dim % 2 or not head_dim:
    raise ValueError(
      f"{where}: head_dim: found {head_dim}, expected an even number: rotation pairs the two halves of a head"
    )
  max_positions = _get(raw, "max_position_embeddings", _INT, family.max_positions, where=where)
  rope_theta, rope_scaling = _rope(raw, max_positions, where, default=5e5 if family.has_tower else 1e4)
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
    norm_eps=float(_get(raw, "rms_norm_eps", _NUMBER, 1e-6, where=where)),
    qk_norm=family.qk_norm,
    qkv_bias=family.qkv_bias,
    tie_embeddings=_get(raw, "tie_word_embeddings", _BOOL, False, where=where),
    max_positions=max_positions,
    rope_scaling=rope_scaling,
    experts=_experts(raw, family, num_layers, where) if family.has_experts else None,
    vision=vision,
  )


def _vision(raw: dict[str, Any], where: str) -> Vision:
  """Reads the vision tower."""
  inner, where = _get(raw, "vision_config", _OBJECT, where=where), f"{where}: vision_config"
  sizes = {ours: _get(inner, field, _INT, where=where) for ours, field in _TOWER_SIZES.items()}
  positions = _get(inner, "num_position_embeddings", _INT, 2304, where=where)
  side = math.isqrt(positions)
  if side * side != positions:
    raise ValueError(f"{where}: num_position_embeddings: found {positions}, expected the square of an integer")
  for field, expected in _TOWER_FIXED.items():
    if inner.get(field, expected) != expected:
      raise ValueError(f"{where}: {field}: found {inner[field]!r}, expected {expected!r}, the only value that is implemented")
  deep = tuple(_get(inner, "deepstack_visual_indexes", _LAYERS, [8, 16, 24], where=where))
  if list(deep) != sorted(set(deep)) or (deep and deep[-1] >= sizes["num_layers"]):
    raise ValueError(f"{where}: deepstack_visual_indexes: found {list(deep)}, expected ascending layers below {sizes['num_layers']}")
  if sizes["d_model"] % (4 * sizes["num_heads"]):
    raise ValueError(f"{where}: hidden_size: found {sizes['d_model']}, expected a multiple of 4 times num_heads={sizes['num_heads']}")
  tokens = {ours: raw.get(field, Vision._field_defaults[ours]) for ours, field in _VISION_TOKENS.items()}
  pictures = PictureConfig(**{ours: _get(inner, field, _INT, where=where) for ours, field in _PATCH_SIZES.items()})
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
  options = (config.qk_norm, config.qkv_bias, config.experts is not None, config.vision is not None)
  for name, family in FAMILIES.items():
    if options == (family.qk_norm, family.qkv_bias, family.has_experts, family.has_tower):
      return name
  shown = f"qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, experts={config.experts}, vision={config.vision}"
  raise ValueError(
    f"model: no architecture of transformers has {shown}; expected the options of one of {', '.join(FAMILIES)}"
  )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
  """Converts a `ModelConfig` to a `config.json`; inverts `from_hf_config`.

  Raises:
    ValueError: If no architecture of transformers has this combination of options.

  Note:
    Rotary settings are written as in published checkpoints, `rope_theta` with `rope_scaling`, which
    every version of transformers reads. Only version 5 also reads `rope_parameters`. Token ids are
    written as null, because a family's defaults (1 and 2 for Llama) would be wrong for most
    tokenizers.
  """
  name = architecture(config)
  raw = {
    "architectures": [name],
    "model_type": FAMILIES[name].model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "intermediate_size": config.d_ff,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "rope_scaling": None,
    "tie_word_embeddings": config.tie_embeddings,
    "torch_dtype": config.param_dtype,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
  }
  raw |= dict.fromkeys(FAMILIES[name].refused_biases, False)
  if config.max_positions is not None:
    raw["max_position_embeddings"] = config.max_positions
  if config.rope_scaling is not None:
    factor, low, high, original = config.rope_scaling
    raw["rope_scaling"] = dict(
      rope_type="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original
    )
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
