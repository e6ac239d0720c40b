"""The decode loop: what one step does to all rows, and how a row that is done takes the next sequence.

Sequences wait in line; a fixed number of rows decodes them. All rows write the same column of the cache at the same step, wherever they
are in their own responses, so that writing is one slice; a column is a row's own while it is younger than the row's response. The column
to write is always the oldest, which nobody can still need: a response has no more tokens than there are columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxrl_llm.mesh import num_row_shards, row_sharding
from jaxrl_llm.sampler import stops
from jaxrl_llm.sampler.draw import draw
from jaxrl_llm.sampler.filters import REMOVED, make_filter
from jaxrl_llm.sampler.requests import RUNNING, Begun, Requests, finished_before, in_pieces, tree_in_pieces, whole
from jaxrl_llm.types import Params, Rollouts, StopReason

_NEVER = -(2**30)  # The step at which a column was written that nobody has written: older than any response.
# Rows of a device unless somebody says: as many as keep its arithmetic busy. More only wait for the longest response of them all. The CPU's
# was measured (experiments/LOG.md); on accelerators more rows share each reading of the weights.
_ROWS = {"cpu": 128, "gpu": 512, "tpu": 512}
_UNSPLIT = ("weights", "key", "prompts_seen", "max_steps", "enough_groups", "step", "written", "cache")  # Not in pieces.
_ALIGNMENT = 16  # Columns of the prompts' cache are a multiple of it, so that rows of keys begin where vectors do.


@runtime_checkable
class Decoder(Protocol):
  """What the sampler needs of a model; see `models.Model`."""

  mesh: Mesh | None
  prefill: Callable[..., tuple[PyTree, Any]]
  grow: Callable[..., PyTree]
  decoding_weights: Callable[[Params], PyTree]
  resume: Callable[..., PyTree]
  decode: Callable[..., tuple[Float[Array, "B V"], PyTree, Any]]


class Settings(NamedTuple):
  """What a sampler is compiled for; see `decode.make_sampler`."""

  group_size: int
  max_new_tokens: int
  stop_ids: tuple[int, ...]
  pad_id: int
  temperature: float
  top_k: int
  top_p: float
  slots: int | None
  cache_dtype: str
  cache_blocks: tuple[int, ...]
  route_shape: tuple[int, int] | None
  entropy: bool
  stop_table: stops.StopTable | None


class Job(NamedTuple):
  """What every step reads and none changes. Sequences lie in d pieces, one for each device that holds rows, of M − 1 sequences each.

  Attributes:
    weights: as the model decodes with them.
    key: of this call.
    prompts_seen: True where a column of the prompts' cache holds a token; None without one.
    positions: of the last token of each sequence's prompt, the first that is decoded.
    tokens: that token.
    queue: sequences in the order in which they start; M − 1 for none.
    numbers: of each sequence among all: what its random stream is made of.
    limits: most tokens of each response.
    temperatures: None where all have the sampler's.
    min_new_tokens: None where nobody asked.
    begun: None where all start from nothing.
    max_steps: None for as many as it takes.
    enough_groups: None for all of them.
  """

  weights: PyTree
  key: PRNGKeyArray
  prompts_seen: Bool[Array, "n P"] | None
  positions: Int[Array, "d M"]
  tokens: Int[Array, "d M"]
  queue: Int[Array, "d M"]
  numbers: Int[Array, "d M"]
  limits: Int[Array, "d M"]
  temperatures: Float[Array, "d M"] | None
  min_new_tokens: Int[Array, "d M"] | None
  begun: Begun | None
  max_steps: Int[Array, ""] | None
  enough_groups: Int[Array, ""] | None


class Drawn(NamedTuple):
  """What is known of the responses so far; the last sequence of a piece is nobody's.

  Attributes:
    tokens: ids.
    logprobs: of the distribution that each token was drawn from.
    raw_logprobs: of the model itself; None where that is the same.
    entropy: None where nobody asked.
    routing: of the token that was fed to draw each; None where nobody asked.
    lengths: tokens so far.
    reasons: `RUNNING`, or a `StopReason`.
  """

  tokens: Int[Array, "d M R"]
  logprobs: Float[Array, "d M R"]
  raw_logprobs: Float[Array, "d M R"] | None
  entropy: Float[Array, "d M R"] | None
  routing: Int[Array, "d M R L K"] | None
  lengths: Int[Array, "d M"]
  reasons: Int[Array, "d M"]


class Loop(NamedTuple):
  """What a step changes.

  Attributes:
    step: how many there have been.
    written: the step at which each column of the cache was last written.
    cache: the model's.
    sequences: that each row decodes, M − 1 for none.
    lengths: tokens that it has so far.
    tokens: the one to feed next.
    matching: states of the stop automata; None without.
    started: how many sequences of the queue have a row, or had one.
    drawn: the responses.
  """

  step: Int[Array, ""]
  written: Int[Array, " S"]
  cache: PyTree
  sequences: Int[Array, "d b"]
  lengths: Int[Array, "d b"]
  tokens: Int[Array, "d b"]
  matching: Int[Array, "d b A"] | None
  started: Int[Array, " d"]
  drawn: Drawn


def _at(x: Array, index: Int[Array, "d b"]) -> Array:
  """Entries of each piece."""
  return jax.vmap(lambda piece, i: piece[i])(x, index)


def _put(x: Array, index: Int[Array, "d b"], value: Array) -> Array:
  return jax.vmap(lambda piece, i, v: piece.at[i].set(v))(x, index, value)


def begin(
  model: Decoder, settings: Settings, params: Params, prompts: Int[Array, "n P"], prompt_mask: Bool[Array, "n P"], key, requests: Requests
) -> tuple[Job, Loop, Int[Array, "n _ L K"] | None]:
  """Prefills the prompts, each once, and gives the first rows their sequences.

  All tokens of a prompt but the last are prefilled; the last one is the first that a row decodes, so that every row of a group draws its
  first token like any other and no logits of prompts are kept.

  Returns:
    The job, the loop before its first step, and the routes of the prefilled tokens (None where nobody asked).
  """
  num_prompts, width = prompts.shape
  num_sequences = num_prompts * settings.group_size
  pieces, rows = division(model.mesh, num_prompts, settings)
  per_piece = num_sequences // pieces
  each = lambda x: in_pieces(jnp.repeat(x, settings.group_size, axis=0), pieces)

  cache, routes, seen = None, None, None
  if width > 1:
    margin = ((0, 0), (-(width - 1) % _ALIGNMENT, 0))
    seen = jnp.pad(prompt_mask[:, :-1], margin)
    tokens = jnp.pad(prompts[:, :-1], margin, constant_values=settings.pad_id)
    cache, routes = model.prefill(params, tokens, seen, dtype=settings.cache_dtype)
    routes = routes[:, margin[1][0] :] if settings.route_shape else None
  # A response that goes on may need all the room there is from the first step.
  num_blocks = 1 if requests.begun is None else len(settings.cache_blocks)
  for size in settings.cache_blocks[:num_blocks]:
    cache = model.grow(cache, rows, size, dtype=settings.cache_dtype)

  reasons = finished_before(requests, num_sequences)
  waiting = in_pieces(reasons, pieces)[:, :-1] == RUNNING
  goes_first = waiting if requests.begun is None else waiting & (in_pieces(requests.begun.lengths, pieces)[:, :-1] > 0)
  order = jnp.argsort(jnp.where(goes_first, 0, jnp.where(waiting, 1, 2)), axis=1, stable=True)
  queue = jnp.where(jnp.arange(per_piece) < jnp.sum(waiting, axis=1, keepdims=True), order, per_piece)
  queue = jnp.concatenate([queue, jnp.full((pieces, 1), per_piece)], axis=1)
  limits = jnp.full((num_sequences,), settings.max_new_tokens) if requests.limits is None else requests.limits
  job = Job(
    weights=model.decoding_weights(params),
    key=key,
    prompts_seen=seen,
    positions=each(jnp.sum(prompt_mask, axis=1) - 1),
    tokens=each(prompts[:, -1]),
    queue=queue,
    numbers=in_pieces(jnp.arange(num_sequences), pieces),
    limits=in_pieces(jnp.clip(limits, 1, settings.max_new_tokens), pieces),
    temperatures=tree_in_pieces(requests.temperatures, pieces),
    min_new_tokens=tree_in_pieces(requests.min_new_tokens, pieces),
    begun=tree_in_pieces(requests.begun, pieces),
    max_steps=requests.max_steps,
    enough_groups=requests.enough_groups,
  )
  # Where every sequence has a row of its own, row i decodes sequence i and nothing is ever looked up.
  first = jnp.broadcast_to(jnp.arange(per_piece), (pieces, per_piece)) if rows == num_sequences else queue[:, : rows // pieces]
  loop = Loop(
    step=jnp.zeros((), jnp.int32),
    written=jnp.full((sum(settings.cache_blocks[:num_blocks]),), _NEVER),
    cache=cache,
    sequences=first,
    lengths=jnp.zeros(first.shape, jnp.int32),
    tokens=_at(job.tokens, first),
    matching=None if settings.stop_table is None else settings.stop_table.start(rows).reshape(*first.shape, -1),
    started=jnp.full((pieces,), rows // pieces),
    drawn=_drawn_before(settings, reasons, requests, pieces),
  )
  if requests.begun is not None:
    loop = _resume(model, settings, params, prompts, prompt_mask, job, loop)
  return _placed(job, model.mesh, pieces), _placed(loop, model.mesh, pieces), routes


def _resume(model: Decoder, settings: Settings, params: Params, prompts, prompt_mask, job: Job, loop: Loop) -> Loop:
  """Prefills what the first rows' responses have already: it then lies in the cache as if the steps before the first had put it there.

  More of them than rows are never left by a run of this sampler; any that are begin later and go through their tokens step by step.
  """
  here, num_rows, budget = loop.sequences, loop.sequences.size, settings.max_new_tokens
  lengths = _at(job.begun.lengths, here)
  # All but the last token, which the first step feeds; with its prompt, and all of it on the right.
  response = _at(job.begun.tokens, here).reshape(num_rows, -1)
  numbers = _at(job.numbers, here).reshape(-1) // settings.group_size
  there = jnp.arange(budget) < lengths.reshape(-1, 1) - 1
  tokens = jnp.concatenate([prompts[numbers], response], axis=1)
  seen = jnp.concatenate([prompt_mask[numbers], there], axis=1) & (lengths.reshape(-1, 1) > 0)
  to_the_right = budget - jnp.maximum(lengths.reshape(-1) - 1, 0)
  tokens, seen = (jax.vmap(jnp.roll)(x, to_the_right) for x in (tokens, seen))
  last = jnp.take_along_axis(response, jnp.maximum(lengths.reshape(-1, 1) - 1, 0), axis=1).reshape(here.shape)
  resume = lambda cache: model.resume(params, tokens, seen, cache)
  return loop._replace(
    written=jnp.arange(len(loop.written)) - len(loop.written),
    cache=jax.lax.cond(jnp.any(is_active(loop) & (lengths > 0)), resume, lambda cache: cache, loop.cache),
    lengths=lengths,
    tokens=jnp.where(lengths > 0, last, loop.tokens),
    matching=_matched_before(settings, job, loop, lengths),
  )


def _matched_before(settings: Settings, job: Job, loop: Loop, lengths: Int[Array, "d b"]) -> Int[Array, "d b A"] | None:
  """States of the stop automata after what the rows' responses have already."""
  if loop.matching is None:
    return None
  tokens = _at(job.begun.tokens, loop.sequences)

  def feed(t, matching):
    states, _ = stops.advance(settings.stop_table, matching.reshape(lengths.size, -1), tokens[..., t].reshape(-1))
    return jnp.where((t < lengths)[..., None], states.reshape(matching.shape), matching)

  return jax.lax.fori_loop(0, jnp.max(lengths), feed, loop.matching)


def division(mesh: Mesh | None, num_prompts: int, settings: Settings) -> tuple[int, int]:
  """Pieces that the sequences lie in, so that each device has its own line of waiting ones; and rows, over all of them."""
  num_sequences = num_prompts * settings.group_size
  ends_early = bool(settings.stop_ids) or settings.stop_table is not None
  rows = num_rows(mesh, num_sequences, settings.slots, ends_early=ends_early)
  shards = 1 if mesh is None else num_row_shards(mesh)
  return (shards if num_prompts % shards == 0 and rows % shards == 0 else 1), rows


def num_rows(mesh: Mesh | None, num_sequences: int, slots: int | None, *, ends_early: bool = True) -> int:
  """Rows that decode so many sequences.

  Args:
    mesh: devices; None is one.
    num_sequences: N.
    slots: what somebody asked for; None is nobody.
    ends_early: whether a response can end before its budget. If none can, no row is ever handed over.

  Example:
    >>> num_rows(None, 512, None), num_rows(None, 64, None), num_rows(None, 512, None, ends_early=False), num_rows(None, 512, 20)
    (128, 64, 512, 20)
  """
  platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
  default = _ROWS.get(platform, _ROWS["gpu"]) * (1 if mesh is None else num_row_shards(mesh))
  return min(slots or (default if ends_early else num_sequences), num_sequences)


def _placed(tree: PyTree, mesh: Mesh | None, pieces: int) -> PyTree:
  """Each piece on its own device."""
  if mesh is None or mesh.size == 1 or pieces == 1:
    return tree
  split = lambda x: jax.lax.with_sharding_constraint(x, row_sharding(mesh))
  return tree._replace(**{name: jax.tree.map(split, x) for name, x in tree._asdict().items() if name not in _UNSPLIT})


def _drawn_before(settings: Settings, reasons: Int[Array, " N"], requests: Requests, pieces: int) -> Drawn:
  begun, shape = requests.begun, (len(reasons), settings.max_new_tokens)
  zeros = jnp.zeros(shape, jnp.float32)
  is_plain = settings.temperature == 1 and not settings.top_k and settings.top_p == 1
  drawn = Drawn(
    tokens=jnp.full(shape, settings.pad_id, jnp.int32),
    logprobs=zeros,
    raw_logprobs=None if is_plain and requests.temperatures is None and requests.min_new_tokens is None and begun is None else zeros,
    entropy=zeros if settings.entropy else None,
    routing=None if settings.route_shape is None else jnp.full((*shape, *settings.route_shape), -1, jnp.int16),
    lengths=jnp.zeros(shape[:1], jnp.int32),
    reasons=reasons,
  )
  if begun is not None:
    there = jnp.arange(shape[1]) < begun.lengths[:, None]
    drawn = drawn._replace(
      tokens=jnp.where(there, begun.tokens, settings.pad_id),
      logprobs=jnp.where(there, begun.logprobs, 0),
      raw_logprobs=jnp.where(there, begun.raw_logprobs, 0),
      lengths=begun.lengths,
    )
    if begun.routing is not None and drawn.routing is not None:
      drawn = drawn._replace(routing=jnp.where(there[..., None, None], begun.routing, -1).astype(drawn.routing.dtype))
    if begun.entropy is not None and settings.entropy:
      drawn = drawn._replace(entropy=jnp.where(there, begun.entropy, 0))
  drawn = tree_in_pieces(drawn, pieces)
  return drawn._replace(reasons=drawn.reasons.at[:, -1].set(StopReason.LENGTH))  # Nobody is never running.


def grow(model: Decoder, settings: Settings, loop: Loop) -> Loop:
  """Room for longer responses: the next of the declared blocks."""
  size = settings.cache_blocks[num_blocks(settings, loop)]
  cache = model.grow(loop.cache, loop.sequences.size, size, dtype=settings.cache_dtype)
  return loop._replace(cache=cache, written=jnp.concatenate([loop.written, jnp.full((size,), _NEVER)]))


def num_blocks(settings: Settings, loop: Loop) -> int:
  """How many of the declared blocks the cache has by now."""
  return next(i for i in range(len(settings.cache_blocks) + 1) if sum(settings.cache_blocks[:i]) == len(loop.written))


def is_active(loop: Loop) -> Bool[Array, "d b"]:
  """Which rows have a sequence that is not done."""
  return _at(loop.drawn.reasons, loop.sequences) == RUNNING


def goes_on(settings: Settings, job: Job, loop: Loop) -> Bool[Array, ""]:
  """Whether the next step has anything to do and room to do it."""
  longest = jnp.max(jnp.where(is_active(loop), loop.lengths + 1, 0))
  return (longest <= len(loop.written)) & wants_more(settings, job, loop)


def wants_more(settings: Settings, job: Job, loop: Loop) -> Bool[Array, ""]:
  """Whether anything is left to draw that somebody waits for."""
  wanted = jnp.any(is_active(loop))
  if job.max_steps is not None:
    wanted &= loop.step < job.max_steps
  if job.enough_groups is not None:
    groups = loop.drawn.reasons[:, :-1].reshape(-1, settings.group_size)
    wanted &= jnp.sum(jnp.all(groups != RUNNING, axis=1)) < job.enough_groups
  return wanted


def advance(model: Decoder, settings: Settings, job: Job, loop: Loop) -> Loop:
  """One step of all rows: feed a token, draw the next, and hand the rows that are done to the sequences that wait."""
  column = jnp.argmin(loop.written)
  written = loop.written.at[column].set(loop.step)
  lookup = {}
  if hands_over(loop):
    rows = jnp.broadcast_to(jnp.arange(loop.sequences.shape[1]), loop.sequences.shape)
    lookup = dict(rows=_put(jnp.zeros(job.queue.shape, jnp.int32), loop.sequences, rows)[:, :-1], sequences=loop.sequences)
  logits, cache, routes = model.decode(
    job.weights,
    loop.tokens.reshape(-1),
    (_at(job.positions, loop.sequences) + loop.lengths).reshape(-1),
    loop.cache,
    column=column,
    seen=loop.step - written < loop.lengths.reshape(-1, 1) + 1,
    prompts_seen=job.prompts_seen,
    **lookup,
  )
  found = _draw(settings, job, loop, logits)
  if routes is not None and loop.drawn.routing is not None:
    found["routing"] = routes.astype(jnp.int16)
  found = {name: x.reshape(*loop.sequences.shape, *x.shape[1:]) for name, x in found.items()}
  found, drawn = _record(job, loop, found)
  lengths, matching, reasons = _ended(settings, job, loop, found["tokens"])
  drawn = drawn._replace(lengths=_put(drawn.lengths, loop.sequences, lengths), reasons=_put(drawn.reasons, loop.sequences, reasons))
  loop = Loop(loop.step + 1, written, cache, loop.sequences, lengths, found["tokens"], matching, loop.started, drawn)
  return _hand_over(settings, job, loop, reasons != RUNNING) if hands_over(loop) else loop


def hands_over(loop: Loop) -> bool:
  """Whether there are more sequences than rows."""
  return loop.sequences.shape[1] + 1 < loop.drawn.reasons.shape[1]


def _draw(settings: Settings, job: Job, loop: Loop, logits: Float[Array, "B V"]) -> dict[str, Array]:
  """A token for each row, and what is to be known of it."""
  here, length = loop.sequences, loop.lengths.reshape(-1)
  raw = logits
  if job.min_new_tokens is not None and settings.stop_ids:
    early = loop.lengths < _at(job.min_new_tokens, here)
    is_stop = jnp.zeros(logits.shape[-1], bool).at[jnp.array(settings.stop_ids)].set(True)
    logits = jnp.where(early.reshape(-1, 1) & is_stop, REMOVED, logits)
  filter_logits = make_filter(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
  temperatures = None if job.temperatures is None else _at(job.temperatures, here).reshape(-1)
  filtered = filter_logits(logits, temperatures=temperatures)
  # A stream for each sequence, a number of it for each token: no matter which row decodes it, or beside whom.
  keys = jax.vmap(lambda i, t: jax.random.fold_in(jax.random.fold_in(job.key, i), t))(_at(job.numbers, here).reshape(-1), length)
  tokens, logprobs = draw(filtered, keys)
  if settings.temperature == 0 and job.temperatures is None and settings.group_size > 1:
    # n-best: the samples of a prompt begin with its n likeliest tokens, and each goes on greedily.
    rank = _at(job.numbers, here).reshape(-1) % settings.group_size
    best = jax.lax.top_k(logits, settings.group_size)[1]
    tokens = jnp.where(length == 0, jnp.take_along_axis(best, rank[:, None], axis=1)[:, 0], tokens)
  found = {"tokens": tokens, "logprobs": logprobs}
  if loop.drawn.raw_logprobs is not None:
    of_drawn = jnp.take_along_axis(raw, tokens[:, None], axis=1)[:, 0]
    found["raw_logprobs"] = of_drawn - jax.nn.logsumexp(raw, axis=-1)
  if loop.drawn.entropy is not None:
    scores = jax.nn.log_softmax(filtered, axis=-1)
    found["entropy"] = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
  return found


def _record(job: Job, loop: Loop, found: dict[str, Array]) -> tuple[dict[str, Array], Drawn]:
  """Writes what was found to its sequences; of a response that was begun earlier, its own token takes the place of the drawn one."""
  here, length = loop.sequences, loop.lengths
  known = jnp.zeros(here.shape, bool) if job.begun is None else length < _at(job.begun.lengths, here)
  size = loop.drawn.tokens.shape[-1]
  index = jnp.where(is_active(loop) & ~known, length, size)  # Beyond the end: dropped.
  write = jax.vmap(lambda piece, i, t, value: piece.at[i, t].set(value, mode="drop"))
  drawn = loop.drawn._replace(**{name: write(getattr(loop.drawn, name), here, index, x) for name, x in found.items()})
  if job.begun is not None:
    theirs = jax.vmap(lambda piece, i, t: piece[i, t])(job.begun.tokens, here, jnp.minimum(length, size - 1))
    found = found | {"tokens": jnp.where(known, theirs, found["tokens"])}
  return found, drawn


def _ended(settings: Settings, job: Job, loop: Loop, tokens: Int[Array, "d b"]):
  """Lengths with the token, states of the stop automata, and why each row's sequence is done, if it is."""
  reasons = _at(loop.drawn.reasons, loop.sequences)
  active = reasons == RUNNING
  lengths = loop.lengths + active
  is_late = True if job.min_new_tokens is None else lengths >= _at(job.min_new_tokens, loop.sequences)
  is_stop = jnp.isin(tokens, jnp.array(settings.stop_ids, jnp.int32)) & is_late
  matching, is_match = loop.matching, jnp.zeros(tokens.shape, bool)
  if settings.stop_table is not None:
    states, matched = stops.advance(settings.stop_table, matching.reshape(tokens.size, -1), tokens.reshape(-1))
    is_match = matched.reshape(tokens.shape) & is_late
    start = settings.stop_table.start(tokens.size)
    matching = jnp.where(matched[:, None] & ~is_match.reshape(-1, 1), start, states).reshape(matching.shape)
  now = jnp.where(lengths >= _at(job.limits, loop.sequences), int(StopReason.LENGTH), RUNNING)
  now = jnp.where(is_match, int(StopReason.STRING), now)
  now = jnp.where(is_stop, int(StopReason.TOKEN), now)
  return lengths, matching, jnp.where(active, now, reasons)


def _hand_over(settings: Settings, job: Job, loop: Loop, free: Bool[Array, "d b"]) -> Loop:
  """Free rows take the next sequences of their piece's line, in order; or nobody, at its end."""
  end = job.queue.shape[1] - 1
  place = jnp.minimum(loop.started[:, None] + jnp.cumsum(free, axis=1) - 1, end)
  sequences = jnp.where(free, _at(job.queue, place), loop.sequences)
  matching = loop.matching
  if matching is not None:
    matching = jnp.where(free[..., None], settings.stop_table.start(free.size).reshape(matching.shape), matching)
  return loop._replace(
    sequences=sequences,
    lengths=jnp.where(free, 0, loop.lengths),
    tokens=jnp.where(free, _at(job.tokens, sequences), loop.tokens),
    matching=matching,
    started=jnp.minimum(loop.started + jnp.sum(free, axis=1), end),
  )


def rollouts(
  settings: Settings, prompts: Int[Array, "n P"], prompt_mask: Bool[Array, "n P"], drawn: Drawn, routes: Int[Array, "n _ L K"] | None
) -> Rollouts:
  """What a loop has drawn, in the order of the prompts.

  Args:
    settings: of the sampler.
    prompts: of the call.
    prompt_mask: of the call.
    drawn: by the loop.
    routes: of the prompts' prefilled tokens.
  """
  repeat = lambda x: jnp.repeat(x, settings.group_size, axis=0)
  drawn = jax.tree.map(whole, drawn)
  mask = jnp.arange(settings.max_new_tokens) < drawn.lengths[:, None]
  reasons = jnp.where(drawn.reasons == RUNNING, int(StopReason.UNFINISHED), drawn.reasons).astype(jnp.int8)
  return Rollouts(
    prompts=repeat(prompts),
    prompt_mask=repeat(prompt_mask),
    tokens=drawn.tokens,
    mask=mask,
    logprobs=drawn.logprobs,
    stopped=(reasons == StopReason.TOKEN) | (reasons == StopReason.STRING),
    routing=None if drawn.routing is None else _all_routes(drawn, routes, repeat(prompt_mask)),
    raw_logprobs=drawn.logprobs if drawn.raw_logprobs is None else drawn.raw_logprobs,
    entropy=drawn.entropy,
    reasons=reasons,
  )


def _all_routes(drawn: Drawn, routes: Int[Array, "n _ L K"] | None, prompt_mask: Bool[Array, "N P"]) -> Int[Array, "N S L K"]:
  """Routes of prompts and responses side by side, -1 where no token travelled; a row's last token never does."""
  fed = drawn.routing  # At t is the token before the t-th: the prompt's last one at 0.
  parts = [fed, jnp.full_like(fed[:, :1], -1)]
  if routes is not None:
    before = jnp.repeat(routes, len(fed) // len(routes), axis=0).astype(fed.dtype)
    parts = [jnp.where(prompt_mask[:, :-1, None, None], before, -1), *parts]
  return jnp.concatenate(parts, axis=1)


def abort(settings: Settings, job: Job, loop: Loop, unwanted: Bool[Array, "d M"]) -> tuple[Job, Loop]:
  """Ends sequences that nobody wants the rest of: those that wait leave the line, and rows go to the next of it at once.

  Args:
    settings: of the sampler.
    job: whose line may be cut short.
    loop: between two steps.
    unwanted: those that are done are left as they are.
  """
  aborted = unwanted & (loop.drawn.reasons == RUNNING)
  loop = loop._replace(drawn=loop.drawn._replace(reasons=jnp.where(aborted, int(StopReason.ABORTED), loop.drawn.reasons)))
  if not hands_over(loop):
    return job, loop
  wanted = loop.drawn.reasons == RUNNING
  gone = (jnp.arange(job.queue.shape[1]) >= loop.started[:, None]) & ~_at(wanted, job.queue)
  order = jnp.argsort(gone, axis=1, stable=True)
  job = job._replace(queue=jnp.where(_at(gone, order), job.queue.shape[1] - 1, _at(job.queue, order)))
  return job, _hand_over(settings, job, loop, ~_at(wanted, loop.sequences))
