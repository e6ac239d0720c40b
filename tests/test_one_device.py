"""Published models and sets on one device: whole runs of cut models with random weights."""

import json

import jax
import pytest

from configs import common, gspo
from jaxrl_llm.config import check
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.models.files.saving import save_hf
from tests.marks import few
from tests.runs import ROOT, rows, run_here

NAMES = tuple(common.ONE_DEVICE)
TOKENIZER = ROOT / "tests/pretrained/tokenizers/qwen3"
SHAPES = {"qwen3-0.6b-gsm8k": "qwen3-0.6b", "qwen2.5-1.5b-math": "qwen2.5-1.5b", "qwen3-8b-lora": "qwen3-8b"}
NARROW = dict(d_model=32, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=64)
# Few and short, and with a reward that differs between responses, none of which is right.
SMALL = {
  "num_steps": 2, "rollout.num_prompts": 4, "rollout.group_size": 4, "rollout.max_new_tokens": 16, "learner.updates_per_rollout": 2,
  "learner.row_tokens": 288, "learner.row_buckets": None, "eval.num_prompts": 4, "eval.batch_prompts": 4, "eval.every": 2,
  "log.tensorboard": False, "log.num_table_rows": 0, "reward.at_random": 0.5, "learner.warmup_steps": 0,
}  # fmt: skip


def problems(folder, task):
  """Writes sums in the published format of a set."""
  for split, numbers in (("train", range(40)), ("test", range(40, 50))):
    sums = [(f"What is {n} + {2 * n + 1}?", 3 * n + 1) for n in numbers]
    if task == "gsm8k":
      records = [
        {"question": question, "answer": f"They are <<{n}={n}>>{n}.\n#### {n}"} for question, n in sums
      ]
    else:
      records = [
        {"problem": question, "level": "Level 1", "type": "Algebra", "solution": f"It is $\\boxed{{{n}}}$."}
        for question, n in sums
      ]
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
  return str(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_valid(name, tmp_path):
  config = gspo.get_config(name)
  assert config.model.path.startswith("hub:Qwen/")
  save_hf(tmp_path / "model", *cut(name, **NARROW), tokenizer_from=TOKENIZER)
  config.model.path = str(tmp_path / "model")
  assert check.config_problems(config) == []


def cut(name, **sizes):
  """Makes two layers of a preset's model, with random weights."""
  model = make_model(preset(SHAPES[name])._replace(num_layers=2, **sizes))
  return model, jax.jit(model.init)(jax.random.key(0))


def run_cut(name, tmp_path, *made, tokenizer=TOKENIZER):
  """Runs a preset with a model of two layers, and returns the summary."""
  save_hf(tmp_path / "model", *made, dtype="bfloat16", tokenizer_from=tokenizer)
  config = gspo.get_config(name)
  (tmp_path / "problems").mkdir()
  own = {
    "model.path": str(tmp_path / "model"),
    "task.source": problems(tmp_path / "problems", config.task.name),
  }
  config.update_from_flattened_dict(SMALL | own | {"rollout.prompt_buckets": (256,)})
  return run_here(config, tmp_path / "run")


@pytest.mark.parametrize("name", few(NAMES, rest="slow", by_hand=(0, 1)))
def test_a_cut_model_runs_to_its_end(name, tmp_path):
  summary = run_cut(name, tmp_path, *cut(name, **NARROW))
  assert summary["status"] == "finished" and summary["num_steps"] == 2 and summary["skipped_steps"] == 0
  assert all(row["actor/grad_norm"] > 0 for row in rows(tmp_path / "run", "rl"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_two_layers_of_published_width_run_to_their_end(name, tmp_path):
  summary = run_cut(name, tmp_path, *cut(name))
  assert summary["status"] == "finished" and summary["num_steps"] == 2
