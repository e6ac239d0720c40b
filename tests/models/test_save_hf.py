"""Tests of saving for transformers: equal tensors and config, and no half-written folder."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxrl_llm.devices.mesh import make_mesh
from jaxrl_llm.models import Lora, make_model
from jaxrl_llm.models.files import saving
from jaxrl_llm.models.files.families import from_hf_config
from jaxrl_llm.models.files.loading import load, load_params, open_source, read_config
from jaxrl_llm.models.files.saving import save_hf
from tests.marks import few
from tests.models.record_checkpoints import logits_of
from tests.models.recorded import CHECKPOINTS, NAMES


def assert_same_tensors(folder, original):
  """Asserts that the tensors agree bit by bit under the published names."""
  (_, saved), (_, source) = open_source(folder), open_source(original)
  assert saved.dtypes == source.dtypes and saved.shapes == source.shapes
  for name in source.shapes:
    assert saved.read(name).tobytes() == source.read(name).tobytes(), name


@pytest.mark.parametrize("name", few(NAMES, 0, 1))
def test_loaded_weights_are_saved_bit_by_bit(name, tmp_path, loaded):
  dtype = "bfloat16" if name == "qwen2" else "float32"
  model, params = loaded(name, dtype)
  save_hf(tmp_path / "out", model, params, dtype=dtype)
  assert_same_tensors(tmp_path / "out", CHECKPOINTS / name)
  raw = json.loads((tmp_path / "out" / "config.json").read_text())
  assert from_hf_config(raw, where="saved") == read_config(CHECKPOINTS / name)
  assert raw["torch_dtype"] == dtype and raw["eos_token_id"] is None
  assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "out"]


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3_moe_mixed"])
def test_transformers_computes_the_same_logits_from_a_saved_model(name, tmp_path, loaded):
  pytest.importorskip("transformers"), pytest.importorskip("torch")
  model, params = loaded(name)
  save_hf(tmp_path / "out", model, params)
  with warnings.catch_warnings(), np.load(CHECKPOINTS / name / "logits.npz") as recorded:
    warnings.simplefilter("ignore")
    np.testing.assert_allclose(logits_of(tmp_path / "out", recorded["tokens"]), recorded["logits"], atol=2e-4, rtol=0)


def test_weights_above_the_limit_are_split_into_files(tmp_path, loaded):
  model, params = loaded("qwen3_moe")
  save_hf(tmp_path / "out", model, params, max_shard_bytes=30_000)
  assert_same_tensors(tmp_path / "out", CHECKPOINTS / "qwen3_moe")
  index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
  files = sorted(set(index["weight_map"].values()))
  assert files == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
  saved = {}
  for file in files:
    with safe_open(tmp_path / "out" / file, framework="np") as opened:  # The format's own reader.
      assert opened.metadata() == {"format": "pt"}
      tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert sum(tensor.nbytes for tensor in tensors.values()) <= 30_000
    assert {index["weight_map"][name] for name in tensors} == {file}
    saved |= tensors
  assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved.values()) == 4 * model.num_params
  _, source = open_source(CHECKPOINTS / "qwen3_moe")
  assert saved.keys() == source.shapes.keys()
  assert all(np.array_equal(saved[name], source.read(name)) for name in source.shapes)


def test_a_tensor_above_the_limit_has_a_file_of_its_own(tmp_path, loaded):
  model, params = loaded("qwen2.5")
  save_hf(tmp_path / "out", model, params, max_shard_bytes=1)
  _, source = open_source(tmp_path / "out")
  assert len(set(source.files.values())) == len(source.files)


def test_weights_spread_over_devices_are_saved_whole(tmp_path):
  model, params = load(CHECKPOINTS / "qwen3_moe", mesh=make_mesh(data=1, fsdp=2, expert=2, tensor=2))
  save_hf(tmp_path / "out", model, params)
  assert_same_tensors(tmp_path / "out", CHECKPOINTS / "qwen3_moe")


def test_params_in_host_memory_are_saved_too_and_an_empty_folder_is_filled(tmp_path, loaded):
  model, params = loaded("qwen3")
  save_hf(tmp_path, model, jax.tree.map(np.asarray, params))
  assert_same_tensors(tmp_path, CHECKPOINTS / "qwen3")


def test_dtypes_are_kept_or_converted_on_request(tmp_path, loaded):
  model, params = loaded("qwen3_moe", "bfloat16")
  save_hf(tmp_path / "held", model, params)
  save_hf(tmp_path / "asked", model, params, dtype="float32")
  dtypes = open_source(tmp_path / "held")[1].dtypes
  wide = {name for name, dtype in dtypes.items() if dtype == "float32"}
  assert wide == {name for name in dtypes if name.endswith(("norm.weight", "mlp.gate.weight"))}
  assert set(open_source(tmp_path / "asked")[1].dtypes.values()) == {"float32"}
  torch_dtypes = [json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] for name in ("held", "asked")]
  assert torch_dtypes == ["bfloat16", "float32"]


def test_adapters_are_merged_into_their_weights(tmp_path):
  model = make_model(read_config(CHECKPOINTS / "smollm2")._replace(lora=Lora(rank=2, alpha=4.0, targets=("mlp/up",))))
  params = load_params(CHECKPOINTS / "smollm2", model)
  mlp = params["layers"]["mlp"]
  mlp["up_lora_b"] = mlp["up_lora_b"] + 0.5  # Fresh adapters add nothing.
  save_hf(tmp_path / "out", model, params)
  (_, saved), (_, source) = open_source(tmp_path / "out"), open_source(CHECKPOINTS / "smollm2")
  changed = {name for name in source.shapes if not np.array_equal(saved.read(name), source.read(name))}
  assert changed == {f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)} and saved.shapes == source.shapes
  expected = np.asarray(mlp["up"] + 2 * mlp["up_lora_a"] @ mlp["up_lora_b"])[1].T
  np.testing.assert_allclose(saved.read("model.layers.1.mlp.up_proj.weight"), expected, rtol=1e-5)


def test_the_tokenizer_is_copied(tmp_path, loaded):
  source = tmp_path / "source"
  source.mkdir()
  for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "model.safetensors", "README.md"):
    (source / name).write_text(name)
  (source / "config.json").write_text('{"eos_token_id": [7, 8], "vocab_size": 1}')
  model, params = loaded("smollm2")
  save_hf(tmp_path / "out", model, params, tokenizer_from=source)
  names = sorted(path.name for path in (tmp_path / "out").iterdir())
  assert names == ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
  assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"
  raw = json.loads((tmp_path / "out" / "config.json").read_text())
  assert (raw["eos_token_id"], raw["bos_token_id"], raw["vocab_size"]) == ([7, 8], None, 96)


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch, loaded):
  model, params = loaded("smollm2")

  def fail(*_):
    raise OSError("disk full")

  monkeypatch.setattr(saving, "write_file", fail)
  with pytest.raises(OSError, match="disk full"):
    save_hf(tmp_path / "out", model, params)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("prepare", "arguments", "words"),
  [
    (lambda out: (out.mkdir(), (out / "x").touch()), {}, "out: found a folder that is not empty, expected no such path or an empty"),
    (lambda out: out.touch(), {}, "out: found a file, expected no such path or an empty folder"),
    (lambda out: None, dict(dtype="float16"), "dtype: found 'float16', expected one of float32, bfloat16, or None"),
    (lambda out: None, dict(max_shard_bytes=0), "max_shard_bytes: found 0, expected a positive number of bytes"),
    (lambda out: None, dict(tokenizer_from=CHECKPOINTS / "qwen3"), "tokenizer_from: found no tokenizer in "),
    (lambda out: None, dict(qkv_bias=True), "no architecture of transformers has qk_norm=True, qkv_bias=True"),
  ],
)
def test_bad_arguments_are_refused_before_anything_is_written(prepare, arguments, words, tmp_path):
  out = tmp_path / "out"
  prepare(out)
  before = sorted(tmp_path.rglob("*"))
  model = make_model(read_config(CHECKPOINTS / "qwen3")._replace(qkv_bias=arguments.pop("qkv_bias", False)))
  with pytest.raises(ValueError) as error:
    save_hf(out, model, {"embedding": jnp.zeros(1)}, **arguments)
  assert words in str(error.value) and "\n" not in str(error.value) and sorted(tmp_path.rglob("*")) == before
