"""The queue of an asynchronous run with an engine that does nothing by itself."""

from concurrent.futures import Future

import numpy as np
import pytest

from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece, Request
from jaxrl_llm.devices import hosts
from jaxrl_llm.rollouts.arrivals import Gathered
from jaxrl_llm.rollouts.drawing_queue import DrawingQueue
from jaxrl_llm.rollouts.jobs import Conversation, Draws, Job, turn_seed
from jaxrl_llm.rollouts.schedule import Batch, Schedule
from jaxrl_llm.rollouts.shared_queue import SharedQueue
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason


class Engine:
  """Engine that draws when it is told to."""

  def __init__(self):
    self.limits, self.open, self.versions = EngineLimits(64, 100), {}, []

  def submit(self, request, on_piece=None):
    self.open[request.seed] = request, on_piece, Future()
    return Handle(self.open[request.seed][2], lambda: None)

  def draw(self, seed, count, ends=True):
    request, on_piece, future = self.open[seed]
    on_piece(Piece([1] * count, [-1.0] * count))
    if ends:
      future.set_result(Decoded([1], [-1.0], "stop", 0, 0, 0, request.parts))

  def update(self, params, version):
    self.versions.append(version)

  def close(self):
    pass


class Playing:
  """Plays each sequence as a single request."""

  def __init__(self, engine, job):
    self.handles = [engine.submit(Request([1], 9, seed=turn_seed(seed, 0))) for seed in job.seeds]

  def __iter__(self):
    return self

  def __next__(self):
    raise StopIteration

  def wait(self):
    pass

  def close(self):
    for handle in self.handles:
      handle.abort()


@pytest.fixture
def repeated():
  """Returns a queue that is to repeat two turns of several weights and a whole one."""
  engine, seeds = Engine(), [5, 6, 7]
  queue = DrawingQueue(lambda params, version: engine)
  mixed = ((0, 2), (1, 3))
  known = Batch(0, 0, "", 0, ((mixed,), (mixed,), (((0, 4),),)))
  queue.schedule = Schedule(None, "", first=0, repeated=[known])
  queue.publish({}, 0)
  playing = queue.begin(Playing, Job([{}], 3, seeds, "", Draws(9, 1.0, 0, 1.0, (), ()), at_once=1), 0)
  return queue, engine, playing.handles, [turn_seed(seed, 0) for seed in seeds]


def test_a_repeated_turn_of_several_weights_waits_for_the_whole_ones(repeated):
  queue, engine, handles, (first, second, whole) = repeated
  assert list(engine.open) == [whole]  # Of an engine with one row, the first would keep the row.
  seen = []

  def between():
    seen.append(list(engine.open))
    if len(engine.open) == 1:
      engine.draw(whole, 4)
    elif len(seen) < 4:
      engine.draw(first, 2, ends=False)
      engine.draw(second, 2, ends=False)

  queue.publish({}, 1, between=between)
  assert seen[0] == [whole] and seen[-1] == [whole, first, second] and engine.versions == [1]
  engine.draw(first, 3)
  assert handles[0].completion.result(0).reason == "stop" and not handles[1].completion.done()


def test_what_is_held_back_can_be_given_up(repeated):
  queue, engine, handles, (_, _, whole) = repeated
  queue.close()
  assert [handle.completion.result(0).reason for handle in handles[:2]] == ["aborted"] * 2
  assert list(engine.open) == [whole]


def test_what_is_raised_between_stays_what_it_is():
  """Such as SIGTERM while samplers are missing, which is no error of the engine."""
  queue, asked = DrawingQueue(lambda params, version: pytest.fail("no engine is made")), []
  queue.use(Engine(), lambda: bool(asked))

  def between():
    raise KeyError("stopped")

  with pytest.raises(KeyError, match="stopped"):
    queue.publish({}, 0, between=between)


class Spoken:
  """A channel within one process."""

  def __init__(self):
    self.messages = []

  def send(self, message):
    self.messages.append(message)

  def receive(self, seconds):
    return self.messages.pop(0) if self.messages else None


def test_all_processes_get_the_portions_of_process_0(monkeypatch):
  """Also versions and measures, which only that process notes."""
  turns = (Turn("a", (9,), 0.5, 0),)
  talk = lambda i, versions=(), raw=(), **own: Conversation(
    i, [1, 2], [3, 4], [-0.5, 0.0], [True, False], turns, StopReason.TOKEN, versions=list(versions), raw_logprobs=list(raw), **own
  )
  first = talk(1, (3, -1), (-0.25, -2.0))
  portions = [[], [first], [], [talk(0, failed=("raised", "one line"), routes=np.zeros((3, 1, 1), np.int16)), talk(2)]]
  job = Job([{}], 3, [5, 6, 7], "", Draws(8, 8))
  queues, channel = [SharedQueue(DrawingQueue(lambda params, version: Engine(), waits=True)) for _ in range(2)], Spoken()
  heard = []
  for index, queue in enumerate(queues):
    monkeypatch.setattr(hosts, "is_main", lambda index=index: index == 0)
    queue._channel = channel
    if index == 0:  # The others read no schedule.
      queue.schedule = Schedule(None, "", first=0, repeated=[Batch(4, 0, "", 0, ((), ()), groups=(3, 9))])
    assert (queue.order(4), queue.order(5)) == ((3, 9), ())
    queue.publish({}, 0)
    playing = queue.begin(lambda engine, job: Portions(portions), job, step=0)
    heard.append(list(playing))
    gathered, metrics = queue.take(Gathered([x for part in heard[-1] for x in part], None, 0.0), 0)
    assert metrics == {} and len(gathered.played) == 3
    playing.close()
  assert str(heard[0]) == str(heard[1]) == str(portions)


class Portions(Playing):
  """Hands over portions."""

  def __init__(self, portions):
    self.handles, self.portions = [], portions

  def __iter__(self):
    return iter(self.portions)
