"""The decoding engine: requests arrive at any time and share the rows of one decoding loop.

A thread of its own runs the loop. A turn of it gives waiting requests rows, computes some of their
prompts, and draws a few tokens for every row whose prompt is computed:

  waiting requests -> rows of the cache -> copies of shared prefixes -> prefill -> stretch of steps

The device draws a stretch while the next turn begins. If other rows fill a whole stretch by then,
it gets that one before the first is handed over, so that it never waits for the host.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int, Int16, PyTree, UInt32

from jaxrl_llm.decoding.engine.checks import check_grammar, check_pictures, check_request, check_scores
from jaxrl_llm.decoding.engine.in_hand import News, OpenRequest, Peers, Stretch
from jaxrl_llm.decoding.engine.pool import CachePool
from jaxrl_llm.decoding.engine.programs import EnginePrograms, no_rows, no_spans, num_words
from jaxrl_llm.decoding.engine.requests import Decoded, EngineCounts, EngineLimits, Handle, Piece, Pulse, QueueFull, ReplayLost, Request
from jaxrl_llm.decoding.engine.scores import Scores, scores_of
from jaxrl_llm.decoding.filters import LEAST_TEMPERATURE
from jaxrl_llm.decoding.stops import NO_ID, stops_of_row
from jaxrl_llm.devices.mesh import num_row_shards
from jaxrl_llm.models import Model
from jaxrl_llm.models.image_slots import Pictures, Room, blank, put
from jaxrl_llm.types import Images, Params, StopReason

_CALLS = 4  # Number of prefills between two stretches, unless more rows wait than decode.
_PAUSE_S = 2e-3  # Time without a new request after which an idle engine begins those that it has.
_ROUNDING = 1.25  # Rows per row of a narrow stretch, up to which some rather wait for the next one.
_TRIED = 4  # Number of tokens with which programs of different widths are compared.

IN_FLIGHT = ("keep", "recompute", "wait")
"""What becomes of open requests when new weights come; see `make.make_twins`."""


class DecodingEngine:
  """An `Engine`, made by `make.make_engine`.

  Attributes:
    limits: Largest sizes of requests and of the queue.
    error: What broke the loop; None while it works.
  """

  def __init__(
    self, model: Model, programs: EnginePrograms, weights: PyTree, limits: EngineLimits, *, slots: int, chunk: int, spans: int,
    version: int, no_bytes: str = "", in_flight: str = "keep", records_routes: bool = False, records_kept: bool = False,
    peers: Peers | None = None, room: Room | None = None,
  ):  # fmt: skip
    self.limits = limits
    self._vocab_size, self._no_bytes = model.config.vocab_size, no_bytes
    # Rows, and the spans of a prefill, lie in so many pieces.
    self._pieces = 1 if model.mesh is None else num_row_shards(model.mesh)
    self._pool = CachePool(slots, limits.context, least=chunk, pieces=self._pieces)
    self._programs, self._chunk, self._spans = programs, chunk, spans
    self._weights, self._cache, self._version = weights, programs.make_cache(), version
    self._rows, self._routes = no_rows(slots, vocabulary=programs.vocabulary, shows=room is not None, scores=limits.likeliest > 0), None
    # Features of pictures while prompts that show them are computed, by digest.
    self._room, self._features, self._records_kept = room, {}, records_kept
    if records_routes:  # Of every column of every row, -1 where none are known.
      config = model.config
      self._routes = np.full((slots, limits.context, config.num_layers, config.experts.top_k), -1, np.int16)
    self._in_flight, self._stretches = in_flight, 0
    self._peers, self._numbers = peers, itertools.count()
    # Turns of the loop, programs that were run, and the last turn that ran none.
    self._turns, self._computed, self._idled = 0, 0, 0
    self._began, self._idle = time.monotonic(), 0.0
    # What `counts` returns. The loop alone writes it.
    self._prompt_tokens, self._cached_tokens, self._drawn_tokens = 0, 0, 0
    self._ended = dict.fromkeys(("stop", "length", "aborted", "error"), 0)
    self._widths = sorted(filter(self._draws_the_same, self._programs.stretches))
    self._span_counts = sorted(filter(self._computes_the_same, self._programs.prefills))
    self._waiting: deque[OpenRequest] = deque()
    self._running: dict[int, OpenRequest] = {}
    self._flying: Stretch | None = None
    self._holds = False  # Whether no request begins, because new weights wait for those that run.
    # What other threads change, under the lock of `_changed`.
    self._changed = threading.Condition()
    self._arrived: list[OpenRequest] = []
    self._calls: list[tuple[str, Sequence[Any]]] = []
    self._called: deque[Future[Any]] = deque()  # Of the calls here that have not run yet.
    self._num_open, self._update, self._is_closing = 0, None, False
    self.error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name="decoding engine", daemon=True)
    self._thread.start()

  def _draws_the_same(self, width: int) -> bool:
    """Returns whether a program draws the bits of the one with the most rows.

    Compilers choose how to add up a product by its size. What a request draws must not depend on
    how many rows happen to be ready.
    """
    most = max(self._programs.stretches)
    if width == most:
      return True
    rows = self._rows._replace(tokens=np.arange(len(self._rows.tokens), dtype=np.int32) % self._vocab_size)
    rows = rows._replace(budgets=np.full(len(rows.tokens), min(_TRIED, self.limits.context - 1), np.int32))
    drawn = []
    for size in (most, width):
      own, places = jax.tree.map(lambda x, size=size: x[:size], rows), np.arange(size, dtype=np.int32)
      self._cache, of_size = self._programs.stretches[size](self._weights, self._cache, own, places)
      drawn.append(jax.device_get((of_size.tokens[:, :width], of_size.logprobs[:, :width])))
    return all(a.tobytes() == b.tobytes() for a, b in zip(*drawn, strict=True))

  def _computes_the_same(self, count: int) -> bool:
    """Returns whether a program computes the bits of the one with the most spans."""
    most = max(self._programs.prefills)
    if count == most:
      return True
    tried, computed = min(count, len(self._rows.tokens)), []
    for size in (most, count):
      tokens = np.arange(size * self._chunk, dtype=np.int32).reshape(size, -1) % self._vocab_size
      counts = np.where(np.arange(size) < tried, min(self._chunk, self.limits.context), 0).astype(np.int32)
      rows = np.arange(size, dtype=np.int32) % len(self._rows.tokens)
      self._cache, _ = self._programs.prefills[size](self._weights, self._cache, tokens, np.zeros(size, np.int32), counts, rows)
      computed.append(jax.device_get(jax.tree.map(lambda x: x[:tried], self._cache)))
    return all(a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, computed), strict=True))

  def submit(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Handle:
    """Accepts a request; see `Engine`. If several processes draw, those of the first one count."""
    opened = self._opened(request, on_piece)
    with self._changed:
      self._refuse_if_ended()
      if self._num_open >= self.limits.requests:
        raise QueueFull(f"found {self._num_open} open requests, expected fewer than {self.limits.requests}; try again later")
      self._num_open, opened.number = self._num_open + 1, next(self._numbers)
      self._arrived.append(opened)
      self._changed.notify_all()

    def abort() -> None:
      with self._changed:
        opened.aborted = True
        self._changed.notify_all()

    return Handle(opened.future, abort)

  def prepare_grammars(self) -> None:
    """Compiles the programs that rows with a grammar need, unless they are compiled."""
    for width in self._widths:
      self._programs.constrained(width)

  def _opened(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> OpenRequest:
    """Returns a request as the loop holds it; raises for one that can never be served."""
    prompt = check_request(request, vocab_size=self._vocab_size, context=self.limits.context)
    check_scores(request, self.limits)
    check_pictures(request, self._room)
    check_grammar(request, is_alone=self._peers is None)
    if request.stops and self._programs.vocabulary is None:
      raise ValueError(f"stops: {self._no_bytes or f'found {request.stops!r}, expected none: the engine has no tokenizer'}")
    opened = OpenRequest(request, prompt, on_piece, fed=prompt)
    is_filtered = request.top_k or request.top_p < 1 or request.temperature < LEAST_TEMPERATURE or request.min_tokens
    if self._records_kept and (is_filtered or request.grammar is not None):
      opened.kept = []
    opened.scores = None if request.likeliest is None else []
    opened.prompt_scores = None if request.prompt_likeliest is None else []
    if request.grammar is not None:
      opened.begin_grammar(num_words(self._vocab_size))
      self.prepare_grammars()  # Here, because the loop must not wait for it.
    opened.future.set_running_or_notify_cancel()  # The caller ends a request by `abort`.
    return opened

  def _refuse_if_ended(self) -> None:
    if self.error is not None:
      raise self.error
    if self._is_closing:
      raise RuntimeError("the engine is closed")

  def update(self, params: Params, version: int) -> None:
    """Takes new weights, between two stretches of steps; see `Engine`."""
    self.take(self.lay_out(params), version)

  def lay_out(self, params: Params) -> PyTree:
    """Returns a copy of the weights as the programs read them, which twins share."""
    return self._programs.weights(params)

  def take(self, weights: PyTree, version: int) -> None:
    """Takes new weights of `lay_out`, between two stretches of steps; see `Engine.update`."""
    with self._changed:
      self._refuse_if_ended()
      self._update = (weights, version)
      self._changed.notify_all()

  def call(self, name: str, *args: Any) -> "Future[Any]":
    """Has a function of the `Peers` run by the loop, in all processes at the same turn.

    An exception of the function breaks the engine, because others may not have had it.

    Args:
      name: Name in `Peers.calls`.
      *args: Arguments, which JSON can hold.

    Returns:
      Future of what the function returns here.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    with self._changed:
      self._refuse_if_ended()
      self._calls.append((name, args))
      self._called.append(future)
      self._changed.notify_all()
    return future

  def rest(self, turn: int = 0) -> int:
    """Waits until nothing is open and no program follows, so that others may use the devices.

    Args:
      turn: Number of turns that must have ended.

    Returns:
      The number of turns so far.

    Raises:
      Exception: What broke the engine.
    """
    with self._changed:
      self._changed.wait_for(lambda: self.error is not None or (self._num_open == 0 and self._turns >= turn))
      if self.error is not None:
        raise self.error
      return self._turns

  def follow(self) -> None:
    """Waits until the callers of another process close the engine.

    Raises:
      Exception: What broke the engine.
    """
    self._thread.join()
    if self.error is not None:
      raise self.error

  def pulse(self) -> Pulse:
    """Returns what the engine has done so far."""
    return Pulse(self._num_open, self._computed, self._idle, time.monotonic() - self._began)

  def counts(self) -> EngineCounts:
    """Returns the requests and tokens so far; see `Counting`."""
    running = len(self._running)
    tokens = self._prompt_tokens, self._cached_tokens, self._drawn_tokens
    return EngineCounts(running, max(self._num_open - running, 0), len(self._rows.tokens), dict(self._ended), *tokens)

  def close(self) -> None:
    """Aborts all requests and ends the loop."""
    with self._changed:
      self._is_closing = True
      self._changed.notify_all()
    if threading.current_thread() is not self._thread:
      self._thread.join()

  def _run(self) -> None:
    try:
      while self._take():
        before = self._computed
        self._admit()
        self._copy()
        self._prefill()
        self._copy()  # The rest of a group decodes along with the one that has computed its prompt.
        flying, self._flying = self._flying, self._begin_stretch()
        self._hand_over(flying)
        self._idled = self._turns + 1 if self._computed == before and flying is None else self._idled
        with self._changed:
          self._turns += 1
          self._changed.notify_all()
    except BaseException as error:  # Any failure must wake every caller.
      with self._changed:
        self.error, arrived = error, self._arrived
        self._arrived, self._num_open = [], 0
        self._changed.notify_all()
      for future in self._called:
        future.set_exception(error)
      for opened in (*self._running.values(), *self._waiting, *arrived):
        if not opened.future.done():
          opened.future.set_exception(error)
    finally:
      self._weights = self._cache = self._update = self._flying = None
      self._running, self._waiting = {}, deque()

  def _take(self) -> bool:
    """Takes what callers have brought, the same in all processes; False if the engine is closed."""
    arrived, news = self._gathered() if self._peers is None or self._peers.leads else self._heard()
    for name, args in news.calls:
      outcome = self._peers.calls[name](*args)
      if self._peers.leads:
        self._called.popleft().set_result(outcome)
    if arrived:
      self._waiting = deque(sorted((*self._waiting, *arrived), key=lambda opened: opened.request.order))
    ends = lambda opened: news.is_closing or opened.number in news.aborted
    if news.update is not None or news.is_closing or any(map(ends, self._running.values())):
      flying, self._flying = self._flying, None
      self._hand_over(flying)  # Its rows cannot change before.
    for opened in (*self._running.values(), *self._waiting):
      if ends(opened):
        self._finish(opened, "aborted")
    self._holds = news.holds
    if news.update is not None:
      self._take_weights(*news.update)
    self._waiting = deque(opened for opened in self._waiting if not opened.future.done())
    return not news.is_closing

  def _gathered(self) -> tuple[list[OpenRequest], News]:
    """Waits for work; returns what the callers here have brought, and tells other processes."""
    with self._changed:
      began = time.monotonic()
      while not (self._arrived or self._flying or self._can_go_on() or self._update or self._calls or self._is_closing):
        self._changed.wait()
      if self._turns and self._turns == self._idled and not (self._arrived or self._calls or self._is_closing):
        self._changed.wait(_PAUSE_S)  # What has rows waits for new weights, and the rest for rows.
      self._idle += time.monotonic() - began
    if not (self._running or self._waiting):
      count = 0  # Requests that are submitted one after the other begin together.
      while count < (count := len(self._arrived)) < self._widths[-1]:
        time.sleep(_PAUSE_S)
    with self._changed:
      arrived, calls, self._arrived, self._calls = self._arrived, self._calls, [], []
      holds = self._in_flight == "wait" and bool(self._running) and self._update is not None
      update, self._update = (None, self._update) if holds else (self._update, None)
      aborted = tuple(opened.number for opened in (*self._running.values(), *self._waiting, *arrived) if opened.aborted)
      news = News([opened.request for opened in arrived], aborted, update, calls, holds, self._is_closing)
    if self._peers is not None:
      self._peers.tell(news)
    return arrived, news

  def _heard(self) -> tuple[list[OpenRequest], News]:
    """Waits for what callers of another process have brought."""
    news = None
    while news is None:
      if (news := self._peers.hear()) is None and self._is_closing:
        news = News((), is_closing=True)  # Its own caller gives up, and nothing is under way.
    if news.update is not None:
      is_here = lambda: self._is_closing or (self._update is not None and self._update[1] == news.update[1])
      with self._changed:
        self._changed.wait_for(is_here)  # Soon: all callers bring the same weights.
        news, self._update = news._replace(update=self._update), None
    arrived = [self._opened(request) for request in news.requests]
    with self._changed:
      self._num_open += len(arrived)
    for opened in arrived:
      opened.number = next(self._numbers)
    return arrived, news

  def _can_go_on(self) -> bool:
    """Returns whether a request does not wait for new weights."""
    opened = (*self._running.values(), *self._waiting)
    return any(x.aborted or not x.waits_for(self._version) for x in opened)

  def _take_weights(self, weights: Params, version: int) -> None:
    """Goes over to new weights."""
    self._weights, self._version = weights, version
    self._features.clear()
    # Of prompts that nothing was drawn from yet, all keys and values are those of one version.
    again = [opened for opened in self._running.values() if self._in_flight == "recompute" or not opened.tokens]
    for opened in again:
      self._leave_row(opened)
      opened.fed = np.concatenate([opened.prompt, np.asarray(opened.tokens, opened.prompt.dtype)])
    self._waiting = deque(sorted((*again, *self._waiting), key=lambda opened: opened.request.order))
    self._pool.forget(version=version)
    for opened in tuple(self._running.values()):
      self._refuse_if_late(opened)

  def _refuse_if_late(self, opened: OpenRequest) -> bool:
    """Ends a request that older weights were to draw from here on; returns whether it was one."""
    part = opened.next_part()
    if part is None or part[0] >= self._version or opened.future.done():
      return False
    self._finish(opened, ReplayLost(f"found the weights of version {self._version}, expected {part[0]} for {part[1]} tokens more"))
    return True

  def _leave_row(self, opened: OpenRequest) -> None:
    """Frees the row of an open request."""
    if opened.prompt_scores and not opened.tokens:
      opened.prompt_scores = []  # Other weights may compute the prompt.
    if opened.copies:
      self._pool.give_up(opened.place)
    self._pool.release(opened.place.row, version=self._version)
    del self._running[opened.place.row]
    opened.place, opened.copies = None, False

  def _admit(self) -> None:
    """Gives waiting requests rows, in their order."""
    if self._holds:
      return  # Until those that run have ended.
    later: list[OpenRequest] = []
    num_admitted = 0
    # No more than fill a stretch, so that the device does not wait while many are given rows.
    while self._waiting and num_admitted < self._widths[-1]:
      opened = self._waiting.popleft()
      if opened.waits_for(self._version):
        later.append(opened)
        continue
      if self._refuse_if_late(opened):
        continue
      owner = opened.request.owner if opened.request.rereads else None
      # A prompt that is scored is computed as a whole: no other request has a salt of this form.
      salt = opened.request.cache_salt if opened.prompt_scores is None else f"{opened.request.cache_salt}\0{opened.number}"
      place = self._pool.place(opened.fed, salt, version=self._version, owner=owner)
      if place is None:
        later.append(opened)
        break
      self._running[place.row] = opened
      num_admitted += 1
      opened.place, opened.copies = place, place.source != place.row
      opened.cached = 0 if opened.copies else place.shared
      opened.fills = self._missing(opened) > 0
      self._write_settings(place.row, opened)
    self._waiting.extendleft(reversed(later))

  def _write_settings(self, row: int, opened: OpenRequest) -> None:
    rows, request = self._rows, opened.request
    drawn = [*opened.prompt[len(opened.prompt) - request.drawn :].tolist(), *opened.tokens]
    own = stops_of_row(request.stop_ids, request.stops, vocabulary=self._programs.vocabulary, drawn=drawn)
    for of_rows, x in zip(jax.tree.leaves((rows.stops, rows.matching)), jax.tree.leaves(own), strict=True):
      of_rows[row] = x
    rows.temperatures[row] = request.temperature
    rows.top_ks[row] = min(request.top_k, self._vocab_size)
    rows.top_ps[row] = request.top_p
    rows.seeds[row] = np.array([request.seed % (1 << 64)], "<u8").view("<u4")
    if rows.leasts is not None:
      rows.scored[row], rows.leasts[row] = request.likeliest is not None, request.min_tokens
    if rows.shifts is not None:
      rows.shifts[row] = 0 if request.pictures is None else request.pictures.end - len(request.pictures.slots)

  def _copy(self) -> None:
    """Copies shared prefixes from rows that have computed them."""
    ready = [opened for opened in self._running.values() if opened.copies and self._pool.has_computed(opened.place)]
    while ready:
      sources, targets = np.zeros(self._spans, np.int32), np.full(self._spans, len(self._rows.tokens), np.int32)
      free, left = self._free_spans(self._spans), []
      for opened in ready:
        if (i := next(free[self._in_piece(opened.place.row)[0]], None)) is None:
          left.append(opened)
          continue
        sources[i], targets[i] = self._in_piece(opened.place.source)[1], self._in_piece(opened.place.row)[1]
        opened.cached, opened.copies = self._pool.copied(opened.place), False
        opened.fills = self._missing(opened) > 0
        if self._routes is not None:
          self._routes[opened.place.row, : opened.cached] = self._routes[opened.place.source, : opened.cached]
      ready, self._cache = left, self._programs.copy(self._cache, sources, targets)

  def _free_spans(self, count: int) -> list[Iterator[int]]:
    """Returns the spans of a program that are not given to a row yet, in pieces."""
    size = count // self._pieces
    return [iter(range(first, first + size)) for first in range(0, count, size)]

  def _in_piece(self, row: int) -> tuple[int, int]:
    """Returns the piece of a row, and its number there."""
    return divmod(row, len(self._rows.tokens) // self._pieces)

  def _prefill(self) -> None:
    """Computes prompts in the order of their arrival, but for their last tokens.

    Those that show pictures have a program of their own, so that a token's numbers do not depend on
    what else is computed, and so have those whose tokens are scored.
    """
    for call in itertools.count():
      waiting = [opened for opened in self._running.values() if opened.fills and not opened.copies]
      if not waiting:
        self._features.clear()
      if not waiting or (call >= _CALLS and 2 * len(waiting) <= len(self._running)):
        return
      kind = lambda opened: (opened.request.pictures is not None, opened.prompt_scores is not None)
      shows, scores = kind(waiting[0])
      waiting = [opened for opened in waiting if kind(opened) == (shows, scores)]
      num_spans = min(self._programs.prefills) if shows or scores else self._num_spans(waiting)
      shown = no_spans(self._room, num_spans, self._chunk) if shows else ()
      tokens = np.zeros((num_spans, self._chunk), np.int32)
      following, scored = np.zeros_like(tokens), []
      starts, counts, rows, whole_rows = (np.zeros(num_spans, np.int32) for _ in range(4))
      free = self._free_spans(num_spans)
      for opened in waiting:
        row = opened.place.row
        piece, row_there = self._in_piece(row)
        while opened.fills and (i := next(free[piece], None)) is not None:
          start = int(self._pool.lengths[row])
          # Ends at a multiple of the chunk, so that a token's numbers do not depend on where the
          # prefix ends that was cached.
          count = min(self._chunk - start % self._chunk, self._missing(opened))
          tokens[i, :count] = opened.fed[start : start + count]
          starts[i], counts[i], rows[i], whole_rows[i] = start, count, row_there, row
          if scores:
            following[i, :count] = opened.fed[start + 1 : start + 1 + count]
            scored.append((opened, i, count))
          if shows:
            self._show(opened.request.pictures, start, start + count, *(jax.tree.map(lambda x, i=i: x[i, :], shown)))
          self._pool.add(row, tokens[i, :count])
          opened.computed += count
          opened.fills = self._missing(opened) > 0
      self._computed += 1
      spans = self._weights, self._cache, tokens, starts, counts, rows
      if scores:
        self._cache, routes, computed = self._programs.score(*spans, following)
        self._note_scores(scored, jax.device_get(computed))
      else:
        program = self._programs.show if shows else self._programs.prefills[num_spans]
        self._cache, routes = program(*spans, *shown)
      if self._routes is not None:
        for of_span, row, start, count in zip(jax.device_get(routes), whole_rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
          self._routes[row, start : start + count] = of_span[:count]

  def _note_scores(self, scored: Sequence[tuple[OpenRequest, int, int]], scores: Scores) -> None:
    """Gives requests the scores of their prompts' tokens, by the span and its number of tokens."""
    for opened, i, count in scored:
      if not opened.tokens:  # Else they are known, and their keys and values are computed again.
        opened.prompt_scores += scores_of(jax.tree.map(lambda x, i=i, count=count: x[i, :count], scores), opened.request.prompt_likeliest)

  def _show(self, pictures: Pictures, start: int, end: int, positions: Int[np.ndarray, "C 3"], images: Images) -> None:
    """Writes what a span of a prompt shows into its part of the arrays of `no_spans`."""
    positions[: end - start], slots = pictures.span(start, end)
    here = np.flatnonzero(slots >= 0)
    if len(here):
      images.slots[here] = here
      images.features[0, here] = self._features_of(pictures)[slots[here]]

  def _features_of(self, pictures: Pictures) -> Float[np.ndarray, "_ F D"]:
    """Returns the features of all image tokens, computed once for all that show the pictures."""
    if pictures.key not in self._features:
      features = pictures.features
      if features is None:
        images = blank(self._room.shapes(1, 1))
        put(images, 0, 0, pictures)
        features = np.asarray(self._programs.features(self._weights, jax.tree.map(lambda x: x[0], images.patches)))
      self._features[pictures.key] = features.reshape(-1, *features.shape[-2:])
    return self._features[pictures.key]

  def _num_spans(self, waiting: Sequence[OpenRequest]) -> int:
    """Returns the number of spans of the program that computes the prompts of some requests."""
    least, most = self._span_counts[0], self._span_counts[-1]
    if most == least:
      return most
    starts = (self._pool.lengths.item(opened.place.row) % self._chunk for opened in waiting)
    needed = sum(-(-(start + self._missing(opened)) // self._chunk) for start, opened in zip(starts, waiting, strict=True))
    # Calls of the smaller program, as long as they compute fewer spans.
    return least if -(-needed // least) * least < most else most

  def _missing(self, opened: OpenRequest) -> int:
    """Returns how many tokens still have to be computed before the last one that is known."""
    return max(len(opened.fed) - 1 - self._pool.lengths.item(opened.place.row), 0)

  def _begin_stretch(self) -> Stretch | None:
    """Lets the device draw tokens for rows whose prompts are computed; None if it draws none."""
    ahead = set() if self._flying is None else set(self._flying.rows)
    ready = [opened for opened in self._running.values() if not (opened.fills or opened.copies or opened in ahead)]
    ready = [opened for opened in ready if opened.allowed(self._version)]
    # A stretch costs the same for fewer rows, which had better wait for those that are being drawn.
    if not ready or (ahead and len(ready) < self._widths[0]):
      return None
    width = next((width for width in self._widths if len(ready) <= _ROUNDING * width), self._widths[-1])
    # In the order of the rows that have waited for longest.
    ready = sorted(ready, key=lambda opened: opened.drawn_at)[:width]
    rows = self._rows
    rows.budgets[:] = 0
    for opened in ready:
      row, drawn = opened.place.row, len(opened.tokens)
      rows.tokens[row] = opened.tokens[-1] if drawn else opened.prompt[-1]
      rows.columns[row], rows.ordinals[row] = len(opened.prompt) + drawn - 1, opened.request.drawn + drawn
      rows.budgets[row] = min(opened.request.max_tokens - drawn, opened.allowed(self._version))
    columns, places = [opened.place.row for opened in ready], np.arange(width, dtype=np.int32)
    if width < len(rows.tokens):
      places[:], places[: len(columns)] = len(rows.tokens), columns
      columns = range(len(columns))
    # Copies, because the device may read them while the next turn writes. Beyond the rows that are
    # ready, they are of the last one, with nothing to draw.
    own = jax.tree.map(lambda x: x[np.minimum(places, len(rows.tokens) - 1)], rows)
    if width < len(rows.tokens):
      own.budgets[len(columns) :] = 0
    self._stretches, self._computed = self._stretches + 1, self._computed + 1
    for opened in ready:
      opened.drawn_at = self._stretches
    program, masks = self._programs.stretches[width], ()
    if any(opened.mask is not None for opened in ready):
      program, masks = self._programs.constrained(width), (self._masks(ready, columns, width),)
    self._cache, drawn = program(self._weights, self._cache, own, places, *masks)
    return Stretch(ready, columns, drawn, self._version)

  def _masks(self, ready: Sequence[OpenRequest], columns: Sequence[int], width: int) -> UInt32[np.ndarray, "B W"]:
    """Returns the masks of the rows of a stretch, all ones for those without a grammar."""
    masks = np.full((width, num_words(self._vocab_size)), np.iinfo(np.uint32).max, np.uint32)
    for opened, column in zip(ready, columns, strict=True):
      if opened.mask is not None:
        masks[column] = opened.mask
    return masks

  def _hand_over(self, stretch: Stretch | None) -> None:
    """Waits for a stretch, and gives its tokens to the callers."""
    if stretch is None:
      return
    drawn, version = jax.device_get(stretch.drawn), stretch.version
    tokens, logprobs = drawn.tokens.T, drawn.logprobs.T
    counts, finite = np.sum(tokens != NO_ID, axis=1), (np.isfinite(logprobs) | (tokens == NO_ID)).all(axis=1)
    rows, columns = [opened.place.row for opened in stretch.rows], list(stretch.columns)
    for of_rows, x in zip(jax.tree.leaves(self._rows.matching), jax.tree.leaves(drawn.matching), strict=True):
      of_rows[rows] = x[columns]
    is_stopped = (drawn.reasons == StopReason.TOKEN) | (drawn.reasons == StopReason.STRING)
    for opened, column in zip(stretch.rows, columns, strict=True):
      count, row = int(counts[column]), opened.place.row
      if self._routes is not None:
        start = int(self._rows.columns[row])
        self._routes[row, start : start + count] = drawn.routes[:count, column]
      if opened.kept is not None:
        bits = np.unpackbits(drawn.kept[:count, column], axis=1, count=self._vocab_size)
        opened.kept += [np.flatnonzero(of_token).tolist() for of_token in bits]
      opened.computed += count
      scores = None
      if opened.scores is not None:
        own = jax.tree.map(lambda x, column=column, count=count: x[:count, column], drawn.scores)
        scores = scores_of(own, opened.request.likeliest)
        opened.scores += scores
      if finite[column]:
        piece = Piece(tokens[column, :count].tolist(), logprobs[column, :count].tolist(), version, scores)
        self._give(opened, piece, bool(is_stopped[column]))
      else:
        self._finish(opened, FloatingPointError(f"the log-probabilities are not finite: the weights of version {version} are broken"))

  def _give(self, opened: OpenRequest, piece: Piece, is_stopped: bool) -> None:
    """Gives a caller what its row has drawn."""
    tokens, logprobs, version, _ = piece
    # Each of them was drawn by feeding the one before.
    self._pool.add(opened.place.row, [opened.tokens[-1] if opened.tokens else int(opened.prompt[-1]), *tokens[:-1]])
    if not opened.tokens:
      self._prompt_tokens, self._cached_tokens = self._prompt_tokens + len(opened.prompt), self._cached_tokens + opened.cached
    self._drawn_tokens += len(tokens)
    opened.tokens += tokens
    opened.logprobs += logprobs
    opened.drew(len(tokens), version)
    if opened.on_piece is not None:
      try:
        opened.on_piece(piece)
      except Exception as error:  # A fault of one caller, which must not reach the others.
        opened.error, opened.aborted = error, True
    is_last = is_stopped or len(opened.tokens) >= opened.request.max_tokens
    if opened.grammar is not None and not is_last:
      try:
        opened.follow(tokens)
      except Exception as error:  # A fault of one grammar, which must not reach the others.
        opened.error, is_last = error, True
    if is_last:
      self._finish(opened, "stop" if is_stopped else "length")
    elif (part := opened.next_part()) is not None:
      if not part[1]:
        self._finish(opened, ReplayLost(f"found no end after {len(opened.tokens)} tokens, expected one: other weights drew it before"))
      elif part[0] > version and self._in_flight == "recompute":
        self._leave_row(opened)  # For those that these weights have yet to draw.
        opened.fed = np.concatenate([opened.prompt, np.asarray(opened.tokens, opened.prompt.dtype)])
        self._waiting.appendleft(opened)

  def _finish(self, opened: OpenRequest, outcome: str | Exception) -> None:
    """Ends a request, for a reason of `Decoded` or with an error of its own, and frees its row."""
    routes = self._routes_of(opened)
    if opened.place is not None:
      self._leave_row(opened)
    with self._changed:
      self._num_open -= 1
      self._changed.notify_all()
    outcome = opened.error or outcome
    self._ended["error" if isinstance(outcome, Exception) else outcome] += 1
    if isinstance(outcome, Exception):
      opened.future.set_exception(outcome)
      return
    version = opened.parts[0][0] if opened.parts else self._version
    counts = opened.cached, opened.computed, version
    others = tuple(opened.parts), routes, opened.kept, opened.scores, opened.prompt_scores
    opened.future.set_result(Decoded(opened.tokens, opened.logprobs, outcome, *counts, *others))

  def _routes_of(self, opened: OpenRequest) -> Int16[np.ndarray, "S L K"] | None:
    """Returns the routes of a request's tokens but the last, which was not fed."""
    if self._routes is None:
      return None
    row, count = (0, 0) if opened.place is None or opened.copies else (opened.place.row, int(self._pool.lengths[opened.place.row]))
    return self._routes[row, :count].copy()
