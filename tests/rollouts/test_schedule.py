"""Tests of what a run writes down of its draws, and of the queue that draws them again."""

import threading
import time
from concurrent.futures import Future

import pytest

from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece, ReplayLost, Request
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rollouts import schedule
from jaxrl_llm.rollouts.arrivals import wait_for
from jaxrl_llm.rollouts.drawing_queue import DrawingQueue
from jaxrl_llm.rollouts.jobs import Conversation, Draws, Job, turn_seed
from jaxrl_llm.rollouts.schedule import Batch, ReplayDiffersError, Schedule
from jaxrl_llm.rollouts.singles import play_singles
from jaxrl_llm.types import StopReason

BATCHES = [Batch(step, 0, "aa", step + 7, ((((step, 3),), ((step, 1), (step + 1, 2))), ())) for step in range(4)]


def talk(sequence, tokens):
  size = len(tokens)
  return Conversation(sequence, (), tokens, (0.0,) * size, (True,) * size, (), StopReason.LENGTH)


def write(folder, batches, end=""):
  (folder / schedule.FILE).write_text("".join(f"{schedule.to_line(batch)}\n" for batch in batches) + end)


def test_batches_survive_the_file(tmp_path):
  assert schedule.read(tmp_path) == []
  write(tmp_path, BATCHES)
  assert schedule.read(tmp_path) == BATCHES


def test_a_line_that_was_cut_is_left_out_and_another_damage_is_named(tmp_path):
  write(tmp_path, BATCHES[:2], end=schedule.to_line(BATCHES[2])[:-4])
  assert schedule.read(tmp_path) == BATCHES[:2]
  for damaged in ("{", '{"step": 1}', "[]", '{"step":1,"draw":0,"settings":"","tokens":1,"turns":[[[1]]]}'):
    (tmp_path / schedule.FILE).write_text(f"{damaged}\n{schedule.to_line(BATCHES[0])}\n")
    with pytest.raises(ValueError, match=r"schedule\.jsonl: line 1: "):
      schedule.read(tmp_path)


def test_what_comes_behind_the_checkpoint_is_repeated_if_the_settings_are_the_same(tmp_path):
  write(tmp_path, BATCHES)
  again = Schedule(tmp_path, "aa", first=2)
  assert [again.known(step, 0) for step in range(5)] == [None, None, *BATCHES[2:], None]
  other = Schedule(tmp_path, "bb", first=2)
  assert [other.known(step, 0) for step in range(5)] == [None] * 5
  assert schedule.read(tmp_path) == BATCHES[:2], "what was learned before the checkpoint is history"


def test_a_batch_is_written_once_and_must_be_the_same(tmp_path):
  played, turns = [talk(0, (5, 6)), talk(1, (7,))], [(((0, 2),),), (((0, 1),),)]
  kept = Schedule(tmp_path, "aa", first=0)
  kept.note(0, 0, played, turns)
  kept.note(0, 0, played, turns)
  assert len(schedule.read(tmp_path)) == 1
  again = Schedule(tmp_path, "aa", first=0)
  again.note(0, 0, played[::-1], turns)
  with pytest.raises(ReplayDiffersError, match="replay: the rollouts of step 1 have the checksum"):
    again.note(0, 0, [talk(0, (5,)), talk(1, (6, 7))], turns)
  assert len(schedule.read(tmp_path)) == 1


class FakeEngine:
  """Draws a token of each open request whenever it is told to, and notes what it is asked for."""

  def __init__(self, version):
    self.limits, self.version, self.open, self.asked, self.is_closed = EngineLimits(64, 64), version, [], [], False

  def submit(self, request: Request, on_piece=None):
    self.asked.append(request)
    future: Future = Future()
    self.open.append((request, on_piece, future, []))
    return Handle(future, lambda: None)

  def update(self, params, version):
    self.version = version

  def draw(self, count):
    for request, on_piece, future, drawn in list(self.open):
      due = [version for version, number in request.parts for _ in range(number)] or [self.version] * request.max_tokens
      for _ in range(min(count, request.max_tokens - len(drawn))):
        if due[len(drawn)] != self.version:
          break
        drawn.append(self.version)
        if on_piece is not None:
          on_piece(Piece([9], [0.0]))
        if len(drawn) == request.max_tokens:
          parts = tuple((version, drawn.count(version)) for version in dict.fromkeys(drawn))
          self.open.remove((request, on_piece, future, drawn))
          future.set_result(Decoded([9] * len(drawn), [0.0] * len(drawn), "length", 0, 0, drawn[0], parts))

  def close(self):
    self.is_closed = True


def job_of(seed=3):
  return Job([{"prompt_ids": (1, 2)}], 2, [seed, seed + 1], "salt", Draws(4, 2))


@pytest.fixture
def queue(monkeypatch):
  monkeypatch.setattr("jaxrl_llm.rollouts.singles.prompt_ids", lambda example, tokenizer, pictures: [1, 2])
  engines = []
  made = DrawingQueue(lambda params, version: engines.append(FakeEngine(version)) or engines[-1], patience_s=2.0)
  made.engines = engines
  return made


def play(engine, job):
  return play_singles(engine, job, tokenizer=ByteTokenizer())


def test_versions_are_noted_for_every_token_and_in_the_schedule(queue, tmp_path):
  queue.schedule = Schedule(tmp_path, "aa", first=0)
  queue.publish(None, 0)
  playing = queue.begin(play, job_of(), 0)
  engine = queue.engines[0]
  assert [(x.order, x.oldest, x.rereads) for x in engine.asked] == [(0, 0, False)] * 2
  engine.draw(3)
  queue.publish(None, 1)
  engine.draw(1)
  gathered, _ = queue.take(wait_for(playing, job_of()), 0)
  assert [tuple(x.versions) for x in gathered.played] == [(0, 0, 0, 1)] * 2
  assert schedule.read(tmp_path)[0].turns == ((((0, 3), (1, 1)),),) * 2
  queue.close()
  assert engine.is_closed


def test_weights_of_a_replay_wait_until_the_older_ones_have_drawn_their_part(queue, tmp_path):
  known = Batch(0, 0, "aa", schedule.checksum_of_tokens([talk(i, (9,) * 4) for i in range(2)]), ((((0, 3), (1, 1)),),) * 2)
  queue.schedule = Schedule(None, "aa", first=0, repeated=[known])
  queue.publish(None, 0)
  playing = queue.begin(play, job_of(), 0)
  engine = queue.engines[0]
  assert engine.asked == [], "turns of several versions are held back until those of one are drawn"
  waiting = threading.Thread(target=lambda: queue.publish(None, 1), daemon=True)
  waiting.start()
  until = time.monotonic() + 20
  while len(engine.asked) < 2 and time.monotonic() < until:
    time.sleep(0.01)
  assert [x.parts for x in engine.asked] == [((0, 3), (1, 1))] * 2
  engine.draw(2)
  waiting.join(0.1)
  assert waiting.is_alive() and engine.version == 0
  engine.draw(2)
  waiting.join(5)
  assert engine.version == 1
  engine.draw(2)
  assert [tuple(x.versions) for x in queue.take(wait_for(playing, job_of()), 0)[0].played] == [(0, 0, 0, 1)] * 2


def test_a_replay_that_gets_no_tokens_is_given_up(queue):
  known = Batch(0, 0, "aa", 0, ((((0, 4),),),) * 2)
  queue.schedule = Schedule(None, "aa", first=0, repeated=[known])
  queue.publish(None, 0)
  queue.begin(play, job_of(), 0)
  with pytest.raises(ReplayLost, match="replay: 8 tokens of the weights after 0 steps do not come"):
    queue.publish(None, 1)


def test_requests_of_a_batch_have_seeds_of_their_own(queue):
  queue.publish(None, 2)
  queue.begin(play, job_of(), 5)
  assert [x.seed for x in queue.engines[0].asked] == [turn_seed(3, 0), turn_seed(4, 0)]
  assert [(x.order, x.oldest) for x in queue.engines[0].asked] == [(5, 2)] * 2
  queue.begin(play, job_of(8))
  assert queue.engines[0].asked[-1].order == -1


@pytest.mark.parametrize("first, later", [(0, 1), (1, 0)])
def test_new_weights_wait_for_all_whole_batches_that_are_open(first, later):
  """Also for one that began before others, and that an evaluation has overtaken."""
  order, updates = [], []

  class Slow:
    def __init__(self, number):
      self.number = number

    def __iter__(self):
      return iter(())

    def wait(self):
      order.append(self.number)

    def close(self):
      pass

  engine = FakeEngine(0)
  engine.update = lambda params, version: updates.append((version, sorted(order)))
  queue = DrawingQueue(lambda params, version: engine, waits=True)
  queue.publish(None, 0)
  for step in (first, later):
    queue.begin(lambda engine, job, step=step: Slow(step), job_of(), step)
  queue.begin(lambda engine, job: Slow(2), job_of())
  queue.publish(None, 1)
  assert updates == [(1, [0, 1, 2])]
