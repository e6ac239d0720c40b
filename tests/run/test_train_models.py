"""Runs of models beyond a preset: from a checkpoint, with adapters, with experts and routes."""

import json

import gguf
import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxrl_llm import export, train
from jaxrl_llm.models import load, make_model, merge, preset, save_hf
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.workdir import claim
from tests.runs import VARIED, column, quick, run_here, tiny_config

SHORT = VARIED | {"num_steps": 2, "warm_start.num_steps": 0, "eval.every": 2, "log.tensorboard": False}
TEMPLATE = "{% for m in messages %}{{ '<bos>' + m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
  """A policy with random weights and a byte tokenizer, as a folder in Hugging Face's format."""
  source, folder = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("checkpoint") / "nano"
  specials = ["<pad>", "<bos>", "<eos>"]
  vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
  tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  tokenizer.add_special_tokens(specials)
  tokenizer.save(str(source / "tokenizer.json"))
  config = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
  (source / "tokenizer_config.json").write_text(json.dumps(config))
  model = make_model(preset("nano", vocab_size=264))
  save_hf(folder, model, model.init(jax.random.key(7)), tokenizer_from=source)
  return folder


@pytest.mark.exhaustive
def test_adapters_on_a_checkpoint_train_and_resume(checkpoint_folder, tmp_path, monkeypatch):
  """The base weights are the checkpoint's, serve as the reference and are not saved again."""
  overrides = SHORT | {"model.path": str(checkpoint_folder), "model.lora_rank": 4, "objective.kl_coef": 0.1, "learner.learning_rate": 1e-2}
  config = tiny_config("grpo", overrides)
  claim.claim(tmp_path, config.to_dict())
  with quick():
    run = train.start_run(config, tmp_path)
    assert run.reference is None
    train.proceed(run)
    again = train.start_run(config, tmp_path)
    assert export.main([str(tmp_path), str(tmp_path / "exported")]) == 0
    assert export.main([str(tmp_path), str(tmp_path / "adapter"), "--adapter"]) == 0
  _, published = load(checkpoint_folder)
  for path, x in jax.tree_util.tree_leaves_with_path(run.state.params):
    restored, base = again.state.params, published
    for key in path:
      restored, base = restored[key.key], base.get(key.key, {}) if isinstance(base, dict) else base
    assert np.array_equal(x, restored), path
    if "_lora_" in path[-1].key:
      assert path[-1].key.endswith("a") or np.any(np.asarray(x) != 0)
    else:
      assert np.array_equal(x, base), path
  exported, params = load(tmp_path / "exported")
  with quick(), pytest.raises(ValueError, match="found other weights in"):
    monkeypatch.setattr(where, "fingerprint", lambda path: "of other weights")
    train.start_run(config, tmp_path)
  _, merged = merge(run.experiment.learner.model, run.state.params)
  assert exported.config.lora is None and jax.tree.all(jax.tree.map(np.array_equal, params, merged))
  assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (checkpoint_folder / "tokenizer.json").read_bytes()

  saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  assert saved["r"] == 4 and saved["base_model_name_or_path"] == str(checkpoint_folder)
  assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {"README.md", "adapter_model.safetensors"}

  # Before the first update the adapters add nothing, so the policy equals its reference. Metrics
  # are means over the two updates of a step.
  divergence = column(tmp_path, "actor/ref_kl")
  assert 0 < divergence[0] < divergence[-1]
  saved = sum(file.stat().st_size for file in (tmp_path / "checkpoints").rglob("*") if file.is_file())
  assert (
    saved
    < 10 * 4 * sum(x.size for p, x in jax.tree_util.tree_leaves_with_path(run.state.params) if "_lora_" in p[-1].key)
    + 200_000
  )


@pytest.mark.exhaustive
def test_the_export_of_a_run_from_a_gguf_has_its_tokenizer(tmp_path):
  source = tmp_path / "model.gguf"
  writer = gguf.GGUFWriter(source, "llama")
  sizes = {"block_count": 1, "context_length": 256, "embedding_length": 8, "feed_forward_length": 8}
  sizes |= {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4}
  for name, value in sizes.items():
    (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{name}", value)
  names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>", "<eot>", "<pad>"]
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("llama-bpe")
  writer.add_token_list(names)
  writer.add_token_types([1] * 256 + [3] * 4)
  writer.add_token_merges([])
  writer.add_bos_token_id(256)
  writer.add_eos_token_id(257)
  writer.add_chat_template("{% for m in messages %}{{ '<bos>' + m['content'] + '<eot>' }}{% endfor %}")
  rng, ones = np.random.default_rng(0), np.ones(8, np.float32)
  for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
    writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal((8, 8)).astype(np.float32))
  for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
    writer.add_tensor(f"{name}.weight", ones)
  writer.add_tensor("token_embd.weight", rng.standard_normal((260, 8)).astype(np.float32))
  for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
    write()
  config = tiny_config("grpo", SHORT | {"num_steps": 1, "eval.every": 1, "model.path": str(source), "model.lora_rank": 2})
  claim.claim(tmp_path / "run", config.to_dict())
  run_here(config, tmp_path / "run")
  with quick():
    assert export.main([str(tmp_path / "run"), str(tmp_path / "whole")]) == 0
    assert export.main([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
  ours = load_tokenizer(source)
  for folder in (tmp_path / "whole", tmp_path / "adapter"):
    assert load_tokenizer(folder).encode_prompt("7+8") == ours.encode_prompt("7+8")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [258, 257]
  raw = json.loads((tmp_path / "whole" / "config.json").read_text())
  assert (raw["bos_token_id"], raw["eos_token_id"], raw["pad_token_id"]) == (256, [258, 257], 259)


@pytest.mark.parametrize(
  ("files", "message"), [({}, "found no config of a run"), ({"config.json": "{}"}, "found no checkpoints, expected the folder of a run")]
)
def test_exporting_a_folder_without_a_run_is_refused(files, message, tmp_path, capsys):
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  assert export.main([str(tmp_path), str(tmp_path / "exported")]) == 2
  assert message in capsys.readouterr().err and not (tmp_path / "exported").exists()


def test_a_run_starts_from_the_checkpoints_weights(checkpoint_folder, tmp_path):
  config = tiny_config("gspo", SHORT | {"model.path": str(checkpoint_folder)})
  with quick():
    run = train.start_run(config, tmp_path)
  _, published = load(checkpoint_folder)
  assert jax.tree.all(jax.tree.map(np.array_equal, run.state.params, published))
  assert run.experiment.task.tokenizer.encode_prompt("7+8") == run.experiment.task.tokenizer.encode("<bos>7+8")


@pytest.mark.parametrize(
  "replay",
  [
    pytest.param("R3", marks=pytest.mark.slow),
    pytest.param("R2", marks=pytest.mark.exhaustive),
    pytest.param(None, marks=pytest.mark.exhaustive),
  ],
)
def test_experts_with_a_sampler_of_lower_precision(replay, tmp_path):
  overrides = SHORT | {
    "warm_start.num_steps": 2, "model.preset": "nano-moe", "model.sampler_dtype": "bfloat16", "moe.replay": replay,
    "moe.measure_every": 1, "moe.balance_coef": 0.01, "moe.z_coef": 0.001, "learner.old_logprobs": "learner",
  }  # fmt: skip
  if replay is None:
    del overrides["moe.replay"]
  run_here(tiny_config("gspo", overrides), tmp_path)
  names = ("moe/expert_change/update", "moe/expert_change/sampler", "moe/balance_loss", "moe/z_loss", "moe/load_max")
  columns = {name: column(tmp_path, name) for name in names}
  assert all(np.all(np.isfinite(values)) for values in columns.values())
  assert all(0 <= x <= 1 for x in columns["moe/expert_change/update"] + columns["moe/expert_change/sampler"])
  assert min(columns["moe/balance_loss"]) > 0 and min(columns["moe/load_max"]) >= 1
  if replay == "R3":
    # With replay, the learner's routes at π_old are the sampler's.
    assert set(columns["moe/expert_change/sampler"]) == {0.0}
  if replay:
    assert set(column(tmp_path, "moe/replay_fallback")) == {0.0} and min(column(tmp_path, "moe/replay_mb")) > 0
    assert all(0 <= x <= 1 for x in column(tmp_path, "moe/replay_expert_change"))
