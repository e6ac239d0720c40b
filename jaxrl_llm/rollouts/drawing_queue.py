"""The queue of an asynchronous run: batches that are drawn while the learner works on earlier ones.

Batch b is what RL step b learns from, unless a `window` lets it take groups of others. It is begun
once the learner is at step b - η, with the weights of that step or later ones, for η =
`rollout.staleness`:

  learner:   | step 0 | step 1 | step 2 | step 3 | ...
  begun:      0 ... η    η + 1    η + 2    η + 3

So no token is older than η steps, at most η + 1 batches are open, and each step learns from the
same prompts whatever the timing: nothing is dropped for being slow, or preferred for being quick.
The oldest requests get rows first. What a turn draws does not depend on whether its conversation is
still cached. Nothing is open across a checkpoint, which therefore holds all that the next step
depends on.

A repeated turn that several weights draw keeps its row while it waits for the later ones. It is
held back until the earlier ones have drawn all whole turns, which could otherwise wait for its row
for ever.

In a queue of whole batches each is drawn by the weights that it was begun with: new ones wait until
nothing is drawn any more. Then no schedule is needed to repeat a run, and a turn reads what the
engine has cached of the turn before.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.decoding.engine.requests import Decoded, Engine, EngineLimits, Handle, Piece, Pulse, Pulsing, ReplayLost, Request
from jaxrl_llm.rollouts.arrivals import Gathered
from jaxrl_llm.rollouts.jobs import Job, PlayFn, Playing, as_engine_error, turn_seed
from jaxrl_llm.rollouts.schedule import Schedule, TurnVersions, places_of, versions_of
from jaxrl_llm.types import Params

_PATIENCE_S = 0.05  # Between two looks at whether a repeated run may go on.
_STALL_S = 10.0  # Time without a drawn token after which nothing is held back, whatever the reason.


@runtime_checkable
class Measured(Protocol):
  """An engine with measures of its own."""

  def metrics(self) -> dict[str, float]:
    """Returns the measures since the last call."""
    ...


@runtime_checkable
class Resting(Protocol):
  """An engine that shares its devices with other programs; see `DecodingEngine`."""

  error: BaseException | None

  def rest(self, turn: int = 0) -> int:
    """Waits until nothing is open and no program follows."""
    ...


@contextlib.contextmanager
def _explained() -> Iterator[None]:
  """Raises errors of an engine as a run shows them."""
  try:
    yield
  except Exception as error:
    raise as_engine_error(error) from error


class DrawingQueue:
  """Batches that an engine draws, and the weights that it gets meanwhile.

  Args:
    make: Function `(params, version) -> engine`, called at the first use.
    waits: Whether new weights wait for whole batches.
    patience_s: Time without a drawn token after which a repeated run is given up, in seconds.

  Attributes:
    waits: Whether new weights wait until all that is open is drawn.
    joins: Whether what is open may go on with new weights.
    version: Version of the weights that were published last; None before the first.
  """

  def __init__(self, make: Callable[[Params, int], Engine], *, waits: bool = False, patience_s: float = 600.0):
    self._make, self.waits, self.joins, self._patience = make, waits, not waits, patience_s
    self._engine: Engine | None = None
    self._is_ready: Callable[[], bool] = lambda: True
    self.version, self._is_first = None, True
    self._open: dict[tuple[int, int], tuple[_Noted, Playing]] = {}
    self._last: Playing | None = None  # The last that is no training batch.
    self._seen = Pulse(0, 0, 0.0, 0.0)
    self.schedule = Schedule(None, "", first=0)

  def use(self, engine: Engine, is_ready: Callable[[], bool]) -> None:
    """Uses a given engine, which has no weights yet, instead of creating one.

    Args:
      engine: Engine, which is closed with the queue.
      is_ready: Function polled before the first batch begins, until it returns True; it may block
        for a second.
    """
    self._engine, self._is_ready = engine, is_ready

  def publish(self, params: Params, version: int, *, between: Callable[[], None] = lambda: None) -> None:
    """Gives the engine new weights; in a repeated run, once the older ones have done their part.

    Args:
      params: Weights on the engine's devices, read before this returns.
      version: Number of RL steps that they were trained for.
      between: Function called while this waits; may raise.

    Raises:
      EngineError: If the engine has failed.
      ReplayLost: If a repeated run cannot go on.
    """
    if version == self.version:
      return
    for _ in self.approach():
      between()
    self.give(params, version)
    for _ in self.joining():
      between()

  def approach(self) -> Iterator[None]:
    """Waits until new weights may come, and yields meanwhile; see `publish`."""
    with _explained():
      if self._engine is not None and self.waits:
        for playing in self._all_open():
          playing.wait()
      yield from self._missing_parts()

  def give(self, params: Params, version: int) -> None:
    """Gives the engine new weights at once; see `publish`."""
    with _explained():
      if self._engine is None:
        self._engine = self._make(params, version)
      else:
        self._engine.update(params, version)
    self._is_first, self.version = self.version is None, version

  def joining(self) -> Iterator[None]:
    """Waits until enough engines are there to draw with the first weights, and yields meanwhile."""
    with _explained():
      while self._is_first and not self._is_ready():
        yield

  def rest(self, turn: int = 0) -> int:
    """Waits until the engine runs no program any more; see `DecodingEngine.rest`."""
    with _explained():
      return self._engine.rest(turn) if isinstance(self._engine, Resting) else 0

  def check(self) -> None:
    """Raises what broke the engine, if something did."""
    if isinstance(self._engine, Resting) and self._engine.error is not None:
      raise as_engine_error(self._engine.error)

  def begin(self, play: PlayFn, job: Job, step: int | None = None, draw: int = 0) -> Playing:
    """Begins a batch with the weights that were published last, or later ones.

    Args:
      play: Player of the batch.
      job: The batch.
      step: RL step that learns from it; None for no training batch, which is drawn before all else
        that waits and is not taken.
      draw: Number of the batch among those of the step.
    """
    known = {} if step is None else self.schedule.turns(step, draw, job.seeds)
    if self._engine is None or self.version is None:
      raise ValueError(f"step {step}: nothing can be drawn before weights are published")
    order = -1 if step is None else step
    noted = _Noted(self._engine, order=order, oldest=self.version, known=known, seeds=job.seeds, rereads=self.waits)
    # What is held back must not keep others from being asked for.
    playing = play(noted, job._replace(at_once=None) if known else job)
    if step is None:
      self._last = playing
    else:
      self._open[step, draw] = noted, playing
    return playing

  def order(self, step: int) -> tuple[int, ...]:
    """Returns the groups that a step learns from in the run that is repeated; empty if unknown."""
    known = self.schedule.known(step, 0)
    return () if known is None else known.groups

  def take(self, gathered: Gathered, step: int, draw: int = 0, groups: Sequence[int] = ()) -> tuple[Gathered, dict[str, float]]:
    """Ends a batch; notes which weights drew it in the schedule and its conversations.

    Args:
      gathered: What a step learns from.
      step: RL step.
      draw: Number of the batch among those of the step.
      groups: Numbers of its groups; empty if they are those that were begun for the step.

    Returns:
      The batch, and measures of the engine, such as the fraction of the time that it was idle.
    """
    of_sequences = [(self._open[own, draw][0], i) for own, i in places_of(step, len(gathered.played), groups)]
    for noted, sequence in of_sequences:
      noted.left.remove(sequence)
    self._open = {key: (noted, playing) for key, (noted, playing) in self._open.items() if noted.left}
    if self.waits:
      return gathered, self._measures()
    turns = [noted.turns_of(sequence) for noted, sequence in of_sequences]
    self.schedule.note(step, draw, gathered.played, turns, groups)
    played = zip(gathered.played, turns, strict=True)
    versioned = [conversation._replace(versions=versions_of(conversation, own)) for conversation, own in played]
    return gathered._replace(played=versioned), self._measures()

  def _all_open(self) -> list[Playing]:
    return [*(playing for _, playing in self._open.values()), *([] if self._last is None else [self._last])]

  def _missing_parts(self) -> Iterator[None]:
    """Yields until the present weights have drawn what they drew in the run that is repeated."""
    waited, before = 0.0, -1
    while missing := sum(noted.missing(self.version) for noted, _ in self._open.values()):
      yield
      if waited > _STALL_S or not any(noted.missing(self.version, whole=True) for noted, _ in self._open.values()):
        for noted, _ in self._open.values():
          noted.release(self.version)
      if any(noted.error is not None for noted, _ in self._open.values()):
        return  # The batch raises it.
      waited, before = (waited + _PATIENCE_S if missing == before else 0.0), missing
      if waited > self._patience:
        raise ReplayLost(f"replay: {missing} tokens of the weights after {self.version} steps do not come")
      time.sleep(_PATIENCE_S)

  def _measures(self) -> dict[str, float]:
    if isinstance(self._engine, Measured):
      return self._engine.metrics()
    if not isinstance(self._engine, Pulsing):
      return {}
    pulse, before = self._engine.pulse(), self._seen
    self._seen = pulse
    spent = pulse.age_s - before.age_s
    return {"samplers/idle_mean": min((pulse.idle_s - before.idle_s) / spent, 1.0) if spent > 0 else 0.0}

  def close(self) -> None:
    """Gives up what is open, and ends the engine; a later use makes a new one."""
    for playing in self._all_open():
      playing.close()
    self._open.clear()
    engine, self._engine, self.version, self._last = self._engine, None, None, None
    if engine is not None:
      engine.close()

  def __enter__(self) -> "DrawingQueue":
    """Returns itself."""
    return self

  def __exit__(self, *error: Any) -> None:
    """Closes the queue."""
    self.close()


class _Noted:
  """An `Engine` that notes which weights draw the requests of a batch, or has them drawn as before.

  Args:
    engine: Engine that draws.
    order: Place of the batch among all; see `Request`.
    oldest: Oldest version of the weights that may draw it.
    known: Turns to draw again as they were, by the seed of their request.
    seeds: Seeds of the sequences.
    rereads: Whether a turn may read what is cached of the turn before; see `Request`.

  Attributes:
    left: Sequences that no step has taken.
    error: What broke a request.
  """

  def __init__(
    self, engine: Engine, *, order: int, oldest: int, known: dict[int, TurnVersions], seeds: Sequence[int], rereads: bool
  ):
    self._engine, self._order, self._oldest, self._seeds, self._rereads = engine, order, oldest, seeds, rereads
    self.left, self._known = set(range(len(seeds))), known
    self._lock = threading.Lock()
    self._turns: dict[int, TurnVersions] = {}
    self._drawn = dict.fromkeys(self._known, 0)
    self._held: list[_Held] = []
    self.error: BaseException | None = None

  @property
  def limits(self) -> EngineLimits:
    """Limits of the engine."""
    return self._engine.limits

  def submit(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Handle:
    """Accepts a request; see `Engine`."""
    known, seed = self._known.get(request.seed), request.seed
    request = request._replace(order=self._order, oldest=self._oldest, rereads=self._rereads)
    if known is not None:
      request, own = request._replace(parts=known), on_piece

      def on_piece(piece: Piece) -> None:
        with self._lock:
          self._drawn[seed] += len(piece.tokens)
        if own is not None:
          own(piece)

    if known is not None and len(known) > 1:
      held = _Held(partial(self._engine.submit, request, on_piece), known[0][0])
      handle = Handle(held.future, held.abort)
      with self._lock:
        self._held.append(held)
    else:
      handle = self._engine.submit(request, on_piece)
    handle.completion.add_done_callback(lambda future: self._ended(seed, future))
    return handle

  def release(self, version: int | None) -> None:
    """Submits the turns that weights up to a version begin, and that were held back."""
    with self._lock:
      due = [held for held in self._held if version is None or held.first <= version]
      self._held = [held for held in self._held if held not in due]
    for held in due:
      held.send()

  def _ended(self, seed: int, future: Any) -> None:
    self.error = self.error or future.exception()
    if future.exception() is None:
      completion: Decoded = future.result()
      with self._lock:
        self._turns[seed] = tuple(map(tuple, completion.parts))

  def missing(self, version: int | None, *, whole: bool = False) -> int:
    """Returns how many tokens the weights up to a version have yet to draw again.

    Args:
      version: The version; None stands for all.
      whole: Whether to count only turns that a single version draws.
    """
    due = lambda turn: sum(count for own, count in turn if version is None or own <= version)
    with self._lock:
      turns = [(seed, turn) for seed, turn in self._known.items() if len(turn) == 1 or not whole]
      return sum(max(due(turn) - self._drawn[seed], 0) for seed, turn in turns)

  def turns_of(self, sequence: int) -> list[TurnVersions]:
    """Returns the turns of a sequence as they were drawn."""
    turns: list[TurnVersions] = []
    while (turn := self._turns.get(turn_seed(self._seeds[sequence], len(turns)))) is not None:
      turns.append(turn)
    return turns

  def update(self, params: Params, version: int) -> None:
    """Gives the engine new weights; see `Engine`."""
    self._engine.update(params, version)

  def close(self) -> None:
    """Ends the engine."""
    self._engine.close()


class _Held:
  """A request that is not submitted yet.

  Args:
    submit: Function that submits it.
    first: Version of the weights that draw its first tokens.

  Attributes:
    first: Version of the weights that draw its first tokens.
    future: Future of its completion.
  """

  def __init__(self, submit: Callable[[], Handle], first: int):
    self._submit, self.first = submit, first
    self.future: Future[Decoded] = Future()
    self.future.set_running_or_notify_cancel()
    self._handle: Handle | None = None
    self._lock, self._is_over = threading.Lock(), False

  def send(self) -> None:
    """Submits the request, unless it was aborted."""
    with self._lock:
      if self._is_over:
        return
      try:
        self._handle = self._submit()
      except Exception as error:  # The caller gets it with the completion.
        self.future.set_exception(error)
        return
    self._handle.completion.add_done_callback(self._end)

  def _end(self, future: "Future[Decoded]") -> None:
    if (error := future.exception()) is not None:
      self.future.set_exception(error)
    else:
      self.future.set_result(future.result())

  def abort(self) -> None:
    """Aborts the request."""
    with self._lock:
      handle, was_over = self._handle, self._is_over
      self._is_over = True
    if handle is not None:
      handle.abort()
    elif not was_over:
      self.future.set_result(Decoded([], [], "aborted", 0, 0, self.first))
