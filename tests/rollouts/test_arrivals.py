"""A batch that is graded in parts while the rest is drawn is the batch that is graded at once."""

import numpy as np

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.outcome import Outcome
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts.arrivals import drawn_of, wait_for
from jaxrl_llm.rollouts.jobs import Conversation, Draws, Job
from jaxrl_llm.types import StopReason
from tests.rollouts.players import Handing, completions
from tests.rollouts.test_batch import EXAMPLES, TERMS, make_rollouts

TOKENIZER = ByteTokenizer()
JOB = Job(EXAMPLES, 2, range(4), "", Draws(4, 5, stop_ids=(TOKENIZER.eos_id,)))


def responses_with(reasons):
  """Returns handmade rollouts as responses, in views of their arrays."""
  rollouts, responses = make_rollouts(), []
  for i, reason in enumerate(reasons):
    here = slice(int(rollouts.mask[i].sum()))
    ids, text = rollouts.tokens[i, here], TOKENIZER.decode(rollouts.tokens[i, here].tolist())
    responses.append(Conversation(i, (), ids, rollouts.logprobs[i, here], rollouts.mask[i, here], (), StopReason(reason), text=text))
  return responses


def batch_of(gathered, terms):
  drawn, metrics = drawn_of(gathered, JOB, TOKENIZER, np.arange(4), prompt_buckets=(5,))
  return batch_lib.assess(drawn.rollouts, drawn.responses, drawn.examples, rewards=terms, graded=drawn.graded), metrics


def test_columns_become_the_rollouts_they_came_from():
  batch, _ = batch_of(wait_for(Handing(responses_with([1, 1, 1, 0])), JOB), TERMS)
  expected = make_rollouts()
  for name in ("prompts", "prompt_mask", "tokens", "mask", "stopped"):
    np.testing.assert_array_equal(getattr(batch.rollouts, name), getattr(expected, name), err_msg=name)
  np.testing.assert_array_equal(batch.rollouts.logprobs, np.where(expected.mask, expected.logprobs, 0))
  assert batch.rollouts.written is None and [*batch.completions] == completions(expected, TOKENIZER.decode)


def test_parts_give_the_same_batch():
  """In any order of finishing, each response is graded once, with its own example."""
  talks, asked = responses_with([1, 1, 1, 0]), []

  def watched(completion, example):
    asked.append((completion.text, example["answer"]))
    return TERMS[0].fn(completion, example)

  terms = [WeightedReward("right", watched), TERMS[1]]
  gathered = wait_for(Handing([talks[2]], [talks[3], talks[0]], [talks[1]]), JOB, rewards=terms)
  # The last part is graded later: nothing is drawn meanwhile.
  assert asked == [("#9", "9"), ("9999", "9"), ("#2", "2")]
  assert gathered.graded.failed.tolist() == [None, "pending", None, None]
  batch, metrics = batch_of(gathered, terms)
  assert len(asked) == 4 and asked[-1] == ("#3", "2") and metrics["perf/reward_overlap_s"] > 0
  whole, _ = batch_of(wait_for(Handing(talks), JOB), TERMS)
  assert batch.graded.totals.tolist() == whole.graded.totals.tolist() and batch.graded.parts.keys() == whole.graded.parts.keys()
  assert [*batch.completions] == [*whole.completions] and batch.rollouts.tokens.tolist() == whole.rollouts.tokens.tolist()


def test_few_responses_of_a_large_batch_wait_for_others():
  """Each call of a reward costs time, so a batch is graded in at most eight parts."""
  calls, first = [], responses_with([1])[0]

  def counted(responses, examples):
    calls.append(len(responses))
    return [Outcome(1.0)] * len(responses)

  terms = [WeightedReward("counted", None, batch_fn=counted)]
  job = JOB._replace(examples=EXAMPLES * 8, seeds=range(32))
  wait_for(Handing(*([first._replace(sequence=i)] for i in range(32))), job, rewards=terms)
  assert calls == [4] * 7


def test_unfinished_responses_are_not_graded():
  talks = responses_with([1, 1, StopReason.UNFINISHED, 0])
  gathered = wait_for(Handing(talks[2:], talks[:2]), JOB, rewards=TERMS)
  assert gathered.graded.failed.tolist() == ["pending", "pending", "pending", None]
  drawn, _ = drawn_of(gathered, JOB, TOKENIZER, np.array([2, 3]), prompt_buckets=(5,))
  assert drawn.graded.failed.tolist() == ["pending", None] and drawn.examples == EXAMPLES[1:]
  assert [response.text for response in drawn.responses] == ["#9", "9999"]
