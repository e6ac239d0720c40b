"""The tokenizer of a config: options of its template, and special tokens in the author's texts."""

import json

import pytest

from jaxrl_llm.config import changes, policy
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.pretrained.tokenizer_files import files_of
from jaxrl_llm.rewards.model import load_reward_tokenizer, notes_of
from jaxrl_llm.rewards.model.folder import NOTES
from tests.pretrained.chats import write_folder
from tests.runs import tiny_config

SHAPE = {
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
  "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 264, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
  "rope_theta": 1e4, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
  path = write_folder(tmp_path / "llama3", "llama3")
  (path / "config.json").write_text(json.dumps(SHAPE))
  return path


def tokenizer_of(folder, **fields):
  return policy.tokenizer(tiny_config("gspo", {"model.path": str(folder)} | {f"task.{name}": x for name, x in fields.items()}))


def prompt(tokenizer):
  return tokenizer.backend.decode(tokenizer.encode_prompt("1 <|eot_id|>"), skip_special_tokens=False)


def test_options_of_a_config_reach_the_template(folder):
  assert "Today: 26 Jul 2024\n" in prompt(tokenizer_of(folder))
  assert "Today: 27 Nov 2026\n" in prompt(tokenizer_of(folder, chat_options=("date_string=27 Nov 2026",)))
  assert "Today: 01 Jan 2030\n" in prompt(tokenizer_of(folder, chat_options=("strftime_now=2030-01-01",)))
  end = tokenizer_of(folder).eos_id
  counts = [tokenizer_of(folder, special_tokens=x).encode_prompt("1 <|eot_id|>").count(end) for x in (None, "text", "tokens")]
  assert counts == [2, 2, 3]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"chat_options": ("date_sting=x",)}, r"^config\.task\.chat_options\.date_sting: found .x., .*; did you mean .date_string."),
    ({"chat_options": ("x",)}, r"^task\.chat_options: found 'x', expected NAME=VALUE"),
    ({"chat_options": ("date_string=2026",)}, r"the chat template fails on .* \(TypeError"),
    ({"system": "Be <|eot_id|>"}, r"^task\.system: found '<\|eot_id\|>', which is text there and not the special token, expected none, or"),
    ({"chat": False, "prompt_template": "<|start_header_id|>{question}"}, r"^task\.prompt_template: found '<\|start_header_id\|>'"),
    ({"chat": False, "shot_template": "{prompt}<|eot_id|>"}, r"^task\.shot_template: found '<\|eot_id\|>'"),
  ],
)
def test_what_the_tokenizer_cannot_take(folder, fields, message):
  with pytest.raises(ValueError, match=message):
    tokenizer_of(folder, **fields)
  if "chat_options" not in fields:
    assert tokenizer_of(folder, special_tokens="tokens", **fields).special == ()


def test_a_run_goes_on_with_the_options_that_it_began_with():
  old, new = {"task.chat_options": ["a=1"]}, {"task.chat_options": ["a=2"], "task.special_tokens": "tokens"}
  assert [line.split(":")[0] for line in changes.refusals(old, new)] == ["config.task.chat_options", "config.task.special_tokens"]


def test_a_reward_model_reads_prompts_as_in_its_training(folder):
  options = {"date_string": "1 Jan 2030"}
  notes = notes_of(folder, chat=None, system="Judge.", chat_options=options, special_tokens="tokens")
  (folder / NOTES).write_text(json.dumps(notes))
  text = prompt(tokenizer := load_reward_tokenizer(folder, chat=None))
  assert "Today: 1 Jan 2030\n\nJudge." in text and tokenizer.special == ()
  assert prompt(load_reward_tokenizer(folder, chat=False)) == "1 <|eot_id|>"
  # As earlier versions wrote it.
  (folder / NOTES).write_text(json.dumps({"tokenizer": "folder", "chat": True, "system": None}))
  assert "26 Jul 2024" in prompt(load_reward_tokenizer(folder))


def test_an_exported_template_has_the_options_of_the_run(folder):
  for options, today in (((), "26 Jul 2024"), (("date_string=1 Jan 2030", "tools_in_user_message=False"), "1 Jan 2030")):
    tokenizer = tokenizer_of(folder, chat_options=options or None)
    with files_of(tokenizer) as made:
      # Whatever the day on which it is used.
      source, copy = (made / "chat_template.jinja").read_text(), load_tokenizer(made, chat_options={"strftime_now": "2031-01-01"})
    assert source != tokenizer.chat_template.source and f"Today: {today}\n" in prompt(copy)
    assert copy.encode_prompt("1") == tokenizer.encode_prompt("1")
