"""Conversations of a batch in progress, over an engine that does what a test says."""

from concurrent.futures import Future

import pytest

from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece
from jaxrl_llm.rollouts.drafts import Drafts
from jaxrl_llm.rollouts.jobs import Conversation, Draws, EngineError, Job
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason

JOB = Job([{}, {}], 1, [1, 2], "", Draws(32, 8, stop_ids=(0,)), enough=1)


class Engine:
  """An engine whose requests wait for `draw` and `complete`."""

  limits = EngineLimits(64, 8)

  def __init__(self):
    self.requests, self.pieces, self.futures, self.aborted = [], [], [], []
    self.submitting = lambda: None

  def submit(self, request, on_piece=None):
    number = len(self.requests)
    self.requests.append(request)
    self.pieces.append(on_piece)
    self.futures.append(Future())
    self.submitting()
    return Handle(self.futures[number], lambda: self.aborted.append(number))

  def draw(self, number, ids):
    self.pieces[number](Piece(ids, [-1.0] * len(ids)))

  def complete(self, number, ids, reason="stop"):
    self.futures[number].set_result(Decoded(ids, [-1.0] * len(ids), reason, 0, len(ids), 0))

  def update(self, params, version):
    pass

  def close(self):
    pass


def begin(job=JOB, **options):
  engine = Engine()
  drafts = Drafts(engine, job, **options)
  return engine, drafts, [drafts.ask(draft, 9).completion for draft in drafts.all]


def handed(drafts):
  return {talk.sequence: talk for part in drafts for talk in part}


def test_what_is_drawn_behind_the_cut_is_aborted_and_cut_off():
  ended = []
  engine, drafts, (one, other) = begin(ended=ended.append)
  engine.draw(1, [5, 6, 7, 8])
  engine.complete(0, [5, 6, 0])
  assert drafts.take(drafts.all[0], one) == StopReason.TOKEN and engine.aborted == []
  drafts.end(drafts.all[0], StopReason.TOKEN)
  assert engine.aborted == [1] and not drafts.over.is_set()
  engine.complete(1, [5, 6, 7, 8], "aborted")
  assert drafts.take(drafts.all[1], other) is None and drafts.over.is_set() and ended == drafts.all
  talks = handed(drafts)
  assert (talks[0].tokens, talks[0].reason) == ([5, 6, 0], StopReason.TOKEN)
  assert (talks[1].tokens, talks[1].reason, talks[1].discarded_tokens) == ([5, 6, 7], StopReason.UNFINISHED, 1)


@pytest.mark.parametrize("waits", [False, True])
def test_a_reply_behind_the_cut_is_waited_for_only_on_request(waits):
  engine, drafts, (one, other) = begin(waits=waits)
  engine.complete(1, [5, 6, 7, 0])
  assert drafts.take(drafts.all[1], other) == StopReason.TOKEN
  engine.complete(0, [5, 0])
  drafts.end(drafts.all[0], drafts.take(drafts.all[0], one))
  assert drafts.all[1].ended == drafts.over.is_set() == (not waits)
  assert drafts.ask(drafts.all[1], 9) is None and handed(drafts)[1].tokens == [5, 6]


def test_a_lost_turn_behind_the_cut_leaves_what_came_before_it():
  engine, drafts, (one, other) = begin()
  engine.draw(1, [5] * 9)
  engine.futures[1].set_exception(FloatingPointError("nan"))
  assert drafts.take(drafts.all[1], other) == StopReason.ABORTED
  assert drafts.all[1].failed == ("not_finite", "the policy: FloatingPointError: nan")
  drafts.end(drafts.all[1], StopReason.ABORTED)
  engine.complete(0, [5, 6, 0])
  drafts.end(drafts.all[0], drafts.take(drafts.all[0], one))
  talk = handed(drafts)[1]
  assert (talk.tokens, talk.reason, talk.failed, talk.discarded_tokens) == ([], StopReason.UNFINISHED, None, 0)


def test_without_a_cut_each_is_handed_over_at_once_and_no_piece_is_asked_for():
  engine, drafts, (one, _) = begin(JOB._replace(enough=None))
  engine.complete(0, [5, 0])
  drafts.end(drafts.all[0], drafts.take(drafts.all[0], one))
  assert engine.pieces == [None, None] and [talk.sequence for talk in next(iter(drafts))] == [0] and not drafts.over.is_set()


def test_what_earlier_steps_have_ended_is_handed_over_and_the_rest_goes_on():
  turn = Turn("a", "", 0.0, 0)
  done = Conversation(0, [1], [0], [-1.0], [True], (turn,), StopReason.TOKEN, cached_tokens=3, discarded_tokens=4)
  begun = done._replace(sequence=1, tokens=[0, 5, 6], logprobs=[-1.0, 0.0, -1.0], written=[True, False, True], reason=StopReason.UNFINISHED)
  drafts = Drafts(Engine(), JOB._replace(begun=[done, begun]))
  assert drafts.park(drafts.all[1]) and drafts.over.is_set()
  # The program was not told of its turns again.
  assert handed(drafts) == {0: done._replace(cached_tokens=0, discarded_tokens=0), 1: begun._replace(cached_tokens=0, discarded_tokens=0)}


def test_an_error_and_a_late_close_abort_what_is_drawn():
  engine, drafts, (one, _) = begin()
  drafts.fail(OverflowError("no engine"))
  with pytest.raises(EngineError, match="OverflowError: no engine"):
    handed(drafts)
  assert engine.aborted == [0, 1] and drafts.over.is_set()
  engine.complete(0, [], "aborted")
  assert drafts.take(drafts.all[0], one) is None
  engine = Engine()
  drafts = Drafts(engine, JOB)
  engine.submitting = drafts.close
  drafts.ask(drafts.all[0], 9)
  assert engine.aborted == [0]


def test_an_engine_that_is_closed_is_an_error():
  engine, drafts, (one, _) = begin()
  engine.complete(0, [], "aborted")
  with pytest.raises(RuntimeError, match="the decoding engine was closed"):
    drafts.take(drafts.all[0], one)
