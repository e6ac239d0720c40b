"""Tests of the command that describes a checkpoint."""

import os
import shutil
import subprocess
import sys

import pytest

from jaxrl_llm.models.inspect import describe_checkpoint, main
from tests.models.recorded import CHECKPOINTS
from tests.runs import ROOT


def rows(path):
  return {line[:14].strip(): line[14:] for line in describe_checkpoint(str(path)).splitlines()}


def test_a_dense_model():
  assert rows(CHECKPOINTS / "llama3") == {
    "path": str(CHECKPOINTS / "llama3"),
    "family": "LlamaForCausalLM",
    "layers": "2, width 32, feed-forward 48",
    "heads": "4 for queries, 2 for keys and values, width 8",
    "experts": "none",
    "vocabulary": "96, head of its own",
    "context": "128 tokens, rotary base 1000, stretched 8 times from 16 (llama3)",
    "parameters": "21,664",
    "stored": "float32: 21 tensors, 86,656 bytes; 1 file",
    "tokenizer": "none",
    "chat template": "none",
  }


def test_a_mixture_in_bfloat16_and_several_files(tmp_path):
  mixture = rows(CHECKPOINTS / "qwen3_moe_mixed")
  assert mixture["experts"] == "4 of width 8 in 1 of 4 layers, 2 per token, gates not normalised"
  total, active = (int(words.split()[0].replace(",", "")) for words in mixture["parameters"].split(", "))
  assert total - active == 2 * 3 * 32 * 8
  assert rows(CHECKPOINTS / "qwen2")["stored"] == "bfloat16: 26 tensors, 37,440 bytes; 1 file"
  assert rows(CHECKPOINTS / "qwen2.5")["stored"].endswith("; 3 files")


def test_tokenizer_and_chat_template(tmp_path):
  folder = shutil.copytree(CHECKPOINTS / "smollm2", tmp_path / "with")
  (folder / "tokenizer.json").write_text("{}")
  (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
  assert [rows(folder)[name] for name in ("tokenizer", "chat template")] == ["tokenizer.json", "tokenizer_config.json"]
  (folder / "chat_template.jinja").write_text("{{ messages }}")
  assert rows(folder)["chat template"] == "chat_template.jinja"


def test_the_command_starts_no_accelerator():
  # Any use of a device would fail.
  environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
  command = [sys.executable, "-m", "jaxrl_llm.models.inspect", str(CHECKPOINTS / "qwen3")]
  done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert (done.returncode, done.stderr) == (0, "") and "family        Qwen3ForCausalLM" in done.stdout


@pytest.mark.parametrize(("damage", "words"), [(True, "config.json: found a file that is not JSON"), (False, "nowhere")])
def test_bad_input_is_one_line_and_status_2(damage, words, tmp_path, capsys):
  path = "nowhere"
  if damage:
    path = shutil.copytree(CHECKPOINTS / "smollm2", tmp_path / "damaged")
    (path / "config.json").write_text("{")
  assert main([str(path)]) == 2
  captured = capsys.readouterr()
  assert captured.out == "" and words in captured.err and captured.err.count("\n") == 1


def test_a_model_with_a_tower():
  described = rows(CHECKPOINTS.parent / "pictures" / "qwen3_vl_moe")
  assert described["family"] == "Qwen3VLMoeForConditionalGeneration"
  assert described["pictures"] == "tower of 4 layers, width 16, patches of 4, features behind 3 layers"
