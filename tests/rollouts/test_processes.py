"""A rollout batch in two real processes: each reads the texts of the responses that it grades."""

import json

import numpy as np

from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.mesh import make_mesh
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rollouts import arrivals
from jaxrl_llm.rollouts.batch import assess
from jaxrl_llm.rollouts.jobs import Draws, Job
from jaxrl_llm.rollouts.sweeps import Sweep
from jaxrl_llm.types import Rollouts, StopReason
from tests.runs import two_processes

TEXTS = ["one", "2", "three", "four", "5", "six", "seven", "8"]


class Noting(ByteTokenizer):
  """A tokenizer that notes what it decodes."""

  decoded: list[str] = []  # noqa: RUF012

  def decode(self, ids):
    """Decodes ids and notes the text."""
    self.decoded.append(super().decode(ids))
    return self.decoded[-1]


def graded():
  """Draws a batch from a stub and grades it; returns the batch and the texts that were decoded."""
  tokenizer, examples = Noting(), [{"prompt": letter} for letter in "abcd"]
  ids = [[*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS]
  mask = np.arange(8) < np.array([[len(x)] for x in ids])
  tokens = np.array([x + [tokenizer.pad_id] * (8 - len(x)) for x in ids], np.int32)
  prompts = np.repeat(np.array([tokenizer.encode(x["prompt"], add_bos=True) for x in examples], np.int32), 2, axis=0)
  logprobs, reasons = np.where(mask, -0.5, 0).astype(np.float32), np.full(8, StopReason.TOKEN, np.int8)
  drawn = Rollouts(prompts, np.ones(prompts.shape, bool), tokens, mask, logprobs, np.ones(8, bool), raw_logprobs=logprobs, reasons=reasons)
  job = Job(examples, 2, list(range(8)), "", Draws(8, 2, stop_ids=tokenizer.stop_ids))
  sweep = Sweep({}, job, sample=lambda *_: drawn, mesh=make_mesh(), tokenizer=tokenizer, prompt_buckets=(2,))
  batch, _ = arrivals.gather(sweep, job, tokenizer, prompt_buckets=(2,))
  rewards = [WeightedReward("length", lambda completion, example: len(completion.text))]
  return assess(batch.rollouts, batch.responses, examples, rewards=rewards), [*tokenizer.decoded]


def tell():
  """Grades in one of two processes, and prints what it has read as JSON."""
  hosts.join_processes()
  batch, decoded = graded()
  print(json.dumps({"decoded": decoded, "rewards": batch.graded.totals.tolist(), "all": [x.text for x in batch.completions]}))


def test_each_process_decodes_what_it_grades():
  both = two_processes("from tests.rollouts.test_processes import tell; tell()")
  assert [x.returncode for x in both] == [0, 0], both
  first, second = (json.loads(x.stdout.splitlines()[-1]) for x in both)
  assert first["decoded"] == TEXTS[::2] and second["decoded"] == TEXTS[1::2]
  assert first["rewards"] == second["rewards"] == [len(text) for text in TEXTS]
  assert first["all"] == second["all"] == TEXTS, "the others can still be read"
