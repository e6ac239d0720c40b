"""The programs of the engine, compiled once: prefill, copy of rows, and a stretch of steps."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int16, Integer, PyTree, UInt8, UInt32

from jaxrl_llm.decoding.draw import draw, sequence_keys
from jaxrl_llm.decoding.engine.scores import Scores, no_scores, score
from jaxrl_llm.decoding.filters import LEAST_TEMPERATURE, REMOVED, filter_logits
from jaxrl_llm.decoding.stops import NO_ID, RUNNING, Matching, StopTable, Vocabulary, advance_stops, stops_of_row
from jaxrl_llm.devices.mesh import platform_of, replicated, row_sharding
from jaxrl_llm.kernels.partial import CPU_BLOCK
from jaxrl_llm.models import Model, lower_precision
from jaxrl_llm.models.cache import copy_rows, put_rows, take_rows
from jaxrl_llm.models.head import chunk_logprobs
from jaxrl_llm.models.image_slots import Room, blank
from jaxrl_llm.types import Images, Params, StopReason

_WIDTHS = (64, 16)
"""Numbers of rows that a CPU decodes together: more would cost as much per row, and idle more."""

_LEAST_WIDTH = 32
"""Number of rows that a core decodes together if others decode too: fewer cost more per row."""

_LEAST_SPANS = 8
"""Least number of spans of which a CPU has a program for a quarter, too."""

_ALIGNMENT = {"cpu": CPU_BLOCK}
_BLOCK = 256
"""Units of the number of columns: by platform, and one that the blocks of all kernels divide."""

_WORD = 32
"""Bits of a word of a mask of ids."""


class Rows(NamedTuple):
  """What the rows draw in a stretch, as NumPy arrays.

  Attributes:
    tokens: Token that each row feeds first.
    columns: Column of that token.
    ordinals: Number of tokens drawn so far.
    budgets: Number of tokens that the row may still draw; 0 if it draws none.
    temperatures, top_ks, top_ps: Settings of `filter_logits`.
    seeds: Seed of each row's draws, in words; see `draw.sequence_keys`.
    stops: What ends each row's completion, without the vocabulary.
    matching: Bits of the stop strings that the completions end with; see `stops`.
    shifts: Position of each token less its column; None if the engine reads text alone, where both
      are the same.
    scored: Whether the tokens of each row are scored; None if the engine gives no scores.
    leasts: Number of tokens before which no stop id is drawn; None if the engine gives no scores.
  """

  tokens: Int[np.ndarray, " B"]
  columns: Int[np.ndarray, " B"]
  ordinals: Int[np.ndarray, " B"]
  budgets: Int[np.ndarray, " B"]
  temperatures: Float[np.ndarray, " B"]
  top_ks: Int[np.ndarray, " B"]
  top_ps: Float[np.ndarray, " B"]
  seeds: Integer[np.ndarray, "B 2"]
  stops: StopTable
  matching: Matching
  shifts: Int[np.ndarray, " B"] | None = None
  scored: Bool[np.ndarray, " B"] | None = None
  leasts: Int[np.ndarray, " B"] | None = None


class StretchTokens(NamedTuple):
  """What the rows drew in the k steps of a stretch.

  Attributes:
    tokens: Ids; `NO_ID` where none was drawn.
    logprobs: Log-probability of each id under the distribution that it was drawn from.
    routes: Experts that the token visited which was fed to draw each one; None if not recorded.
    kept: Ids that the filters left to draw each one from, as bits; None if not recorded.
    reasons: `StopReason` of each row, or `RUNNING`.
    matching: Bits of the stop strings that the completions end with; see `stops`.
    scores: Scores of the ids, of rows that ask for them; None if the engine gives none.
  """

  tokens: Int[Array, "k B"]
  logprobs: Float[Array, "k B"]
  routes: Int16[Array, "k B L K"] | None = None
  kept: UInt8[Array, "k B V8"] | None = None
  reasons: Int[Array, " B"] | None = None
  matching: Matching | None = None
  scores: Scores | None = None


class EnginePrograms(NamedTuple):
  """Compiled programs. The cache is updated in place.

  Attributes:
    weights: Function from params to a copy that the other programs read.
    make_cache: Function to an empty cache.
    prefills: Functions `(weights, cache, tokens [N C], starts [N], counts [N], rows [N]) -> (cache,
      routes [N C L K])`, by the number of spans N that they compute, the largest first; see
      `Model.extend`.
    copy: Function `(cache, sources [N], targets [N]) -> cache`; see `copy_rows`. Spans and copies
      lie in pieces, one for each of the devices that rows are split over, as in `cache.Spans`.
    stretches: Functions `(weights, cache, rows [w ...], places [w]) -> (cache, Drawn)`, by the
      number of rows w that they decode, the largest first. The places are rows of the cache, all
      different, and number B stands for none; for w = B they are all rows in their order.
    vocabulary: Bytes of the ids, in which stop strings are found; None without stop strings.
    show: Function like `prefills`, for spans of prompts that show pictures, with the arguments of
      `no_spans` behind the others. None if the engine reads text alone.
    features: Function `(weights, patches [I ...]) -> features [I S F D]` of a trained tower; None
      without one.
    score: Function like `prefills`, with the token after each one as a last argument [N C], whose
      `Scores` it returns behind the others. None if the engine gives no scores.
    constrained: Function from a number of rows to a program like that of `stretches`, of a single
      step, with the words [w, W] of `GrammarState.mask` as a last argument. It compiles the program
      when it is first asked for it.
  """

  weights: Callable[[Params], PyTree]
  make_cache: Callable[[], PyTree]
  prefills: Mapping[int, Callable[..., tuple[PyTree, Array | None]]]
  copy: Callable[..., PyTree]
  stretches: Mapping[int, Callable[..., tuple[PyTree, "StretchTokens"]]]
  vocabulary: Vocabulary | None = None
  show: Callable[..., tuple[PyTree, Array | None]] | None = None
  features: Callable[..., Array] | None = None
  score: Callable[..., tuple[PyTree, Array | None, Scores]] | None = None
  constrained: Callable[[int], Callable[..., tuple[PyTree, "StretchTokens"]]] | None = None


class Program(NamedTuple):
  """A program before it is compiled.

  Attributes:
    jitted: The program.
    arguments: Abstract arguments, or some that stand for all others of their shapes.
  """

  jitted: Callable
  arguments: tuple

  def compiled(self) -> Any:
    """Compiles it for the devices of its arguments."""
    return self.jitted.lower(*self.arguments).compile()


class Uncompiled(NamedTuple):
  """The programs of `EnginePrograms` before they are compiled.

  Attributes:
    weights, prefills, copy, stretches, show, features, score, constrained: Programs of these names.
    compiled: `weights` and `make_cache`, compiled because the others depend on where their results
      lie.
  """

  weights: Program
  prefills: Mapping[int, Program]
  copy: Program
  stretches: Mapping[int, Program]
  compiled: tuple[Callable, Callable]
  show: Program | None = None
  features: Program | None = None
  score: Program | None = None
  constrained: Mapping[int, Program] = {}

  @property
  def weights_and_cache(self) -> tuple[PyTree, PyTree]:
    """Abstract weights and cache, which the programs read."""
    return next(iter(self.stretches.values())).arguments[:2]


def no_rows(num_rows: int, *, vocabulary: Vocabulary | None, shows: bool = False, scores: bool = False) -> Rows:
  """Makes rows that draw nothing, with room for stop strings if there is a vocabulary.

  Those of an engine that shows pictures have shifts, and those of one with scores what these need.
  """
  zeros, ones = lambda: np.zeros(num_rows, np.int32), lambda: np.ones(num_rows, np.float32)
  stops, matching = jax.tree.map(lambda x: np.stack([x] * num_rows), stops_of_row(vocabulary=vocabulary))
  settings = (zeros(), zeros(), zeros(), zeros(), ones(), zeros(), ones(), np.zeros((num_rows, 2), np.uint32))
  of_scores = (np.zeros(num_rows, bool), zeros()) if scores else (None, None)
  return Rows(*settings, stops, matching, zeros() if shows else None, *of_scores)


def make_programs(model: Model, params: Params, *, vocabulary: Vocabulary | None = None, **options: Any) -> EnginePrograms:
  """Compiles the programs of an engine.

  Args:
    model: Model.
    params: Weights, or abstract ones.
    vocabulary: Bytes of the ids, for stop strings; None without them.
    **options: Sizes and options; see `uncompiled_programs`.
  """
  programs = uncompiled_programs(model, params, vocabulary=vocabulary, **options)
  compiled = lambda by_size: {size: program.compiled() for size, program in by_size.items()}
  all_sizes = compiled(programs.prefills), programs.copy.compiled(), compiled(programs.stretches)
  others = (own and own.compiled() for own in (programs.show, programs.features, programs.score))
  return EnginePrograms(*programs.compiled, *all_sizes, vocabulary, *others, _compiled_once(programs.constrained))


def _compiled_once(programs: Mapping[int, Program]) -> Callable[[int], Any]:
  """Returns a function to the program of a size, which any thread may be the first to ask for."""
  compiled, lock = {}, threading.Lock()

  def of_size(size: int) -> Any:
    with lock:
      if size not in compiled:
        compiled[size] = programs[size].compiled()
      return compiled[size]

  return of_size


def num_words(vocab_size: int) -> int:
  """Returns the number of words of a mask of ids."""
  return -(-vocab_size // _WORD)


def uncompiled_programs(
  model: Model,
  params: Params,
  *,
  slots: int,
  context: int,
  chunk: int,
  spans: int,
  steps: int,
  cache_dtype: str,
  vocabulary: Vocabulary | None = None,
  records_routes: bool = False,
  records_kept: bool = False,
  twins: int = 1,
  room: Room | None = None,
  likeliest: int = 0,
) -> Uncompiled:
  """Makes the programs of an engine, most of them uncompiled.

  Args:
    model: Model. Rows, spans and copies are split over the devices of its mesh, which must divide
      `slots` and `spans`.
    params: Weights, or abstract ones.
    slots: Number of rows (B).
    context: Number of columns that a row needs.
    chunk: Largest number of tokens of a span (C).
    spans: Number of spans of a prefill, and of pairs of rows of a copy (N).
    steps: Number of steps of a stretch (k).
    cache_dtype: Dtype of the cache, one of `CACHE_DTYPES`.
    vocabulary: Bytes of the ids, for stop strings; None without them.
    records_routes: Whether to return the experts that tokens visit.
    records_kept: Whether to return the ids that tokens are drawn from.
    twins: Number of engines that share the cores of a CPU, this one included.
    room: Room for pictures in a prompt; None for text alone.
    likeliest: Largest number of likeliest tokens in a score; 0 gives no scores.
  """
  sizes = column_blocks(context, platform_of(model.mesh))

  def make_cache() -> PyTree:
    cache = None
    for size in sizes:
      cache = model.grow(cache, slots, size, dtype=cache_dtype)
    return cache

  reads_patches = room is not None and model.config.train_tower

  def laid_out(params: Params) -> tuple[PyTree, Params]:
    params = lower_precision(params, model.config.dtype)
    return model.decoding_weights(params), {"tower": params["tower"]} if reads_patches else {}

  # The programs get a list: the nodes of the tree are slow to visit in each call.
  whole = partial(jax.tree.unflatten, jax.tree.structure(jax.eval_shape(laid_out, params)))

  def weights_of(params: Params) -> list[Array]:
    # Copies, because a jitted function returns an unchanged argument itself, which its owner may
    # donate later.
    return list(map(jnp.copy, jax.tree.leaves(laid_out(params))))

  def prefill(weights, cache, *spans):
    tokens, starts, counts, rows, *shown = split(spans)
    shown = dict(zip(("positions", "images"), shown, strict=False))
    _, cache, routes = model.extend(whole(weights)[0], tokens, cache, starts, counts, rows, **shown)
    return cache, routes.astype(jnp.int16) if records_routes else None

  def prefill_scored(weights, cache, *spans):
    tokens, starts, counts, rows, following = split(spans)
    logits, cache, routes = model.extend(whole(weights)[0], tokens, cache, starts, counts, rows, scores_all=True)
    return cache, routes.astype(jnp.int16) if records_routes else None, score(logits, following, likeliest)

  is_spread = model.mesh is not None and model.mesh.size > 1
  # What the host gives and gets is whole on each device, so that every process has all of it.
  whole_on_each = replicated(model.mesh) if is_spread else None
  split = lambda tree: jax.lax.with_sharding_constraint(tree, row_sharding(model.mesh)) if is_spread else tree

  program = lambda function, *args, **options: Program(jax.jit(function, **options), args)
  of_weights = program(weights_of, params)
  make_weights = of_weights.compiled()
  weights = _abstract(jax.eval_shape(weights_of, params), make_weights.output_shardings)
  # A mesh of one device need not be the first one.
  own_device = {} if model.mesh is None or is_spread else dict(out_shardings=replicated(model.mesh))
  allocate = program(make_cache, **own_device).compiled()
  cache = _abstract(jax.eval_shape(make_cache), allocate.output_shardings)
  keep = lambda *others: dict(out_shardings=(allocate.output_shardings, *others) if others else allocate.output_shardings)
  given = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole_on_each)
  of_spans = lambda count: [given(np.zeros(shape, np.int32)) for shape in ((count, chunk), (count,), (count,), (count,))]
  platform = platform_of(model.mesh)
  recorded = dict(records_routes=records_routes, records_kept=records_kept, likeliest=likeliest)

  def stretch(weights, cache, rows, places, *masks):
    weights, _ = whole(weights)
    # The host must see a token before it knows what may follow.
    nothing = _nothing(model, (1 if masks else steps, len(places)), **recorded)
    if len(places) == slots:
      return _stretch(model, vocabulary, nothing, weights, cache, split(rows), *split(masks))
    own, drawn = _stretch(model, vocabulary, nothing, weights, take_rows(cache, places), rows, *masks)
    return put_rows(cache, places, own), drawn

  counts, widths = span_counts(spans, platform), stretch_widths(slots, platform, twins)
  if is_spread:  # Rows and spans of one device each are not worth programs for fewer.
    counts, widths = (spans,), (slots,)
  rows = partial(no_rows, vocabulary=vocabulary, shows=room is not None, scores=likeliest > 0)
  places = lambda width: given(np.zeros(width, np.int32))
  drawn_of = lambda width: (weights, cache, jax.tree.map(given, rows(width)), places(width))
  masks = lambda width: given(np.zeros((width, num_words(model.config.vocab_size)), np.uint32))
  drawing, others = dict(donate_argnums=1, **keep(whole_on_each)), {}
  if likeliest:
    following, scoring = of_spans(min(counts))[0], dict(donate_argnums=1, **keep(whole_on_each, whole_on_each))
    others["score"] = program(prefill_scored, weights, cache, *of_spans(min(counts)), following, **scoring)
  if room is not None:
    shown = jax.tree.map(given, no_spans(room, min(counts), chunk))
    others["show"] = program(prefill, weights, cache, *of_spans(min(counts)), *shown, **drawing)
  if reads_patches:
    features = lambda weights, patches: model.features(whole(weights)[1], patches)
    patches = jax.tree.map(given, room.patches(room.pictures))
    others["features"] = program(features, weights, patches, out_shardings=whole_on_each)
  return Uncompiled(
    of_weights,
    {count: program(prefill, weights, cache, *of_spans(count), **drawing) for count in counts},
    program(partial(copy_rows, mesh=model.mesh), cache, *of_spans(spans)[1:3], donate_argnums=0, **keep()),
    {width: program(stretch, *drawn_of(width), **drawing) for width in widths},
    (make_weights, allocate),
    constrained={width: program(stretch, *drawn_of(width), masks(width), **drawing) for width in widths},
    **others,
  )


def no_spans(room: Room, num_spans: int, chunk: int) -> tuple[Int[np.ndarray, "N C 3"], Images]:
  """Makes the positions and the images of spans of text; each token has a place for features."""
  shapes = room._replace(config=room.config._replace(train_tower=False), pictures=1, tokens=chunk).shapes(num_spans, chunk)
  return np.zeros((num_spans, chunk, 3), np.int32), blank(shapes)


def num_twins(slots: int, platform: str, num_cores: int) -> int:
  """Returns how many engines should share the rows and the cores of a CPU.

  One engine decodes on one core: products of so few rows are too small to be shared by several.

  Example:
    >>> num_twins(256, "cpu", 2), num_twins(256, "cpu", 64), num_twins(100, "cpu", 2), num_twins(256, "gpu", 2)
    (2, 4, 1, 1)
  """
  return max(min(num_cores, slots // _WIDTHS[0]), 1) if platform == "cpu" else 1


def stretch_widths(slots: int, platform: str, twins: int = 1) -> tuple[int, ...]:
  """Returns how many rows the programs decode together, the largest number first.

  On a CPU the time of a step follows the number of its rows, idle ones included. On accelerators it
  hardly does: they read all weights for any number of rows.

  Example:
    >>> stretch_widths(256, "cpu"), stretch_widths(24, "cpu"), stretch_widths(256, "gpu")
    ((64, 16), (24,), (256,))
    >>> stretch_widths(128, "cpu", twins=2)
    (32, 16)
  """
  if platform != "cpu":
    return (slots,)
  most = min(slots, max(_WIDTHS[0] // twins, min(_LEAST_WIDTH, _WIDTHS[0])))
  return (most, *(width for width in _WIDTHS[1:] if 2 * width <= most))


def span_counts(spans: int, platform: str) -> tuple[int, ...]:
  """Returns how many spans the programs compute together, the largest number first.

  On a CPU the time follows their number, empty ones included.

  Example:
    >>> span_counts(32, "cpu"), span_counts(4, "cpu"), span_counts(32, "gpu")
    ((32, 8), (4,), (32,))
  """
  return (spans, spans // 4) if platform == "cpu" and spans >= _LEAST_SPANS else (spans,)


def _nothing(model: Model, shape: tuple[int, int], *, records_routes: bool, records_kept: bool, likeliest: int) -> StretchTokens:
  """Returns a stretch in which nothing was drawn, as NumPy arrays."""
  config, drawn = model.config, StretchTokens(np.full(shape, NO_ID, np.int32), np.zeros(shape, np.float32))
  if records_routes:
    drawn = drawn._replace(routes=np.full((*shape, config.num_layers, config.experts.top_k), -1, np.int16))
  if records_kept:
    drawn = drawn._replace(kept=np.zeros((*shape, -(-config.vocab_size // 8)), np.uint8))
  if likeliest:
    drawn = drawn._replace(scores=no_scores(shape, min(likeliest, config.vocab_size)))
  return drawn


def column_blocks(context: int, platform: str) -> tuple[int, ...]:
  """Returns the sizes of the blocks of columns.

  The kernels of accelerators skip what no row sees of a single block. On a CPU each block is
  twice the one before, and those that no row sees are skipped.

  Example:
    >>> column_blocks(1000, "cpu"), column_blocks(100, "cpu"), column_blocks(40, "cpu"), column_blocks(1000, "gpu")
    ((128, 128, 256, 512), (64, 64), (64,), (1024,))
  """
  unit = _ALIGNMENT.get(platform, _BLOCK)
  columns = -(-context // unit) * unit
  if platform != "cpu":
    return (columns,)
  sizes = [-(-context // (8 * unit)) * unit]
  while sum(sizes) < columns:
    sizes.append(min(sum(sizes), columns - sum(sizes)))
  return tuple(sizes)


def _abstract(shapes: PyTree, shardings: PyTree) -> PyTree:
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings)


class _Drawing(NamedTuple):
  """State of a stretch: steps so far, cache, each row's next token and stops, and the output.

  `idle` is the number of steps, summed over rows, since the rows that have ended did so.
  """

  step: Int[Array, ""]
  idle: Int[Array, ""]
  cache: PyTree
  tokens: Int[Array, " B"]
  matching: Matching
  reasons: Int[Array, " B"]
  drawn: StretchTokens


def _stretch(
  model: Model, vocabulary: Vocabulary | None, nothing: StretchTokens, weights: PyTree, cache: PyTree, rows: Rows,
  masks: UInt32[Array, "B W"] | None = None,
) -> tuple[PyTree, StretchTokens]:  # fmt: skip
  """Draws up to k tokens for each row with a budget; `nothing` has the shapes of the output.

  With `masks`, k is 1, and only ids whose bits are set are drawn.

  The stretch ends early once rows that have ended have waited for as long as a step of all rows
  takes, which is about what a return to the host costs.
  """
  keys = sequence_keys(jnp.asarray(rows.seeds))

  def is_needed(state: _Drawing) -> Bool[Array, ""]:
    return (state.step < len(nothing.tokens)) & jnp.any(state.reasons == RUNNING) & (state.idle < len(state.reasons))

  def advance(state: _Drawing) -> _Drawing:
    active = state.reasons == RUNNING
    fed = state.tokens[:, None], state.cache, (columns := rows.columns + state.step), active.astype(jnp.int32)
    positions = None if rows.shifts is None else (columns + rows.shifts)[:, None]
    logits, cache, routes = model.extend(weights, *fed, positions=positions)
    if rows.leasts is not None:
      logits = _without_stops(logits, rows.stops.ids, rows.ordinals + state.step < rows.leasts)
    allowed = logits if masks is None else jnp.where(_bits(masks, logits.shape[-1]), logits, -jnp.inf)
    filtered = filter_logits(allowed, temperature=rows.temperatures, top_k=rows.top_ks, top_p=rows.top_ps)
    keys_of_step = jax.vmap(jax.random.fold_in)(keys, rows.ordinals + state.step)
    tokens, logprobs = draw(filtered, keys_of_step, whole_rows=model.whole_rows)
    logprobs = chunk_logprobs(filtered, tokens)[0] if model.config.exact else logprobs
    lengths = jnp.broadcast_to(state.step + 1, tokens.shape)
    stops = advance_stops(table, state.matching, state.reasons, tokens, lengths=lengths, limits=rows.budgets)
    drawn = StretchTokens(
      jnp.where(active, tokens, NO_ID),
      logprobs,
      None if nothing.routes is None else routes[:, 0].astype(jnp.int16),
      None if nothing.kept is None else jnp.packbits(filtered > REMOVED, axis=1),
      scores=None if nothing.scores is None else _scores(rows, active, logits, filtered, tokens, nothing.scores.ids.shape[-1]),
    )
    drawn = jax.tree.map(lambda all_steps, own: all_steps.at[state.step].set(own), state.drawn, drawn)
    idle = state.idle + jnp.sum((rows.budgets > 0) & ~active)
    return _Drawing(state.step + 1, idle, cache, tokens, *stops, drawn)

  rows, nothing = jax.tree.map(jnp.asarray, (rows, nothing))
  table, reasons = rows.stops._replace(vocabulary=vocabulary), jnp.where(rows.budgets > 0, RUNNING, int(StopReason.LENGTH))
  start = _Drawing(jnp.int32(0), jnp.int32(0), cache, rows.tokens, rows.matching, reasons, nothing)
  end = jax.lax.while_loop(is_needed, advance, start)
  return end.cache, end.drawn._replace(reasons=end.reasons, matching=end.matching)


def _bits(masks: UInt32[Array, "B W"], size: int) -> Bool[Array, "B V"]:
  """Returns the first bits of masks."""
  bits = masks[:, :, None] >> jnp.arange(_WORD, dtype=jnp.uint32) & 1
  return bits.reshape(len(masks), -1)[:, :size] != 0


def _without_stops(logits: Float[Array, "B V"], ids: Int[Array, "B M"], waits: Bool[Array, " B"]) -> Float[Array, "B V"]:
  """Removes the stop ids of rows that may not end yet."""
  size = logits.shape[-1]
  # Those beyond the vocabulary are dropped.
  removed = jnp.where(waits[:, None] & (ids != NO_ID), ids, size)
  remove = lambda x: x.at[jnp.arange(len(x))[:, None], removed].set(-jnp.inf, mode="drop")
  return jax.lax.cond(jnp.any(waits), remove, lambda x: x, logits)


def _scores(
  rows: Rows, active: Bool[Array, " B"], logits: Float[Array, "B V"], filtered: Float[Array, "B V"], tokens: Int[Array, " B"], count: int
) -> Scores:
  """Scores the drawn tokens of rows that ask for it: at temperature 0 under the model as it is."""

  def scored(logits, filtered, tokens):
    is_greedy = ~(rows.temperatures >= LEAST_TEMPERATURE)
    return score(jnp.where(is_greedy[:, None], logits.astype(jnp.float32), filtered), tokens, count)

  nothing = lambda logits, filtered, tokens: jax.tree.map(jnp.asarray, no_scores(tokens.shape, count))
  return jax.lax.cond(jnp.any(active & rows.scored), scored, nothing, logits, filtered, tokens)
