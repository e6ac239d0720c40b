"""A script that records the checkpoints in `checkpoints/`, each with its logits by transformers.

  python -m tests.models.record_checkpoints           records them again
  python -m tests.models.record_checkpoints --check   checks them and writes nothing

The check loads each checkpoint, saves it with `save_hf`, opens the result with transformers, and
compares the logits. The script needs torch and transformers, which nothing else here requires. The
checkpoints were recorded with transformers 5.23.0 and torch 2.13.0.
"""

import argparse
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable

import numpy as np

FOLDER = pathlib.Path(__file__).parent / "checkpoints"
LOGITS = "logits.npz"
LENGTH = 48  # Beyond the 16 positions of the original context of llama3's fixture.
SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16)
STRETCHED = dict(
  rope_type="llama3", rope_theta=1000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = dict(rope_type="yarn", rope_theta=1e3, factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=1.0)

# By name: the family, fields of its config, and arguments of save_pretrained.
CHECKPOINTS = {
  "llama3": ("Llama", dict(rope_parameters=STRETCHED, max_position_embeddings=128, rms_norm_eps=1e-5), {}),
  "smollm2": ("Llama", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e5)), {}),
  "qwen2": ("Qwen2", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)), {}),
  "qwen2.5": ("Qwen2", dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)), dict(max_shard_size="40KB")),
  "qwen3": ("Qwen3", dict(tie_word_embeddings=True, head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e6)), {}),
  "qwen3_moe": ("Qwen3Moe", MIXTURE | dict(norm_topk_prob=True), {}),
  "qwen3_moe_mixed": (
    "Qwen3Moe",
    MIXTURE
    | dict(
      num_hidden_layers=4,
      decoder_sparse_step=2,
      mlp_only_layers=[3],
      norm_topk_prob=False,
      moe_intermediate_size=8,
      head_dim=8,
      intermediate_size=32,
    ),
    dict(save_original_format=False),  # The experts of a layer fused into one tensor.
  ),
  # Windows that are shorter than the sequence, in some layers or in all.
  "qwen2_window": (
    "Qwen2",
    dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=7, max_window_layers=1, rope_parameters=YARN | dict(truncate=False)),
    {},
  ),
  "mistral": ("Mistral", dict(sliding_window=9, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)), {}),
  "olmo2": ("Olmo2", dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)), {}),
  "olmo3": (
    "Olmo3",
    dict(
      num_hidden_layers=4, sliding_window=8, max_position_embeddings=128,
      rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=1e3), full_attention=YARN),
    ),
    {},
  ),
  "gemma3": (
    "Gemma3",
    dict(
      num_hidden_layers=3, sliding_window=8, sliding_window_pattern=3, head_dim=16, query_pre_attn_scalar=24,
      rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=1e2),
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e4),
      ),
    ),
    {},
  ),
}  # fmt: skip
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
BFLOAT16 = ("qwen2",)
OLD_LAYOUT = ("smollm2",)


def draw(model) -> None:
  """Draws weights so that none has its neutral value, which could hide an error."""
  import torch

  with torch.no_grad():
    for name, weight in model.named_parameters():
      if "norm" in name and name.endswith("weight"):
        neutral = 0 if "Gemma" in type(model).__name__ else 1
        weight.copy_(neutral + 0.2 * torch.randn_like(weight))
      elif weight.ndim == 1:
        weight.copy_(0.3 * torch.randn_like(weight))
      else:
        fan_in = weight[0].numel() if weight.ndim == 5 else weight.shape[-1]  # Five axes: patches.
        weight.copy_(1.5 * torch.randn_like(weight) * (0.04 if "embed" in name and weight.ndim == 2 else fan_in**-1.0) ** 0.5)


def logits_of(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
  """Computes the logits with transformers, in float32 for any stored dtype."""
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
  with torch.no_grad():
    return model(torch.from_numpy(tokens).long()).logits.numpy()


def to_old_layout(path: pathlib.Path) -> None:
  """Rewrites a config in the layout of transformers 4."""
  raw = json.loads(path.read_text())
  rope = raw.pop("rope_parameters")
  raw |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": raw.pop("dtype"), "transformers_version": "4.42.3"}
  path.write_text(json.dumps(raw, indent=2) + "\n")


def record(name: str) -> None:
  """Records a checkpoint and its logits."""
  import torch
  import transformers

  family, fields, how = CHECKPOINTS[name]
  torch.manual_seed(list(CHECKPOINTS).index(name))
  config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**(SIZES | dict(bos_token_id=1, eos_token_id=2) | fields))
  model = getattr(transformers, f"{family}ForCausalLM")(config)
  draw(model)
  if name in BFLOAT16:
    model = model.to(torch.bfloat16)
  folder = FOLDER / name
  shutil.rmtree(folder, ignore_errors=True)
  model.save_pretrained(folder, **how)
  if name in OLD_LAYOUT:
    to_old_layout(folder / "config.json")
  tokens = np.random.default_rng(0).integers(SIZES["vocab_size"], size=(1, LENGTH)).astype(np.int32)
  logits = logits_of(folder, tokens)
  assert logits.std() > 0.5, f"{name}: logits of deviation {logits.std():.2f} prove little"
  np.savez(folder / LOGITS, tokens=tokens, logits=logits)
  size = sum(file.stat().st_size for file in folder.iterdir())
  print(
    f"{name:<16} {size / 1e3:6.1f} kB, logits with deviation {logits.std():.2f}, files {sorted(file.name for file in folder.iterdir())}"
  )


def check(name: str) -> None:
  """Compares the logits with those of transformers, before and after a round trip."""
  from jaxrl_llm.models.files.loading import load, logits
  from jaxrl_llm.models.files.saving import save_hf

  expected = np.load(FOLDER / name / LOGITS)
  model, params = load(FOLDER / name)
  ours = np.asarray(logits(model, params, expected["tokens"]))
  with tempfile.TemporaryDirectory() as temporary:
    saved = pathlib.Path(temporary) / name
    save_hf(saved, model, params)
    theirs = logits_of(saved, expected["tokens"])
  errors = [np.abs(x - expected["logits"]).max() for x in (ours, theirs)]
  print(f"{name:<16} largest error of our logits {errors[0]:.1e}, of transformers' after save_hf {errors[1]:.1e}")
  assert max(errors) < 2e-4


def main(description: str, names: Iterable[str], record: Callable[[str], None], check: Callable[[str], None]) -> None:
  """Records or checks all checkpoints, as the command line says."""
  parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--check", action="store_true", help="compare, and write nothing")
  parser.add_argument("names", nargs="*", help="only these; default all")
  arguments = parser.parse_args()
  for name in arguments.names or names:
    (check if arguments.check else record)(name)


if __name__ == "__main__":
  main(__doc__, CHECKPOINTS, record, check)
