"""Tests of adapters in PEFT's format: what peft computes with them, and what cannot be saved."""

import json
import warnings
import zlib

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxrl_llm.models import Lora, logits, make_model, save_hf
from jaxrl_llm.models.files.adapters import save_adapter
from jaxrl_llm.models.files.loading import load_params, read_config
from jaxrl_llm.models.lora import is_adapter, merge
from tests.marks import few
from tests.models.recorded import CHECKPOINTS

ALL = ("attention/.*", "mlp/.*", "head")


def adapted(name, targets):
  """Returns a model whose adapters have an effect, as after training."""
  model = make_model(read_config(CHECKPOINTS / name)._replace(lora=Lora(rank=3, alpha=5.0, targets=targets)))
  params = load_params(CHECKPOINTS / name, model)
  draw = lambda path, x: x + 0.3 * jax.random.normal(jax.random.key(zlib.crc32(str(path).encode())), x.shape) if is_adapter(path) else x
  return model, jax.tree_util.tree_map_with_path(draw, params)


def test_the_matrices_have_peft_s_names_and_shapes_and_the_product_of_the_merged_weights(tmp_path):
  model, params = adapted("qwen2", ("attention/q", "attention/o", "mlp/down"))
  save_adapter(tmp_path / "out", model, params, base="Qwen/Qwen2-tiny")
  config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
  assert config["target_modules"] == ["down_proj", "o_proj", "q_proj"] and config["base_model_name_or_path"] == "Qwen/Qwen2-tiny"
  assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 5.0)
  with safe_open(tmp_path / "out" / "adapter_model.safetensors", framework="np") as opened:
    tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
  assert len(tensors) == 2 * 3 * model.config.num_layers
  plain, merged = merge(model, params)
  for path, name in (("attention/q", "self_attn.q_proj"), ("attention/o", "self_attn.o_proj"), ("mlp/down", "mlp.down_proj")):
    section, part = path.split("/")
    a, b = (tensors[f"base_model.model.model.layers.1.{name}.lora_{x}.weight"] for x in "AB")
    change = np.asarray(merged["layers"][section][part][1] - params["layers"][section][part][1])
    change = change.reshape(a.shape[1], b.shape[0]).T
    np.testing.assert_allclose(5 / 3 * b @ a, change, atol=1e-5)
  assert plain.config.lora is None


CASES = [("llama3", ALL), ("qwen2", ALL), ("qwen3_moe_mixed", ("attention/.*",))]


@pytest.mark.parametrize(("name", "targets"), few(CASES, 0, rest="slow"))
def test_peft_computes_the_logits_of_our_merged_model(name, targets, tmp_path):
  transformers, torch, peft = (pytest.importorskip(each) for each in ("transformers", "torch", "peft"))
  targets = targets if not read_config(CHECKPOINTS / name).tie_embeddings else targets[:2]
  model, params = adapted(name, targets)
  save_adapter(tmp_path / "out", model, params, base=str(CHECKPOINTS / name))
  with warnings.catch_warnings(), np.load(CHECKPOINTS / name / "logits.npz") as recorded, torch.no_grad():
    warnings.simplefilter("ignore")
    tokens, of_base = recorded["tokens"], recorded["logits"]
    base = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    of_peft = theirs(torch.from_numpy(tokens).long()).logits.numpy()
  ours = np.asarray(logits(*merge(model, params), tokens))
  assert np.abs(ours - of_base).max() > 0.1, "the adapters have no effect"
  np.testing.assert_allclose(of_peft, ours, atol=2e-4, rtol=0)


def test_what_peft_has_no_format_for_is_refused(tmp_path):
  plain = make_model(read_config(CHECKPOINTS / "qwen2"))
  with pytest.raises(ValueError, match="^adapter: found a model without adapters, expected one that was trained with model.lora_rank$"):
    save_adapter(tmp_path / "out", plain, {}, base="x")
  model, params = adapted("qwen3_moe_mixed", ("mlp/.*",))
  with pytest.raises(ValueError, match=r"^adapter: found adapters of experts .* without --adapter they are merged$"):
    save_adapter(tmp_path / "out", model, params, base="x")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "x").touch()
  with pytest.raises(ValueError, match="found a folder that is not empty"):
    save_adapter(tmp_path / "full", *adapted("qwen2", ("mlp/up",)), base="x")
  assert not (tmp_path / "out").exists()


def test_tokenizer_and_processors_are_saved_beside_adapters_and_weights(tmp_path):
  """A processor may hold the settings of pictures too; those of the run replace them there."""
  source = tmp_path / "source"
  source.mkdir()
  for name in ("tokenizer.json", "chat_template.jinja", "video_preprocessor_config.json"):
    (source / name).write_text(name)
  (source / "preprocessor_config.json").write_text("{}")
  (source / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor", "image_processor": {}}')
  config = read_config(CHECKPOINTS.parent / "pictures" / "qwen3_vl")._replace(lora=Lora(rank=2, alpha=4.0, targets=("mlp/up",)))
  smaller = config.vision.pictures._replace(max_pixels=64 * 64)
  model = make_model(config._replace(vision=config.vision._replace(pictures=smaller)))
  params = model.init(jax.random.key(0))
  save_adapter(tmp_path / "adapter", model, params, base="x", tokenizer_from=source)
  save_hf(tmp_path / "whole", model, params, tokenizer_from=source)
  for folder in (tmp_path / "adapter", tmp_path / "whole"):
    assert {path.name for path in source.iterdir()} < {path.name for path in folder.iterdir()}
    assert (folder / "video_preprocessor_config.json").read_text() == "video_preprocessor_config.json"
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    assert settings["size"]["longest_edge"] == 64 * 64
    processor = json.loads((folder / "processor_config.json").read_text())
    assert processor == {"processor_class": "Qwen3VLProcessor", "image_processor": settings}
