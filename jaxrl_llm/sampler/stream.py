"""A sampler that yields sequences as they finish.

It runs the decode loop in stretches, each a program of its own, so that host and devices work in
parallel.

  devices: | begin | stretch 0 | stretch 1     | stretch 2     | stretch 3
  host:    |                   | rewards of 0  | rewards of 1  | rewards of 2 ...

When the host receives the report of a stretch, the next stretch is already running and updates the
loop in place. Each stretch therefore copies the finished sequences into arrays of a fixed size and
reports how much of them to fetch.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int, Integer, PRNGKeyArray

from jaxrl_llm.devices.mesh import num_row_shards, replicated, row_sharding
from jaxrl_llm.sampler import exchange
from jaxrl_llm.sampler import loop as loop_lib
from jaxrl_llm.sampler.begin import begin
from jaxrl_llm.sampler.requests import RUNNING, Requests, check_requests
from jaxrl_llm.sampler.sampler import make_settings
from jaxrl_llm.sampler.state import Decoder, Inputs, Loop, Settings, exchanges, is_active, num_blocks
from jaxrl_llm.types import Params, Rollouts, Shown

_AHEAD = 2  # Number of stretches in flight while the host waits for the first of them.
# Minimum number of sequences that a report has room for, so that on a device with few rows a few
# finished sequences do not end a stretch.
_ROOM = 16
_UNFINISHED, _UNREPORTED, _REPORTED = 0, 1, 2
# Requests and pictures of a call that gives none.
_DEFAULTS = (Requests(), None)


class Finished(NamedTuple):
  """Finished sequences on the host.

  Attributes:
    sequences: Indices of the sequences among the N, in the order of the rows of `rollouts`.
    rollouts: Rollouts as the sampler returns them, as NumPy arrays.
    steps: Number of steps of the loop when they were reported.
  """

  sequences: Integer[np.ndarray, " m"]
  rollouts: Rollouts
  steps: int


StreamFn = Callable[..., Iterator[Finished]]
"""`(params, prompts [n P], prompt_mask [n P], key, requests=Requests(), shown=None, *,
unwanted=tuple) -> iterator of Finished`."""


class _Prompts(NamedTuple):
  """Prompts as the shards hold them, for the reports.

  Attributes:
    tokens: Token ids, padded on the left.
    mask: True at tokens of the prompts.
    routes: Routes of the prefilled tokens; None if not recorded.
  """

  tokens: Int[Array, "n P"]
  mask: Bool[Array, "n P"]
  routes: Int[Array, "n _ L K"] | None


class _Progress(NamedTuple):
  """State that a stretch updates, donated to it.

  Attributes:
    loop: State of the decode loop.
    moved: Inputs that change between stretches: aborted sequences leave the queue, and shards
      exchange sequences.
    prompts: Prompts in the order in which the shards hold them now.
    status: Report status of each sequence: `_UNFINISHED`, `_UNREPORTED` or `_REPORTED`.
  """

  loop: Loop
  moved: Inputs
  prompts: _Prompts
  status: Int[Array, "d M"]


class _Report(NamedTuple):
  """Report of a stretch to the host.

  Attributes:
    counts: Number of sequences that each shard reports.
    sequences: Indices of the sequences; meaningless beyond the count.
    parts: Rollouts of the sequences, split by columns. Only parts that hold sequences need to be
      fetched.
    steps: Number of steps of the loop so far.
    is_full: Whether the loop waits for the cache to grow.
    is_over: Whether all sequences have been reported.
  """

  counts: Int[Array, " d"]
  sequences: Int[Array, "d room"]
  parts: tuple[Rollouts, ...]
  steps: Int[Array, ""]
  is_full: Bool[Array, ""]
  is_over: Bool[Array, ""]


class _Programs(NamedTuple):
  """Programs for one bucket of prompts.

  Attributes:
    begin: Program that prefills the prompts and sets up the loop.
    stretches: One stretch for each size of the cache.
    growths: Growth of the cache from each size to the next.
  """

  begin: Callable[..., tuple[Inputs, _Progress]]
  stretches: tuple[Callable[[Inputs, _Progress, Any], tuple[_Progress, _Report]], ...]
  growths: tuple[Callable[[_Progress], _Progress], ...]


def make_stream(model: Decoder, *, steps_per_report: int = 32, signatures: Sequence[tuple] = (), **settings: Any) -> StreamFn:
  """Makes a sampler that yields sequences as they finish.

  Together they equal what `make_sampler`'s sampler returns for the same key. The stream is
  host-driven: it runs programs of at most `steps_per_report` steps and dispatches the next ones
  before the caller gets the sequences that the first has finished. The caller's work in between
  costs no device time, as long as it takes less than a stretch. A sequence is yielded with the
  others of the stretch in which it finished. If that report has no room, it is among the first of
  the next one.

  Args:
    model: Model to sample from, such as a `models.Model`.
    steps_per_report: Maximum number of steps of a stretch. It ends earlier once a report is full. A
      report has room for as many sequences as there are rows, but for at least 16.
    signatures: Abstract arguments of all later calls of the stream, params included. Their programs
      are compiled with the first call.
    **settings: Settings of `make_sampler`, with the same names and defaults.

  Returns:
    The stream, not to be jitted: it compiles at the first call of a bucket of prompts, for all
    sizes of the cache, and never again. `unwanted` is called before each stretch and returns
    sequences that are no longer wanted (a group that is decided). Those end as `StopReason.ABORTED`
    with the tokens that they have, if any, and their rows are refilled. Stretches in flight
    continue, so the answer takes effect one or two of them later. Params are read once and may be
    donated after the call.

  Raises:
    ValueError: If a setting is out of range.

  Note:
    Rows and prompts that the mesh divides are fetched from all of its devices, which must belong to
    one process.
  """
  if steps_per_report < 1:
    raise ValueError(f"rollout.steps_per_report: found {steps_per_report}, expected 1 or more")
  settings = make_settings(model, **settings)
  compiled: dict[tuple, _Programs] = {}

  def programs_of(args: tuple) -> _Programs:
    needed = (
      [args] if compiled else [args, *(_abstract_args(model, (*others, *_DEFAULTS[len(others) - 4 :])) for others in signatures)]
    )
    for others in needed:
      if _shapes(others) not in compiled:
        compiled[_shapes(others)] = _compile(model, settings, steps_per_report, _abstract_args(model, others))
    return compiled[_shapes(args)]

  def stream(
    params: Params,
    prompts: Integer[Array | np.ndarray, "n P"],
    prompt_mask: Bool[Array | np.ndarray, "n P"],
    key: PRNGKeyArray,
    requests: Requests = Requests(),  # noqa: B008 (a NamedTuple of None)
    shown: Shown | None = None,
    *,
    unwanted: Callable[[], Collection[int]] = tuple,
  ) -> Iterator[Finished]:
    num_sequences = len(prompts) * settings.group_size
    check_requests(requests, num_sequences, settings.max_new_tokens)
    args = (params, *_place_args(model, (prompts, prompt_mask, key, requests, shown)))
    programs = programs_of(args)
    return _run(programs, *programs.begin(*args), ask=lambda: _unwanted_mask(unwanted(), num_sequences))

  return stream


def collect_finished(finished: Iterable[Finished]) -> Rollouts:
  """Collects some or all sequences of one call in the order of the prompts.

  `collect_finished(stream(...))` waits for all of them.

  Raises:
    ValueError: If there is nothing to collect, or a sequence occurs twice, as from two calls.

  Example:
    >>> row = lambda token: Rollouts(*[np.array([[token]])] * 5, stopped=np.array([True]))
    >>> collect_finished([Finished(np.array([1]), row(7), 3), Finished(np.array([0]), row(8), 5)]).tokens.tolist()
    [[8], [7]]
  """
  finished = list(finished)
  numbers = np.concatenate([x.sequences for x in finished]) if finished else np.zeros(0, np.int32)
  if not len(numbers) or len(set(numbers.tolist())) < len(numbers):
    raise ValueError(
      f"finished: found {len(numbers)} sequences, {len(set(numbers.tolist()))} of them distinct, expected one or more sequences of a "
      "single call of a stream, each once"
    )
  order = np.argsort(numbers)
  return jax.tree.map(lambda *rows: np.concatenate(rows)[order], *[x.rollouts for x in finished])


def _run(programs: _Programs, given: Inputs, progress: _Progress, *, ask: Callable[[], Bool[np.ndarray, " N"]]) -> Iterator[Finished]:
  """Runs the host's side: keeps stretches in flight and yields the sequences of their reports."""
  size, pending = 0, deque()

  def dispatch() -> None:
    nonlocal progress
    progress, report = programs.stretches[size](given, progress, ask())
    pending.append((size, report))

  while True:
    while len(pending) < _AHEAD:
      dispatch()
    size_then, report = pending.popleft()
    parts, report = report.parts, jax.device_get(report._replace(parts=()))
    if report.is_full and size_then == size:
      # The stretch in flight has no room either and does nothing, so dispatch another one.
      size, progress = size + 1, programs.growths[size](progress)
      dispatch()
    if report.counts.any():
      yield _fetch(report, parts)
    if report.is_over:
      return


def _fetch(report: _Report, parts: tuple[Rollouts, ...]) -> Finished:
  """Fetches the rows of a report that hold sequences."""
  counts, sequences = report.counts, report.sequences
  ends = np.cumsum([part.tokens.shape[1] for part in parts])
  parts = jax.device_get(parts[: int(np.searchsorted(ends, counts.max())) + 1])
  there = np.arange(sequences.shape[1]) < counts[:, None]
  taken = lambda *x: np.concatenate(x, axis=1)[there[:, : ends[len(x) - 1]]]
  return Finished(sequences[there], jax.tree.map(taken, *parts), int(report.steps))


def _unwanted_mask(unwanted: Collection[int], num_sequences: int) -> Bool[np.ndarray, " N"]:
  marks = np.zeros(num_sequences, bool)
  for i in unwanted:
    if not 0 <= i < num_sequences:
      raise ValueError(
        f"unwanted: found sequence {i}, expected numbers from 0 to {num_sequences - 1}, G in a row for each prompt"
      )
    marks[i] = True
  return marks


def _begin(
  model: Decoder, settings: Settings, params: Params, prompts, prompt_mask, key, requests: Requests, shown: Shown | None
) -> tuple[Inputs, _Progress]:
  inputs, loop, routes = begin(model, settings, params, prompts, prompt_mask, key, requests, shown)
  # The dummy sequence counts as reported from the start.
  status = jnp.full(inputs.queue.shape, _UNFINISHED, jnp.int8).at[:, -1].set(_REPORTED)
  moved = exchange.movable(inputs)
  return exchange.fixed(inputs), _Progress(loop, moved, _Prompts(prompts, prompt_mask, routes), status)


def _stretch(
  model: Decoder, settings: Settings, steps: int, given: Inputs, progress: _Progress, unwanted: Bool[Array, " N"]
) -> tuple[_Progress, _Report]:
  """Runs up to `steps` steps and reports the sequences that have finished.

  It runs fewer steps if the cache or the report is full, or if nothing is left to draw.
  """
  inputs = exchange.with_fixed(progress.moved, given)
  inputs, loop = loop_lib.abort(settings, inputs, progress.loop, unwanted[inputs.numbers])
  prompts, status = progress.prompts, progress.status
  if exchanges(loop):
    inputs, loop, prompts, status = _exchange_all(model, settings, inputs, loop, prompts, status)
  end, room = loop.step + steps, min(max(loop.sequences.shape[1], _ROOM), loop.outputs.reasons.shape[1] - 1)
  is_done = lambda loop: loop.outputs.reasons != RUNNING
  num_unreported = lambda loop: jnp.sum(is_done(loop) & (status != _REPORTED), axis=1)
  # More sequences may finish at a step than the report has room for; the excess fits the next one.
  should_continue = lambda loop: (
    loop_lib.should_continue(settings, inputs, loop) & (loop.step < end) & (jnp.max(num_unreported(loop)) < room)
  )
  loop = jax.lax.while_loop(should_continue, partial(loop_lib.advance, model, settings, inputs), loop)

  has_ended = ~loop_lib.has_demand(settings, inputs, loop)
  longest = jnp.max(jnp.where(is_active(loop), loop.lengths + 1, 0))
  status, order, counts = _choose(status, is_done(loop) | has_ended, room)
  report = _Report(
    counts=counts,
    sequences=jnp.take_along_axis(inputs.numbers, order, axis=1),
    parts=_parts(_rows(settings, prompts, loop, order)),
    steps=loop.step,
    is_full=~has_ended & (longest > len(loop.written)),
    is_over=jnp.all(status == _REPORTED),
  )
  return _Progress(loop, exchange.movable(inputs), prompts, status), report


def _exchange_all(
  model: Decoder, settings: Settings, inputs: Inputs, loop: Loop, prompts: _Prompts, status: Int[Array, "d M"]
) -> tuple[Inputs, Loop, _Prompts, Int[Array, "d M"]]:
  """Gives idle rows sequences of other shards until no exchange is possible.

  A prompt can be replaced once all of its samples have been reported.
  """
  is_over = lambda loop, status: (loop.outputs.reasons != RUNNING) & (status == _REPORTED)
  join = lambda moved: exchange.with_fixed(moved, inputs)

  def is_possible(state) -> Bool[Array, ""]:
    moved, loop, _, status = state
    return exchange.is_possible(settings, join(moved), loop, is_over(loop, status))

  def once(state):
    moved, loop, prompts, status = state
    moved, loop, move = exchange.exchange(model, settings, join(moved), loop, is_over(loop, status))
    return exchange.movable(moved), loop, exchange.copy_prompts(move, prompts), exchange.move_samples(move, status)

  moved, *others = jax.lax.while_loop(is_possible, once, (exchange.movable(inputs), loop, prompts, status))
  return join(moved), *others


def _choose(
  status: Int[Array, "d M"], is_done: Bool[Array, "d M"], room: int
) -> tuple[Int[Array, "d M"], Int[Array, "d room"], Int[Array, " d"]]:
  """Chooses the sequences of a report, those left over from the last one first.

  Returns:
    The new report status, the sequences that the report has room for, and how many of them are
    reported.
  """
  is_new = is_done & (status == _UNFINISHED)
  rank = jnp.where(status == _UNREPORTED, 0, jnp.where(is_new, 1, 2))
  order = jnp.argsort(rank, axis=1, stable=True)[:, :room]
  counts = jnp.minimum(jnp.sum(rank < 2, axis=1), room)
  dummy = status.shape[1] - 1
  chosen = jnp.where(jnp.arange(room) < counts[:, None], order, dummy)
  status = jnp.where(is_new, _UNREPORTED, status).astype(status.dtype)
  return jax.vmap(lambda shard, i: shard.at[i].set(_REPORTED))(status, chosen), order, counts


def _rows(settings: Settings, prompts: _Prompts, loop: Loop, order: Int[Array, "d room"]) -> Rollouts:
  """Returns rollouts of some sequences of each shard, [d room ...]."""
  take = jax.vmap(lambda shard, i: shard[i])
  with_dummy = jnp.pad(order, ((0, 0), (0, 1)))
  outputs = jax.tree.map(lambda x: take(x, with_dummy), loop.outputs)
  of_prompts = lambda x: take(x.reshape(len(order), -1, *x.shape[1:]), order // settings.group_size).reshape(-1, *x.shape[1:])
  tokens, mask, routes = jax.tree.map(of_prompts, prompts)
  rollouts = loop_lib.rollouts(settings._replace(group_size=1), tokens, mask, outputs, routes)
  return jax.tree.map(lambda x: x.reshape(*order.shape, *x.shape[1:]), rollouts)


def _parts(rollouts: Rollouts) -> tuple[Rollouts, ...]:
  """Splits the columns of a report: a sixteenth, up to a quarter, and the rest.

  Usually few of the rows finish in one stretch.
  """
  size = rollouts.tokens.shape[1]
  ends = sorted({-(-size // 16), -(-size // 4), size})
  return tuple(jax.tree.map(lambda x, a=a, b=b: x[:, a:b], rollouts) for a, b in zip([0, *ends], ends))


def _compile(model: Decoder, settings: Settings, steps: int, args: tuple) -> _Programs:
  """Compiles all programs for abstract arguments.

  The state keeps its shardings, so that each stretch accepts the state of the last one.
  """
  begin = jax.jit(partial(_begin, model, settings)).lower(*args)
  programs = _Programs(begin.compile(), (), ())
  given, progress = _abstract_outputs(begin, programs.begin)
  unwanted = jax.ShapeDtypeStruct((len(args[1]) * settings.group_size,), bool)
  reports = _report_shardings(model, len(progress.status))
  while True:
    shardings = jax.tree.map(lambda x: x.sharding, progress)
    stretch = jax.jit(partial(_stretch, model, settings, steps), donate_argnums=1, out_shardings=(shardings, reports))
    programs = programs._replace(stretches=(*programs.stretches, stretch.lower(given, progress, unwanted).compile()))
    if num_blocks(settings, progress.loop) == len(settings.cache_blocks):
      return programs
    growth = jax.jit(partial(_grow, model, settings), donate_argnums=1).lower(*_split_written(progress))
    grow = growth.compile()
    programs = programs._replace(growths=(*programs.growths, lambda x, grow=grow: grow(*_split_written(x))))
    progress = _abstract_outputs(growth, grow)


def _split_written(progress: _Progress) -> tuple[Any, _Progress]:
  """Separates the buffer that grows with the cache from the rest.

  The old buffer cannot be reused for the longer one; the rest stays in place.
  """
  return progress.loop.written, progress._replace(loop=progress.loop._replace(written=None))


def _grow(model: Decoder, settings: Settings, written: Int[Array, " S"], progress: _Progress) -> _Progress:
  return progress._replace(loop=loop_lib.grow(model, settings, progress.loop._replace(written=written)))


def _abstract_outputs(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> Any:
  """Returns the abstract outputs of a program."""
  array = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.tree.map(array, lowered.out_info, compiled.output_shardings)


def _report_shardings(model: Decoder, num_shards: int) -> _Report | None:
  """Returns the shardings of a report: rows stay on the devices that drew them.

  The few numbers are replicated, so that every process can read them.
  """
  if model.mesh is None:
    return None
  everywhere = replicated(model.mesh)
  return _Report(
    everywhere,
    everywhere,
    everywhere if num_shards == 1 else row_sharding(model.mesh),
    everywhere,
    everywhere,
    everywhere,
  )


def _place_args(model: Decoder, args: tuple) -> tuple:
  """Places arguments other than params where the programs expect them.

  Rows are split over the mesh if it divides them; the rest is replicated on all devices.
  """
  array = lambda x: x if isinstance(x, jax.Array) else np.asarray(x)
  return jax.tree.map(lambda x: jax.device_put(array(x), _sharding(model, np.shape(x))), args)


def _sharding(model: Decoder, shape: tuple[int, ...]) -> NamedSharding | None:
  if model.mesh is None:
    return None
  splits = bool(shape) and shape[0] % num_row_shards(model.mesh) == 0
  return row_sharding(model.mesh) if splits else replicated(model.mesh)


def _abstract_args(model: Decoder, args: tuple) -> tuple:
  """Returns the shapes of arguments with their shardings."""
  params, *others = args
  array = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  of_params = jax.tree.map(lambda x: array(x, getattr(x, "sharding", None)), params)
  return of_params, *jax.tree.map(lambda x: array(x, _sharding(model, x.shape)), others)


def _shapes(args: tuple) -> tuple:
  leaves, structure = jax.tree.flatten(args)
  return structure, *((x.shape, str(x.dtype)) for x in leaves)
