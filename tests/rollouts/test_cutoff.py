"""Conversations that are cut and go on: none is lost, and no delay changes a token."""

import json
import random
import time

import numpy as np
import pytest

from jaxrl_llm.rollouts import carried as carried_lib
from jaxrl_llm.rollouts.arrivals import wait_for
from jaxrl_llm.rollouts.cutoff import Cutoff
from jaxrl_llm.rollouts.environments import Environment, Reply
from jaxrl_llm.rollouts.jobs import Conversation, Job
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason
from tests.rollouts.talks import COUNTING, STOPS
from tests.rollouts.test_turns import DRAWS, SIZE, begin, engine_of

__all__ = ["engine_of"]  # A fixture.

GROUP, ENOUGH, NUM = 2, 1, 3  # Learns from one of three groups.


def steps(engine, num_steps, environment=COUNTING, draws=DRAWS, at_once=None, **rules):
  """Returns the groups, the conversations and the rows learned from of each step, of one policy."""
  carried, new, result = carried_lib.NO_GROUPS, iter(range(10, 99)), []
  for step in range(num_steps):
    examples = [{"prompt": str(next(new))} for _ in range(NUM - len(carried.examples))]
    seeds = [100 * int(example["prompt"]) + i for example in examples for i in range(GROUP)]
    groups = carried_lib.join(carried, examples, seeds, step=step)
    job = Job(groups.examples, GROUP, groups.seeds, f"step {step}", draws, at_once, groups.conversations, ENOUGH)
    played = wait_for(begin(engine, environment, job, **rules), job).played
    rows, carried = carried_lib.take(groups, played, num_groups=ENOUGH)
    result.append((groups, played, rows))
    carried = carried_lib.from_json(json.loads(json.dumps(carried_lib.to_json(carried))))
  return result


def whole(engine, draws=DRAWS, num=9, **rules):
  """Returns the conversations of `steps` drawn at once, by prompt."""
  examples = [{"prompt": str(i)} for i in range(10, 10 + num)]
  job = Job(examples, GROUP, [100 * int(x["prompt"]) + i for x in examples for i in range(GROUP)], "whole", draws)
  played = wait_for(begin(engine, job=job, **rules), job).played
  return {x["prompt"]: played[i * GROUP : (i + 1) * GROUP] for i, x in enumerate(examples)}


def parts(talk):
  """Returns what must be the same however a conversation is drawn."""
  return list(talk.tokens), list(talk.written), talk.turns, talk.reason, talk.failed


def texts_of(engine):
  """Returns settings whose turns end with two letters, which occur in the first turns."""
  draws, texts = DRAWS._replace(stop_ids=()), []
  for i, talk in enumerate(x for group in whole(engine, draws).values() for x in group):
    pairs = [pair for pair in zip(talk.tokens, talk.tokens[1:], strict=False) if max(pair) < 128][i % 4 :]
    texts += [bytes(pair).decode() for pair in pairs[:1]]
  return draws._replace(stops=tuple(texts))


@pytest.mark.parametrize("kind", ["ids", "texts"])
def test_conversations_drawn_in_parts_are_those_drawn_at_once(kind, engine_of):
  given = dict(draws=DRAWS) if kind == "ids" else dict(draws=texts_of(engine_of()), max_turns=1)
  reference, learned, in_midst, between = whole(engine_of(), **given), [], 0, 0
  for groups, played, rows in steps(engine_of(), 7, **given):
    lengths = {x["prompt"]: [sum(talk.written) for talk in reference[x["prompt"]]] for x in groups.examples}
    before = np.array([sum(talk.written) for talk in groups.conversations])
    ends = np.array([size for x in groups.examples for size in lengths[x["prompt"]]]) - before
    bound = np.sort(ends.reshape(NUM, GROUP).max(axis=1))[ENOUGH - 1]
    for i, talk in enumerate(played):
      one = reference[groups.examples[i // GROUP]["prompt"]][i % GROUP]
      assert sum(talk.written) == before[i] + min(bound, ends[i])
      if ends[i] <= bound:
        assert parts(talk) == parts(one)
      else:
        assert talk.reason == StopReason.UNFINISHED and list(talk.tokens) == one.tokens[: len(talk.tokens)]
        assert talk.turns == one.turns[: len(talk.turns)]
        end = talk.turns[-1].end + 1 if talk.turns else 0
        in_midst += any(talk.written[end:])
        between += bool(end) and not any(talk.written[end:])
      np.testing.assert_allclose(talk.logprobs, one.logprobs[: len(talk.tokens)], atol=1e-5)
    assert rows.tolist() == list(range(rows[0], rows[0] + GROUP))
    learned.append(groups.examples[rows[0] // GROUP]["prompt"])
  assert len(set(learned)) == 7 and in_midst > 3 and (between or kind == "texts"), (in_midst, between)


@pytest.mark.parametrize("slots, at_once", [(SIZE, None), (2, 2)])
def test_delays_and_rows_change_no_step(slots, at_once, engine_of):
  reference = steps(engine_of(), 4)
  delays = random.Random(slots)

  def step(state, turn):
    time.sleep(delays.choice((0, 0, 0.005, 0.05)))
    return COUNTING.step(state, turn)

  others = steps(engine_of(slots), 4, Environment(COUNTING.reset, step), at_once=at_once, num_threads=3)
  for (_, one, rows), (_, other, others_rows) in zip(reference, others, strict=True):
    assert list(map(parts, one)) == list(map(parts, other)) and np.array_equal(rows, others_rows)
    for a, b in zip(one, other, strict=True):
      np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_an_environment_of_few_steps_at_a_time_has_no_more_in_the_next_step(engine_of):
  running, most = [], []

  def step(state, turn):
    running.append(turn)
    most.append(len(running))
    time.sleep(random.choice((0.01, 0.1)))
    running.pop()
    return COUNTING.step(state, turn)

  steps(engine_of(), 6, Environment(COUNTING.reset, step, concurrency=2), num_threads=2)
  assert max(most) == 2


def test_an_environment_that_repeats_itself_badly_costs_its_sample(engine_of):
  replies = iter(range(100, 200))
  strange = Environment(lambda row: 0, lambda state, turn: (state, Reply((next(replies),))))
  causes = {}
  for groups, played, _ in steps(engine_of(), 3, strange, num_threads=1):
    for before, talk in zip(groups.conversations, played, strict=True):
      if before.turns and before.reason == StopReason.UNFINISHED:
        causes[talk.failed and talk.failed[0]] = talk
        assert list(talk.tokens) == list(before.tokens)[: len(talk.tokens)] and talk.reason == StopReason.ABORTED
  assert list(causes) == ["rewritten"] and "it replied to turn 1 in another way: (1" in causes["rewritten"].failed[1]

  slow = Environment(COUNTING.reset, lambda state, turn: (time.sleep(5 * ("again" in said)), COUNTING.step(state, turn))[1])
  said = []
  first = carried_lib.join(carried_lib.NO_GROUPS, [{"prompt": "1"}], [5, 6], step=0)
  turn = Turn("x", (100,), 0.0, 0)
  so_far = dict(tokens=(STOPS[0], 100), logprobs=(-1.0, 0.0), written=(True, False), turns=(turn,))
  begun = [talk._replace(**so_far) for talk in first.conversations]
  said.append("again")
  job = Job(first.examples, GROUP, first.seeds, "", DRAWS, None, begun, 1)
  played = wait_for(begin(engine_of(), slow, job, timeout_s=0.3), job).played
  assert [talk.failed[0] for talk in played] == ["timeout"] * 2 and played[0].turns == (turn,) and played[0].tokens == [STOPS[0]]


def test_groups_that_are_complete_already_need_no_draw(engine_of):
  engine = engine_of()
  (groups, played, rows), *_ = steps(engine, 1)
  complete = [talk for row, talk in enumerate(played) if row in rows]
  late = carried_lib.join(carried_lib.NO_GROUPS, groups.examples, groups.seeds, step=0).conversations
  job = Job(groups.examples, GROUP, groups.seeds, "", DRAWS, None, [*complete, *late[GROUP:]], 1)
  again = wait_for(begin(engine, job=job), job).played
  assert list(map(parts, again[:GROUP])) == list(map(parts, complete))
  assert all(talk.reason == StopReason.UNFINISHED and not talk.tokens for talk in again[GROUP:])
  assert not any(talk.computed_tokens for talk in again)


def test_the_cut_is_decided_as_soon_as_it_is_known():
  cutoff = Cutoff(6, group_size=2, enough=2)
  for sequence, drawn in enumerate([3, 5, 1]):
    cutoff.end(sequence, drawn)
  assert cutoff.bound is None and cutoff.certain([3, 5, 1, 2, 4, 0]) == 4
  cutoff.end(4, 7)
  cutoff.end(5, 2)
  assert cutoff.bound == 7 and not cutoff.is_decided and cutoff.certain([3, 5, 1, 6, 7, 2]) == 6
  cutoff.park(3)
  assert cutoff.is_decided and cutoff.certain([3, 5, 1, 8, 7, 2]) == 7


def test_a_checkpoint_restores_every_bit():
  routes = np.random.default_rng(0).integers(-1, 200, (5, 2, 3)).astype(np.int16)
  groups = carried_lib.join(carried_lib.NO_GROUPS, [{"prompt": "1", "level": 2}], [2**63 + 1, 3], step=4)
  talk = Conversation(
    0, [1], [5, 6, 7], [-np.float32(0.1).item(), 0.0, -1e-30], [True, False, True], (Turn("a", (6,), 0.1, 0),), StopReason.UNFINISHED,
    routes=routes, versions=(3, 0, 4),
  )  # fmt: skip
  failed = talk._replace(sequence=1, turns=(Turn("a", "b", 0.0, 0),), reason=StopReason.ABORTED, failed=("raised", "x"), routes=None)
  failed = failed._replace(versions=())
  groups = groups._replace(conversations=[talk, failed])
  again = carried_lib.from_json(json.loads(json.dumps(carried_lib.to_json(groups))))
  assert np.array_equal(again.conversations[0].routes, routes) and again.conversations[0].routes.dtype == np.int16
  without_routes = groups._replace(conversations=[talk._replace(routes=None), failed])
  assert again._replace(conversations=[x._replace(routes=None) for x in again.conversations]) == without_routes


def test_too_few_complete_groups_are_an_error():
  groups = carried_lib.join(carried_lib.NO_GROUPS, [{}, {}], [1, 2, 3, 4], step=0)
  done = Conversation(0, (), (1,), (0.0,), (True,), (Turn("", "", 0.0, 0),), StopReason.TOKEN)
  with pytest.raises(ValueError, match="found 1 complete groups of 2, expected 2 or more"):
    carried_lib.take(groups, [done, done, *groups.conversations[2:]], num_groups=2)
