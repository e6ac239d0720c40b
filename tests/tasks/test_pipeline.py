"""The stream is deterministic and resumes anywhere, and no prompt is ever truncated."""

import itertools
import json
from unittest import mock

import numpy as np
import pytest

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.chat_template import ChatTemplate, render
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.rollouts.environments import make
from jaxrl_llm.tasks import pipeline
from tests.pretrained.chats import write_folder

TOKENIZER = ByteTokenizer()
ROWS = [{"question": str(i), "prompt": f"{i}\n"} for i in range(10)]


def take(iterator, n):
  return list(itertools.islice(iterator, n))


def questions(batches):
  return [row["question"] for batch in batches for row in batch]


def test_each_epoch_has_every_row_once_in_a_new_order():
  # Batches span epochs.
  seen = questions(take(pipeline.example_iterator(ROWS, batch_size=4, seed=1), 10))
  epochs = [tuple(seen[i: i + 10]) for i in range(0, 40, 10)]
  assert len(seen) == 40
  assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
  assert len(set(epochs)) == 4


def test_the_seed_decides_the_order():
  streams = [questions(take(pipeline.example_iterator(ROWS, batch_size=3, seed=seed), 6)) for seed in (0, 0, 1)]
  assert streams[0] == streams[1] != streams[2]


def test_a_stream_resumes_from_the_state_before_any_batch():
  whole = take(pipeline.example_iterator(ROWS, batch_size=3, seed=5), 24)
  iterator = pipeline.example_iterator(ROWS, batch_size=3, seed=5)
  states = []
  for batch in whole[:12]:
    states.append(json.dumps(iterator.get_state()))
    assert next(iterator) == batch
  for i, state in enumerate(states):
    resumed = pipeline.example_iterator(ROWS, batch_size=3, seed=5)
    resumed.set_state(json.loads(state))
    assert json.dumps(resumed.get_state()) == state
    assert take(resumed, 12) == whole[i: i + 12]
  iterator.set_state(json.loads(states[2]))  # Backwards too, with an iterator in use.
  assert take(iterator, 3) == whole[2:5]


def test_a_batch_larger_than_the_source_is_full():
  (batch,) = take(pipeline.example_iterator(ROWS[:3], batch_size=8, seed=0), 1)
  assert len(batch) == 8


def test_changing_a_row_does_not_change_the_source():
  rows = [{"question": "a"}]
  iterator = pipeline.example_iterator(rows, batch_size=1, seed=0)
  next(iterator)[0]["question"] = "b"
  assert next(iterator) == [{"question": "a"}] and rows == [{"question": "a"}]


@pytest.mark.parametrize("rows, batch_size", [([], 4), (ROWS, 0), (ROWS, -1)])
def test_no_rows_or_no_batch(rows, batch_size):
  with pytest.raises(ValueError, match="expected at least 1"):
    pipeline.example_iterator(rows, batch_size=batch_size, seed=0)


@pytest.mark.parametrize("buckets", [(4, 8, 16), (16, 8, 4)])
# The begin token takes one more slot.
@pytest.mark.parametrize("longest, width", [(1, 4), (3, 4), (4, 8), (7, 8), (8, 16), (15, 16)])
def test_prompts_get_the_smallest_bucket_that_fits_the_longest(buckets, longest, width):
  examples = [{"prompt": "x" * longest}, {"prompt": "y"}]
  ids, mask = pipeline.encode_prompts(examples, TOKENIZER, buckets=buckets)
  assert ids.shape == mask.shape == (2, width)
  assert ids.dtype == np.int32 and mask.dtype == bool
  for row, row_mask, example in zip(ids, mask, examples, strict=True):
    n = len(example["prompt"]) + 1
    assert row_mask.tolist() == [False] * (width - n) + [True] * n
    assert row[row_mask].tolist() == TOKENIZER.encode(example["prompt"], add_bos=True)
    assert (row[~row_mask] == TOKENIZER.pad_id).all()


def test_a_prompt_that_fits_no_bucket():
  examples = [{"prompt": "short"}, {"prompt": "long" * 100}]
  with pytest.raises(ValueError) as caught:
    pipeline.encode_prompts(examples, TOKENIZER, buckets=(8, 16))
  message = str(caught.value)
  assert message.startswith("rollout.prompt_buckets: found a prompt of 401 tokens ('longlong")
  assert "expected at most 16; add a bucket of 408" in message and len(message) < 250


def test_no_prompts_at_all():
  ids, mask = pipeline.encode_prompts([], TOKENIZER, buckets=(8,))
  assert ids.shape == mask.shape == (0, 8)


def test_demonstrations_end_with_the_stop_token(task):
  rows = task.demonstrations[:50]
  for row, (prompt, response, written) in zip(rows, pipeline.encode_demonstrations(rows, task.tokenizer), strict=True):
    assert written == [True] * len(response)
    assert prompt[0] == task.tokenizer.bos_id and response[-1] in task.tokenizer.stop_ids
    assert task.tokenizer.decode(prompt) == row["prompt"] and task.tokenizer.decode(response) == row["response"]


def test_prompt_lengths(task):
  assert max(pipeline.prompt_lengths(task.train, task.tokenizer)) == 9
  assert pipeline.prompt_lengths([{"prompt": "1+2"}, {"prompt": ""}], task.tokenizer) == [4, 1]


def test_a_tools_reply_in_a_demonstration_is_read_but_not_imitated():
  rows = [{"prompt": "", "response": "<<1+1=2>> and <<2+2=4>>\n#4"}]
  ((_, response, written),) = pipeline.encode_demonstrations(rows, TOKENIZER, replies=make("calculator").replies)
  assert TOKENIZER.decode(response) == rows[0]["response"]
  assert bytes(i for i, own in zip(response, written, strict=True) if not own) == b"2>>4>>"
  assert written[-1], "the end of the response is to be imitated"


def test_a_reply_is_a_message_if_there_is_a_template():
  source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
  source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
  tokenizer = mock.Mock(chat_template=ChatTemplate(source, "a/folder", {}), eos_id=7, encode=lambda text: list(text.encode()))
  tokenizer.backend.id_to_token = {7: "<|im_end|>"}.__getitem__
  text = bytes(pipeline.encode_reply("42", tokenizer, is_message=True)).decode()
  assert text == "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
  assert pipeline.encode_reply("42", tokenizer, is_message=False) == list(b"42")
  # The conversation built turn by turn is the one that the template writes at once.
  said = [{"role": "user", "content": "6 * 7"}, {"role": "assistant", "content": "hm"}]
  whole = render(tokenizer.chat_template, [*said, {"role": "user", "content": "42"}])
  assert render(tokenizer.chat_template, said[:1]) + "hm<|im_end|>" + text == whole
  tokenizer.chat_template = ChatTemplate("{{ messages[0].content }}", "a/folder", {})
  with pytest.raises(ValueError, match="leaves out a message"):
    pipeline.encode_reply("42", tokenizer, is_message=True)


def test_what_prompts_hold_by_the_checkpoint(tmp_path):
  load = lambda **options: load_tokenizer(write_folder(tmp_path / "llama3", "llama3"), **options)
  rows = [{"prompt": text} for text in ("1", "a<|eot_id|>", "<|im_end|>", "<|eot_id|> <|begin_of_text|>")]
  date, names = pipeline.prompt_notes(rows, load())
  assert "reads the date 2024-07-26" in date
  assert "2 of the first 4 spell special tokens, such as '<|eot_id|>', as text (task.special_tokens)" in names
  assert pipeline.prompt_notes(rows[:1], load(chat_options={"date_string": "today"})) == []
  assert pipeline.prompt_notes(rows, load(special_tokens="tokens"))[1:] == [] == pipeline.prompt_notes(rows, TOKENIZER)
