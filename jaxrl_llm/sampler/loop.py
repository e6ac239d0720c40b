"""The decode loop: one step of all rows, and the refill of rows whose sequence is done.

Sequences wait in a queue, and a fixed number of rows decodes them. All rows write the same column
of the cache at the same step, wherever they are in their own responses, so that each write is a
single slice. A row reads only the columns that are younger than its response. The column to write
is always the oldest. No row can still need it, because a response never has more tokens than there
are columns.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.sampler import stops
from jaxrl_llm.sampler.draw import draw
from jaxrl_llm.sampler.filters import REMOVED, make_filter
from jaxrl_llm.sampler.requests import RUNNING, whole
from jaxrl_llm.sampler.state import NEVER, Decoder, Drawn, Job, Loop, Settings, at, hands_over, is_active, num_blocks, put
from jaxrl_llm.types import Rollouts, StopReason


def grow(model: Decoder, settings: Settings, loop: Loop) -> Loop:
  """Grows the cache by the next declared block, to make room for longer responses."""
  size = settings.cache_blocks[num_blocks(settings, loop)]
  cache = model.grow(loop.cache, loop.sequences.size, size, dtype=settings.cache_dtype)
  return loop._replace(cache=cache, written=jnp.concatenate([loop.written, jnp.full((size,), NEVER)]))


def goes_on(settings: Settings, job: Job, loop: Loop) -> Bool[Array, ""]:
  """Returns whether the next step has work to do and room in the cache for it."""
  longest = jnp.max(jnp.where(is_active(loop), loop.lengths + 1, 0))
  return (longest <= len(loop.written)) & wants_more(settings, job, loop)


def wants_more(settings: Settings, job: Job, loop: Loop) -> Bool[Array, ""]:
  """Returns whether the caller still needs tokens that are not drawn yet."""
  wanted, requests = jnp.any(is_active(loop)), job.requests
  if requests.max_steps is not None:
    wanted &= loop.step < requests.max_steps
  if requests.enough_groups is not None:
    groups = loop.drawn.reasons[:, :-1].reshape(-1, settings.group_size)
    wanted &= jnp.sum(jnp.all((groups != RUNNING) & (groups != StopReason.ABORTED), axis=1)) < requests.enough_groups
  return wanted


def advance(model: Decoder, settings: Settings, job: Job, loop: Loop) -> Loop:
  """Runs one step of all rows: feeds a token, draws the next and refills the rows that are done."""
  column = jnp.argmin(loop.written)
  written = loop.written.at[column].set(loop.step)
  lookup = {}
  if hands_over(loop):
    rows = jnp.broadcast_to(jnp.arange(loop.sequences.shape[1]), loop.sequences.shape)
    lookup = dict(rows=put(jnp.zeros(job.queue.shape, jnp.int32), loop.sequences, rows)[:, :-1], sequences=loop.sequences)
  logits, cache, routes = model.decode(
    job.weights,
    loop.tokens.reshape(-1),
    (at(job.positions, loop.sequences) + loop.lengths).reshape(-1),
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
  # A response that is replayed keeps its earlier tokens, however far the replay has come.
  begun = job.requests.begun
  known = lengths if begun is None else jnp.maximum(lengths, at(begun.lengths, loop.sequences))
  drawn = drawn._replace(lengths=put(drawn.lengths, loop.sequences, known), reasons=put(drawn.reasons, loop.sequences, reasons))
  loop = Loop(loop.step + 1, written, cache, loop.sequences, lengths, found["tokens"], matching, loop.started, drawn)
  return _hand_over(settings, job, loop, reasons != RUNNING) if hands_over(loop) else loop


def _draw(settings: Settings, job: Job, loop: Loop, logits: Float[Array, "B V"]) -> dict[str, Array]:
  """Draws a token for each row, with its log-probabilities and whatever else is recorded."""
  here, length, requests, raw = loop.sequences, loop.lengths.reshape(-1), job.requests, logits
  if requests.min_new_tokens is not None and settings.stop_ids:
    early = loop.lengths < at(requests.min_new_tokens, here)
    is_stop = jnp.zeros(logits.shape[-1], bool).at[jnp.array(settings.stop_ids)].set(True)
    logits = jnp.where(early.reshape(-1, 1) & is_stop, REMOVED, logits)
  filter_logits = make_filter(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
  temperatures = None if requests.temperatures is None else at(requests.temperatures, here).reshape(-1)
  filtered = filter_logits(logits, temperatures=temperatures)
  # A random stream per sequence, indexed by token: independent of the row that decodes it and of
  # its neighbours.
  keys = jax.vmap(lambda i, t: jax.random.fold_in(jax.random.fold_in(job.key, i), t))(at(job.numbers, here).reshape(-1), length)
  tokens, logprobs = draw(filtered, keys)
  if settings.temperature == 0 and temperatures is None and settings.group_size > 1:
    # n-best: the samples of a prompt begin with its n likeliest tokens and continue greedily.
    rank = at(job.numbers, here).reshape(-1) % settings.group_size
    best = jax.lax.top_k(logits, settings.group_size)[1]
    tokens = jnp.where(length == 0, jnp.take_along_axis(best, rank[:, None], axis=1)[:, 0], tokens)
  found = {"tokens": tokens, "logprobs": logprobs}
  if loop.drawn.raw_logprobs is not None:
    of_drawn = jnp.take_along_axis(raw, tokens[:, None], axis=1)[:, 0]
    found["raw_logprobs"] = of_drawn - jax.nn.logsumexp(raw, axis=-1)
  if loop.drawn.entropy is not None:
    log_softmax = jax.nn.log_softmax(filtered, axis=-1)
    found["entropy"] = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
  return found


def _record(job: Job, loop: Loop, found: dict[str, Array]) -> tuple[dict[str, Array], Drawn]:
  """Records the step's results for its sequences.

  Where a response was begun by an earlier call, its own token replaces the drawn one.
  """
  here, length, begun = loop.sequences, loop.lengths, job.requests.begun
  known = jnp.zeros(here.shape, bool) if begun is None else length < at(begun.lengths, here)
  size = loop.drawn.tokens.shape[-1]
  index = jnp.where(is_active(loop) & ~known, length, size)  # Out-of-bounds writes are dropped.
  write = jax.vmap(lambda piece, i, t, value: piece.at[i, t].set(value, mode="drop"))
  drawn = loop.drawn._replace(**{name: write(getattr(loop.drawn, name), here, index, x) for name, x in found.items()})
  if begun is not None:
    theirs = jax.vmap(lambda piece, i, t: piece[i, t])(begun.tokens, here, jnp.minimum(length, size - 1))
    found = found | {"tokens": jnp.where(known, theirs, found["tokens"])}
  return found, drawn


def _ended(settings: Settings, job: Job, loop: Loop, tokens: Int[Array, "d b"]):
  """Returns the new lengths, the states of the stop automata and each row's stop reason.

  The reason is `RUNNING` if a row's sequence is not done.
  """
  here, requests = loop.sequences, job.requests
  reasons = at(loop.drawn.reasons, here)
  active = reasons == RUNNING
  lengths = loop.lengths + active
  is_late = jnp.ones(active.shape, bool) if requests.min_new_tokens is None else lengths >= at(requests.min_new_tokens, here)
  if requests.begun is not None:  # A stop in an earlier turn of a conversation no longer counts.
    is_late &= lengths > at(requests.begun.lengths, here)
  is_stop = jnp.isin(tokens, jnp.array(settings.stop_ids, jnp.int32)) & is_late
  matching, is_match = loop.matching, jnp.zeros(tokens.shape, bool)
  if settings.stop_table is not None:
    states, matched = stops.advance(settings.stop_table, matching.reshape(tokens.size, -1), tokens.reshape(-1))
    is_match = matched.reshape(tokens.shape) & is_late
    start = settings.stop_table.start(tokens.size)
    matching = jnp.where(matched[:, None] & ~is_match.reshape(-1, 1), start, states).reshape(matching.shape)
  now = jnp.where(lengths >= at(requests.limits, here), int(StopReason.LENGTH), RUNNING)
  now = jnp.where(is_match, int(StopReason.STRING), now)
  now = jnp.where(is_stop, int(StopReason.TOKEN), now)
  return lengths, matching, jnp.where(active, now, reasons)


def _hand_over(settings: Settings, job: Job, loop: Loop, free: Bool[Array, "d b"]) -> Loop:
  """Refills free rows with the next sequences of their piece's queue, in order.

  At the end of the queue a free row gets the dummy sequence.
  """
  end = job.queue.shape[1] - 1
  place = jnp.minimum(loop.started[:, None] + jnp.cumsum(free, axis=1) - 1, end)
  sequences = jnp.where(free, at(job.queue, place), loop.sequences)
  matching = loop.matching
  if matching is not None:
    matching = jnp.where(free[..., None], settings.stop_table.start(free.size).reshape(matching.shape), matching)
  return loop._replace(
    sequences=sequences,
    lengths=jnp.where(free, 0, loop.lengths),
    tokens=jnp.where(free, at(job.tokens, sequences), loop.tokens),
    matching=matching,
    started=jnp.minimum(loop.started + jnp.sum(free, axis=1), end),
  )


def rollouts(
  settings: Settings, prompts: Int[Array, "n P"], prompt_mask: Bool[Array, "n P"], drawn: Drawn, routes: Int[Array, "n _ L K"] | None
) -> Rollouts:
  """Converts what a loop has drawn to rollouts in the order of the prompts.

  Args:
    settings: Settings of the sampler.
    prompts: Token ids of the prompts, padded on the left.
    prompt_mask: True at tokens of the prompts.
    drawn: Responses of the loop, in pieces.
    routes: Routes of the prompts' prefilled tokens; None if not recorded.
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
  """Joins the routes of prompts and responses; -1 where no token was routed.

  A row's last token is never fed, so it has no routes.
  """
  fed = drawn.routing  # Index t holds the token before response token t; index 0 the prompt's last token.
  parts = [fed, jnp.full_like(fed[:, :1], -1)]
  if routes is not None:
    before = jnp.repeat(routes, len(fed) // len(routes), axis=0).astype(fed.dtype)
    parts = [jnp.where(prompt_mask[:, :-1, None, None], before, -1), *parts]
  return jnp.concatenate(parts, axis=1)


def abort(settings: Settings, job: Job, loop: Loop, unwanted: Bool[Array, "d M"]) -> tuple[Job, Loop]:
  """Aborts unwanted sequences that are not done, between two steps.

  Waiting sequences leave the queue, and freed rows are refilled from it.
  """
  aborted = unwanted & (loop.drawn.reasons == RUNNING)
  loop = loop._replace(drawn=loop.drawn._replace(reasons=jnp.where(aborted, int(StopReason.ABORTED), loop.drawn.reasons)))
  if not hands_over(loop):
    return job, loop
  wanted = loop.drawn.reasons == RUNNING
  gone = (jnp.arange(job.queue.shape[1]) >= loop.started[:, None]) & ~at(wanted, job.queue)
  order = jnp.argsort(gone, axis=1, stable=True)
  job = job._replace(queue=jnp.where(at(gone, order), job.queue.shape[1] - 1, at(job.queue, order)))
  return job, _hand_over(settings, job, loop, ~at(wanted, loop.sequences))
