"""Tests of config.json: transformers' defaults, both layouts, and refused options."""

import json

import pytest

from jaxrl_llm.models.config import Experts, Linear, ModelConfig, RopeScaling, SlidingWindow, Yarn
from jaxrl_llm.models.files.families import FAMILIES, Family, from_hf_config, to_hf_config
from jaxrl_llm.models.files.rotary import FULL, SLIDING
from jaxrl_llm.models.presets import PRESETS
from jaxrl_llm.models.rope import frequencies
from tests.models.recorded import CHECKPOINTS

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=4, num_attention_heads=32)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def raw_config(family="Llama", **fields):
  mixture = MIXTURE if family == "Qwen3Moe" else {}
  return {"architectures": [f"{family}ForCausalLM"], **SIZES, **mixture, **fields}


def read(family="Llama", **fields):
  return from_hf_config(raw_config(family, **fields), where="there/config.json")


# The defaults of transformers 5.23 by family.
@pytest.mark.parametrize(
  ("family", "num_kv_heads", "head_dim", "max_positions", "qk_norm", "qkv_bias"),
  [
    ("Llama", 32, 2, 2048, False, False),
    ("Qwen2", 32, 2, 32768, False, True),
    ("Qwen3", 32, 128, 32768, True, False),
    ("Qwen3Moe", 4, 2, 32768, True, False),
  ],
)
def test_missing_fields_take_the_defaults_of_the_family(family, num_kv_heads, head_dim, max_positions, qk_norm, qkv_bias):
  assert read(family) == ModelConfig(
    vocab_size=96,
    num_layers=4,
    d_model=64,
    num_heads=32,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    d_ff=48,
    rope_theta=1e4,
    norm_eps=1e-6,
    qk_norm=qk_norm,
    qkv_bias=qkv_bias,
    tie_embeddings=False,
    max_positions=max_positions,
    experts=Experts(4, 2, 16, norm_top_k=False) if family == "Qwen3Moe" else None,
  )


def test_null_is_a_missing_field():
  assert read("Qwen3Moe", num_key_value_heads=None, head_dim=None).num_kv_heads == 32
  assert read("Llama", head_dim=None, num_key_value_heads=None, rope_scaling=None, rope_parameters=None) == read("Llama")


def test_model_type_names_the_family_without_architectures():
  raw = {**SIZES, "model_type": "qwen2"}
  assert from_hf_config(raw, where="x").qkv_bias


@pytest.mark.parametrize(
  "fields",
  [
    dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **LLAMA3)),
    dict(rope_theta=5e5, rope_scaling=dict(type="llama3", **LLAMA3)),
    dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)),
    dict(rope_theta=500000, rope_parameters=dict(rope_type="llama3", **LLAMA3)),
    # The inner theta takes precedence.
    dict(rope_theta=1.0, rope_parameters=dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)),
  ],
)
def test_both_layouts_of_rotary_settings(fields):
  config = read(**fields)
  assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 8192))


def test_the_original_context_defaults_to_the_context():
  scaling = {name: value for name, value in LLAMA3.items() if not name.startswith("original")}
  config = read(max_position_embeddings=4096, rope_scaling=dict(rope_type="llama3", **scaling))
  assert config.rope_scaling.original_max_positions == 4096


@pytest.mark.parametrize(
  ("fields", "layers"),
  [
    ({}, None),
    (dict(mlp_only_layers=[0, 2]), (1, 3)),
    (dict(decoder_sparse_step=2), (1, 3)),
    (dict(decoder_sparse_step=2, mlp_only_layers=[3]), (1,)),
  ],
)
def test_layers_with_experts(fields, layers):
  assert read("Qwen3Moe", **fields).experts.layers == layers


def test_transformers_5_has_another_name_for_the_number_of_experts():
  raw = raw_config("Qwen3Moe")
  raw["num_local_experts"] = raw.pop("num_experts")
  assert from_hf_config(raw, where="x") == read("Qwen3Moe")


@pytest.mark.parametrize(
  "fields",
  [
    dict(use_sliding_window=False, sliding_window=4096),
    dict(use_sliding_window=True, sliding_window=None),
    dict(use_sliding_window=True, sliding_window=4096, max_window_layers=4),
    dict(layer_types=["full_attention"] * 4),
    dict(attention_bias=True),  # Qwen2 always has its biases, and has no such field.
    dict(partial_rotary_factor=1.0, quantization_config=None, rope_scaling={}),
  ],
)
def test_options_that_change_nothing_are_accepted(fields):
  assert read("Qwen2", **fields) == read("Qwen2")


@pytest.mark.parametrize(
  ("family", "fields", "window"),
  [
    # As the configs of transformers 5.24 fill in what a file leaves out.
    ("Qwen2", dict(use_sliding_window=True, max_window_layers=3), SlidingWindow(4096, (3,))),
    ("Qwen3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=0), SlidingWindow(8, (0, 1, 2, 3))),
    ("Qwen3", dict(use_sliding_window=True, sliding_window=8), None),  # From layer 28 on.
    ("Qwen3", dict(use_sliding_window=True, layer_types=[FULL, SLIDING] * 2), SlidingWindow(4096, (1, 3))),
    ("Qwen3Moe", dict(use_sliding_window=True, sliding_window=8, max_window_layers=9), SlidingWindow(8, (0, 1, 2, 3))),
    ("Mistral", {}, SlidingWindow(4096, (0, 1, 2, 3))),
    ("Mistral", dict(sliding_window=None), None),
    ("Olmo2", dict(sliding_window=8), None),  # It reads no such field; nor does Llama.
    ("Llama", dict(sliding_window=8), None),
    ("Olmo3", {}, SlidingWindow(4096, (0, 1, 2))),
    ("Olmo3", dict(sliding_window=None), None),
    ("Olmo3", dict(rope_theta=1e3, rope_scaling=dict(rope_type="yarn", factor=2.0)), SlidingWindow(4096, (0, 1, 2), 1e3)),
    ("Gemma3", dict(sliding_window_pattern=2, sliding_window=512), SlidingWindow(512, (0, 2), 1e4)),
    ("Gemma3", dict(layer_types=[SLIDING, FULL, FULL, FULL], rope_local_base_freq=10.0), SlidingWindow(4096, (0,), 10.0)),
    ("Gemma3", dict(rope_parameters={SLIDING: dict(rope_theta=20.0), FULL: dict(rope_theta=20.0)}), SlidingWindow(4096, (0, 1, 2, 3))),
  ],
)
def test_layers_with_a_sliding_window(family, fields, window):
  config = read(family, **fields)
  assert config.window == window
  assert from_hf_config(json.loads(json.dumps(to_hf_config(config))), where="x") == config


def test_scores_are_written_with_their_scale_even_if_it_is_that_of_other_families():
  """transformers' default would be 256, whatever the width of a head."""
  assert to_hf_config(PRESETS["nano-window"]._replace(query_width=None))["query_pre_attn_scalar"] == 8


def test_a_new_family_honours_the_windows_of_its_files(monkeypatch):
  monkeypatch.setitem(FAMILIES, "StarlingForCausalLM", Family("starling"))
  assert read("Starling").window is None and read("Starling", sliding_window=8).window.size == 8


def test_scalings_of_rotary_frequencies():
  """As in Qwen2.5 with YaRN, and in Gemma 3 of 4B weights, which scales nothing within windows."""
  yarn = dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)
  assert read("Qwen2", rope_scaling=yarn).rope_scaling == Yarn(4.0, 32768, pytest.approx(1.1386294361))
  config = read("Gemma3", rope_scaling=dict(rope_type="linear", factor=8.0), sliding_window_pattern=2)
  assert (config.rope_theta, config.rope_scaling, config.window.rope_theta) == (1e6, Linear(8.0), 1e4)
  assert frequencies(8, 1e4, Linear(8.0))[0] == 1 / 8


REFUSED = {
  "unknown architecture": ("Llma", {}, "unknown architecture 'LlmaForCausalLM', expected one of LlamaForCausalLM, Qwen2ForCausalLM, "),
  "did you mean": ("Qwen3Mo", {}, "; did you mean 'Qwen3MoeForCausalLM'?"),
  "no architecture": ("Llama", dict(architectures=None, model_type="gpt2"), "unknown architecture 'gpt2'"),
  "two architectures": ("Llama", dict(architectures=["A", "B"]), "architectures: found ['A', 'B'], expected a list of one of Llama"),
  "activation": ("Llama", dict(hidden_act="gelu"), "hidden_act: found 'gelu', expected 'silu'"),
  "attention bias": ("Llama", dict(attention_bias=True), "attention_bias: found True, expected false"),
  "attention bias in Qwen3": ("Qwen3", dict(attention_bias=True), "attention_bias: found True, expected false"),
  "attention bias in the mixture": ("Qwen3Moe", dict(attention_bias=True), "attention_bias: found True, expected false"),
  "mlp bias": ("Llama", dict(mlp_bias=True), "mlp_bias: found True, expected false"),
  "window without its switch": ("Qwen3", dict(layer_types=[SLIDING] * 4), "sliding_window: found none, expected use_sliding_window: true"),
  "window of no size": ("Gemma3", dict(sliding_window=0), "sliding_window: found 0, expected a positive integer"),
  "window without a size": ("Mistral", dict(layer_types=[SLIDING] * 4, sliding_window=None), "found none, expected a number, because"),
  "window in Llama": ("Llama", dict(layer_types=[SLIDING] * 4), "expected 'full_attention' everywhere: the family has no windows"),
  "layers of a new kind": ("Qwen3", dict(layer_types=["linear_attention"] * 4), "layer_types: found ['linear_attention', "),
  "too few layer types": ("Olmo3", dict(layer_types=[FULL]), "layer_types: found ['full_attention'], expected"),
  "softcap": ("Gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping: found 50.0, expected false or null"),
  "sees what follows": ("Gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention: found True, expected false"),
  "activation of Gemma": ("Gemma3", dict(hidden_activation="gelu"), "hidden_activation: found 'gelu', expected 'gelu_pytorch_tanh'"),
  "scaled within windows": (
    "Olmo3", dict(rope_parameters={SLIDING: dict(rope_type="linear", factor=2.0)}), "rope_parameters.sliding_attention: found 'linear'"
  ),
  "rope for all layers alike": ("Olmo3", dict(rope_parameters=dict(rope_theta=1e6)), "expected an entry for each of 'full_attention' and"),
  "dynamic by layer": (
    "Gemma3", dict(rope_parameters={FULL: dict(rope_type="dynamic")}), "rope_parameters.full_attention.rope_type: found 'dynamic', expected"
  ),
  "mscale": ("Qwen2", dict(rope_scaling=dict(type="yarn", factor=2.0, mscale=0.7)), "rope_scaling.mscale: found 0.7, expected none"),
  "yarn without a factor": ("Qwen2", dict(rope_scaling=dict(type="yarn")), "rope_scaling: factor is missing, expected a positive number"),
  "dynamic": ("Llama", dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_scaling.rope_type: found 'dynamic', expected"),
  "longrope": ("Llama", dict(rope_scaling=dict(type="longrope")), "rope_scaling.rope_type: found 'longrope', expected"),
  "rope by layer": ("Llama", dict(rope_parameters=dict(full_attention={})), "settings by layer type (full_attention), expected one"),
  "rope of another type": ("Llama", dict(rope_scaling="llama3"), "rope_scaling: found 'llama3', expected an object with rope_type"),
  "no factor": ("Llama", dict(rope_scaling=dict(rope_type="llama3")), "rope_scaling: factor is missing, expected a positive number"),
  "swapped factors": (
    "Llama",
    dict(rope_scaling=LLAMA3 | dict(rope_type="llama3", low_freq_factor=4.0)),
    "found low_freq_factor 4.0 >= high_freq_factor 4.0",
  ),
  "quantized": ("Llama", dict(quantization_config=dict(quant_method="awq")), "quantization_config: found 'awq', expected none"),
  "partly rotated": ("Llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor: found 0.5, expected 1.0"),
  "partly rotated, new": ("Llama", dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor: found 0.5, expected 1.0"),
  "missing": ("Llama", dict(hidden_size=None), "hidden_size is missing, expected a positive integer"),
  "missing in the mixture": ("Qwen3Moe", dict(moe_intermediate_size=None), "moe_intermediate_size is missing, expected a positive integer"),
  "no experts": ("Qwen3Moe", dict(num_experts=0), "num_experts: found 0, expected a positive integer"),
  "more experts than there are": ("Qwen3Moe", dict(num_experts_per_tok=5), "num_experts_per_tok: found 5, expected at most num_experts=4"),
  "layers of another type": ("Qwen3Moe", dict(mlp_only_layers="0"), "mlp_only_layers: found '0', expected a list of layers"),
  "a string": ("Llama", dict(hidden_size="64"), "hidden_size: found '64', expected a positive integer"),
  "a bool": ("Llama", dict(num_hidden_layers=True), "num_hidden_layers: found True, expected a positive integer"),
  "not a bool": ("Llama", dict(tie_word_embeddings="yes"), "tie_word_embeddings: found 'yes', expected true or false"),
  "negative": ("Llama", dict(rms_norm_eps=-1e-6), "rms_norm_eps: found -1e-06, expected a positive number"),
  "heads": ("Llama", dict(num_key_value_heads=3), "num_key_value_heads: found 3, expected a divisor of num_attention_heads=32"),
  "odd head": ("Llama", dict(head_dim=7), "head_dim: found 7, expected an even number"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unimplemented_options_are_refused_in_one_line(case):
  family, fields, words = REFUSED[case]
  with pytest.raises(ValueError) as error:
    read(family, **fields)
  message = str(error.value)
  assert message.startswith("there/config.json: ") and words in message and "\n" not in message


def test_a_config_that_is_no_object_is_refused():
  with pytest.raises(ValueError, match="x: found list, expected an object"):
    from_hf_config([], where="x")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_a_round_trip(name):
  config = PRESETS[name]
  again = from_hf_config(json.loads(json.dumps(to_hf_config(config))), where="x")
  if config.vision is not None:  # A file of its own holds how pictures become patches.
    assert again.vision.pictures[:3] == config.vision.pictures[:3]
    again = again._replace(vision=again.vision._replace(pictures=config.vision.pictures))
  # A config without a context length gets the default of the family.
  default = FAMILIES[to_hf_config(config)["architectures"][0]].max_positions
  assert again == config._replace(max_positions=config.max_positions or default)


def test_mixed_layers_survive_a_round_trip():
  config = PRESETS["qwen3-30b-a3b"]._replace(num_layers=5, experts=Experts(8, 2, 16, norm_top_k=False, layers=(1, 4)))
  assert from_hf_config(to_hf_config(config), where="x") == config


def test_a_model_that_transformers_does_not_have_is_refused():
  with pytest.raises(ValueError, match="no architecture of transformers has qk_norm=True, qkv_bias=True; expected"):
    to_hf_config(PRESETS["nano"]._replace(qkv_bias=True))
  with pytest.raises(ValueError, match="no architecture of transformers has norms=after, qk_norm=True, qk_norm_joint=True, window="):
    # OLMo 3 has no scale of the scores.
    olmo3 = dict(norms="after", qk_norm_joint=True, centred_norms=False, scale_embeddings=False, activation="silu")
    to_hf_config(PRESETS["nano-window"]._replace(**olmo3))


def test_the_recorded_configs_have_both_layouts():
  raws = {path.parent.name: json.loads(path.read_text()) for path in CHECKPOINTS.glob("*/config.json")}
  assert {name for name, raw in raws.items() if "rope_theta" in raw} == {"smollm2"}
  assert raws["qwen3_moe"]["num_local_experts"] == 4
  assert all(from_hf_config(raw, where=name).vocab_size == 96 for name, raw in raws.items())
