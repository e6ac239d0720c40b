"""The queue of a run of several processes: process 0 plays the batches, and all others get them.

Players, environments and requests are those of process 0. The others take part in what all devices
compute, and hear what process 0 hands over, in the same order and the same portions:

  process 0: queue -> conversations as they finish -> the same portions, each told to the others
  others:    the loop of their own engine, in lock step         ... heard
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.frames import Frame
from jaxrl_llm.devices import hosts
from jaxrl_llm.rollouts.arrivals import Gathered
from jaxrl_llm.rollouts.conversation_frames import conversation_frame, conversation_of
from jaxrl_llm.rollouts.drawing_queue import DrawingQueue
from jaxrl_llm.rollouts.jobs import Conversation, Job, PlayFn, Playing
from jaxrl_llm.types import Params

_HEAR_S = 0.5  # Between two looks at whether the engine of this process still works.
_queues = itertools.count()  # All processes make the same queues in the same order.


class SharedQueue:
  """A `DrawingQueue` whose batches process 0 plays, and all processes get. All call its methods.

  Args:
    queue: The queue of this process. Only that of process 0 begins batches.
  """

  def __init__(self, queue: DrawingQueue):
    self._queue, self._channel = queue, hosts.Channel(f"queue/{next(_queues)}")
    self.waits, self.joins, self.use = queue.waits, queue.joins, queue.use

  @property
  def schedule(self) -> Any:
    """Schedule of the queue, which process 0 reads and writes."""
    return self._queue.schedule

  @schedule.setter
  def schedule(self, schedule: Any) -> None:
    """Sets it."""
    self._queue.schedule = schedule

  def publish(self, params: Params, version: int, *, between: Callable[[], None] = lambda: None) -> None:
    """Gives the engine new weights, in all processes at once; see `DrawingQueue`."""
    if version == self._queue.version:
      return
    for _ in self._told(self._queue.approach(), Frame("approached")):
      between()
    self._queue.give(params, version)
    for _ in self._told(self._queue.joining(), Frame("joined")):
      between()

  def begin(self, play: PlayFn, job: Job, step: int | None = None, draw: int = 0) -> Playing:
    """Begins a batch in process 0, which all processes get; see `DrawingQueue`."""
    return _Shared(self, self._queue.begin(play, job, step, draw) if hosts.is_main() else None)

  def order(self, step: int) -> tuple[int, ...]:
    """Returns the groups of a repeated step, which process 0 knows; see `DrawingQueue`."""
    if hosts.is_main():
      order = self._queue.order(step)
      self._tell(Frame("order", {"groups": list(order)}))
      return order
    return tuple(self._hear()[0].fields["groups"])

  def take(self, gathered: Gathered, step: int, draw: int = 0, groups: Sequence[int] = ()) -> tuple[Gathered, dict[str, float]]:
    """Ends a batch; see `DrawingQueue`."""
    if hosts.is_main():
      gathered, metrics = self._queue.take(gathered, step, draw, groups)
      self._tell(Frame("taken", {"metrics": metrics}), gathered.played)
      return gathered, metrics
    frame, played = self._hear()
    return gathered._replace(played=played), dict(frame.fields["metrics"])

  def told(self, playing: Playing | None) -> Iterator[list[Conversation]]:
    """Yields the conversations of a batch as process 0 gets them, until no program runs."""
    if playing is not None:
      for finished in playing:
        self._tell(Frame("finished"), finished)
        yield finished
      self._tell(Frame("over", {"turn": self._queue.rest()}))
      return
    while (heard := self._hear())[0].kind == "finished":
      yield heard[1]
    self._queue.rest(heard[0].fields["turn"])

  def _told(self, waiting: Iterator[None], end: Frame) -> Iterator[None]:
    """Yields in all processes as often as process 0 does while it waits."""
    if hosts.is_main():
      for _ in waiting:
        self._tell(Frame("waits"))
        yield
      self._tell(end)
      return
    while self._hear()[0].kind != end.kind:
      yield

  def _tell(self, frame: Frame, conversations: Sequence[Conversation] = ()) -> None:
    self._channel.send(frames.joined([frame, *map(conversation_frame, conversations)]))

  def _hear(self) -> tuple[Frame, list[Conversation]]:
    while (message := self._channel.receive(_HEAR_S)) is None:
      self._queue.check()
    frame, *conversations = frames.parted(message)
    return frame, list(map(conversation_of, conversations))

  def close(self) -> None:
    """Gives up what is open, and ends the engine."""
    self._queue.close()

  def __enter__(self) -> "SharedQueue":
    """Returns itself."""
    return self

  def __exit__(self, *error: Any) -> None:
    """Closes the queue."""
    self.close()


class _Shared:
  """A batch that process 0 plays: a `Playing` in all processes."""

  def __init__(self, queue: SharedQueue, playing: Playing | None):
    self._queue, self._playing = queue, playing

  def __iter__(self) -> Iterator[list[Conversation]]:
    return self._queue.told(self._playing)

  def wait(self) -> None:
    """Waits until nothing is drawn any more, in process 0."""
    if self._playing is not None:
      self._playing.wait()

  def close(self) -> None:
    """Gives up the conversations that have not finished."""
    if self._playing is not None:
      self._playing.close()
