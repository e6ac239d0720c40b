"""The queue of an asynchronous run with an engine that does nothing by itself."""

from concurrent.futures import Future

import pytest

from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece, Request
from jaxrl_llm.rollouts.drawing_queue import DrawingQueue
from jaxrl_llm.rollouts.jobs import Draws, Job, turn_seed
from jaxrl_llm.rollouts.schedule import Batch


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
  queue.schedule._known = {(0, 0): Batch(0, 0, "", 0, ((mixed,), (mixed,), (((0, 4),),)))}
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
