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

from jaxrl_llm.decoding.draw import draw
from jaxrl_llm.decoding.filters import REMOVED, make_filter
from jaxrl_llm.decoding.sampler.requests import merge_shards
from jaxrl_llm.decoding.sampler.state import (
  NEVER,
  Decoder,
  Inputs,
  Loop,
  Outputs,
  Settings,
  exchanges,
  gather,
  is_active,
  num_blocks,
  refills,
  scatter,
)
from jaxrl_llm.decoding.stops import RUNNING, Matching, advance_stops
from jaxrl_llm.models.head import chunk_logprobs
from jaxrl_llm.types import Rollouts, StopReason


def grow(model: Decoder, settings: Settings, loop: Loop) -> Loop:
  """Grows the cache by the next declared block, to make room for longer responses."""
  size = settings.cache_blocks[num_blocks(settings, loop)]
  cache = model.grow(loop.cache, loop.sequences.size, size, dtype=settings.cache_dtype, most=sum(settings.cache_blocks))
  return loop._replace(cache=cache, written=jnp.concatenate([loop.written, jnp.full((size,), NEVER)]))


def should_continue(settings: Settings, inputs: Inputs, loop: Loop) -> Bool[Array, ""]:
  """Returns whether the next step has work to do and room in the cache for it."""
  longest = jnp.max(jnp.where(is_active(loop), loop.lengths + 1, 0))
  return (longest <= len(loop.written)) & has_demand(settings, inputs, loop)


def has_demand(settings: Settings, inputs: Inputs, loop: Loop) -> Bool[Array, ""]:
  """Returns whether the caller still needs tokens that are not drawn yet."""
  demand, requests = jnp.any(is_active(loop)), inputs.requests
  if requests.max_steps is not None:
    demand &= loop.step < requests.max_steps
  if requests.enough_groups is not None:
    reasons = loop.outputs.reasons[:, :-1]
    complete = (reasons != RUNNING) & (reasons != StopReason.ABORTED)
    if exchanges(loop):
      # The samples of a prompt may be on several shards.
      of_prompts = jnp.zeros(complete.size // settings.group_size, jnp.int32)
      groups = of_prompts.at[inputs.numbers[:, :-1] // settings.group_size].add(complete) == settings.group_size
    else:
      groups = jnp.all(complete.reshape(-1, settings.group_size), axis=1)
    demand &= jnp.sum(groups) < requests.enough_groups
  return demand


def advance(model: Decoder, settings: Settings, inputs: Inputs, loop: Loop) -> Loop:
  """Runs one step of all rows: feeds a token, draws the next one and refills rows that are done."""
  column = jnp.argmin(loop.written)
  written = loop.written.at[column].set(loop.step)
  if model.config.exact:  # Responses begin with the first column, so that their keys are in order.
    column = loop.lengths.reshape(-1)
  lookup = {}
  if refills(loop):
    rows = jnp.broadcast_to(jnp.arange(loop.sequences.shape[1]), loop.sequences.shape)
    lookup = dict(
      rows=scatter(jnp.zeros(inputs.queue.shape, jnp.int32), loop.sequences, rows)[:, :-1], sequences=loop.sequences
    )
  logits, cache, routes = model.decode(
    inputs.weights,
    loop.tokens.reshape(-1),
    (gather(inputs.positions, loop.sequences) + loop.lengths).reshape(-1),
    loop.cache,
    column=column,
    ages=loop.step - written,
    lengths=loop.lengths.reshape(-1) + 1,
    prompts_seen=inputs.prompts_seen,
    step=loop.step,
    **lookup,
  )
  results = _draw(model, settings, inputs, loop, logits)
  if routes is not None and loop.outputs.routing is not None:
    results["routing"] = routes.astype(jnp.int16)
  results = {name: x.reshape(*loop.sequences.shape, *x.shape[1:]) for name, x in results.items()}
  results, outputs = _record(inputs, loop, results)
  lengths, matching, reasons = _ended(settings, inputs, loop, results["tokens"])
  # A response that is replayed keeps its earlier tokens, however far the replay has come.
  partial = inputs.requests.partial
  known = lengths if partial is None else jnp.maximum(lengths, gather(partial.lengths, loop.sequences))
  outputs = outputs._replace(
    lengths=scatter(outputs.lengths, loop.sequences, known), reasons=scatter(outputs.reasons, loop.sequences, reasons)
  )
  loop = Loop(
    loop.step + 1, written, cache, loop.sequences, lengths, results["tokens"], matching, loop.started, outputs
  )
  return refill(settings, inputs, loop, reasons != RUNNING) if refills(loop) else loop


def _draw(model: Decoder, settings: Settings, inputs: Inputs, loop: Loop, logits: Float[Array, "B V"]) -> dict[str, Array]:
  """Draws a token for each row, with its log-probabilities and whatever else is recorded."""
  here, length, requests, raw = loop.sequences, loop.lengths.reshape(-1), inputs.requests, logits
  if requests.min_new_tokens is not None and settings.stop_ids:
    early = loop.lengths < gather(requests.min_new_tokens, here)
    is_stop = jnp.zeros(logits.shape[-1], bool).at[jnp.array(settings.stop_ids)].set(True)
    logits = jnp.where(early.reshape(-1, 1) & is_stop, REMOVED, logits)
  filter_logits = make_filter(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
  temperatures = None if requests.temperatures is None else gather(requests.temperatures, here).reshape(-1)
  filtered = filter_logits(logits, temperatures=temperatures)
  keys = jax.random.wrap_key_data(gather(inputs.keys, here).reshape(len(length), -1))
  tokens, logprobs = draw(filtered, jax.vmap(jax.random.fold_in)(keys, length), whole_rows=model.whole_rows)
  logprobs = chunk_logprobs(filtered, tokens)[0] if model.config.exact else logprobs
  results = {"tokens": tokens, "logprobs": logprobs}
  if loop.outputs.raw_logprobs is not None:
    of_drawn = jnp.take_along_axis(raw, tokens[:, None], axis=1)[:, 0]
    results["raw_logprobs"] = of_drawn - jax.nn.logsumexp(raw, axis=-1)
  if loop.outputs.entropy is not None:
    log_softmax = jax.nn.log_softmax(filtered, axis=-1)
    results["entropy"] = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
  return results


def _record(inputs: Inputs, loop: Loop, results: dict[str, Array]) -> tuple[dict[str, Array], Outputs]:
  """Records the step's results for its sequences.

  A token that a partial response already has replaces the drawn one.
  """
  here, length, partial = loop.sequences, loop.lengths, inputs.requests.partial
  known = jnp.zeros(here.shape, bool) if partial is None else length < gather(partial.lengths, here)
  size = loop.outputs.tokens.shape[-1]
  index = jnp.where(is_active(loop) & ~known, length, size)  # Out-of-bounds writes are dropped.
  write = jax.vmap(lambda shard, i, t, value: shard.at[i, t].set(value, mode="drop"))
  outputs = loop.outputs._replace(
    **{name: write(getattr(loop.outputs, name), here, index, x) for name, x in results.items()}
  )
  if partial is not None:
    replayed = jax.vmap(lambda shard, i, t: shard[i, t])(partial.tokens, here, jnp.minimum(length, size - 1))
    results = results | {"tokens": jnp.where(known, replayed, results["tokens"])}
  return results, outputs


def _ended(
  settings: Settings, inputs: Inputs, loop: Loop, tokens: Int[Array, "d b"]
) -> tuple[Int[Array, "d b"], Matching, Int[Array, "d b"]]:
  """Returns the new lengths, the states of the stop rule and each row's stop reason."""
  here, requests = loop.sequences, inputs.requests
  reasons = gather(loop.outputs.reasons, here)
  lengths = loop.lengths + (reasons == RUNNING)
  bounds = dict(limits=gather(requests.limits, here))
  if requests.min_new_tokens is not None:
    bounds["least"] = gather(requests.min_new_tokens, here)
  return lengths, *advance_stops(settings.stop_table, loop.matching, reasons, tokens, lengths=lengths, **bounds)


def refill(settings: Settings, inputs: Inputs, loop: Loop, free: Bool[Array, "d b"]) -> Loop:
  """Refills free rows with the next sequences of their shard's queue, in order.

  At the end of the queue a free row gets the dummy sequence.
  """
  end = inputs.queue.shape[1] - 1
  place = jnp.minimum(loop.started[:, None] + jnp.cumsum(free, axis=1) - 1, end)
  sequences = jnp.where(free, gather(inputs.queue, place), loop.sequences)
  begin = lambda empty, states: jnp.where(free[..., None], empty, states)
  return loop._replace(
    sequences=sequences,
    lengths=jnp.where(free, 0, loop.lengths),
    tokens=jnp.where(free, gather(inputs.tokens, sequences), loop.tokens),
    matching=jax.tree.map(begin, settings.stop_table.start(*free.shape), loop.matching),
    started=jnp.minimum(loop.started + jnp.sum(free, axis=1), end),
  )


def rollouts(
  settings: Settings,
  prompts: Int[Array, "n P"],
  prompt_mask: Bool[Array, "n P"],
  outputs: Outputs,
  routes: Int[Array, "n _ L K"] | None,
) -> Rollouts:
  """Converts the outputs of a loop to rollouts in the order of the prompts.

  Args:
    settings: Settings of the sampler.
    prompts: Token ids of the prompts, padded on the left.
    prompt_mask: True at tokens of the prompts.
    outputs: Responses of the loop, in shards.
    routes: Routes of the prompts' prefilled tokens; None if not recorded.
  """
  repeat = lambda x: jnp.repeat(x, settings.group_size, axis=0)
  outputs = jax.tree.map(merge_shards, outputs)
  mask = jnp.arange(settings.max_new_tokens) < outputs.lengths[:, None]
  reasons = jnp.where(outputs.reasons == RUNNING, int(StopReason.UNFINISHED), outputs.reasons).astype(jnp.int8)
  return Rollouts(
    prompts=repeat(prompts),
    prompt_mask=repeat(prompt_mask),
    tokens=outputs.tokens,
    mask=mask,
    logprobs=outputs.logprobs,
    stopped=(reasons == StopReason.TOKEN) | (reasons == StopReason.STRING),
    routing=None if outputs.routing is None else _all_routes(outputs, routes, repeat(prompt_mask)),
    raw_logprobs=outputs.logprobs if outputs.raw_logprobs is None else outputs.raw_logprobs,
    entropy=outputs.entropy,
    reasons=reasons,
  )


def _all_routes(
  outputs: Outputs, routes: Int[Array, "n _ L K"] | None, prompt_mask: Bool[Array, "N P"]
) -> Int[Array, "N S L K"]:
  """Joins the routes of prompts and responses; -1 where no token was routed.

  A row's last token is never fed, so it has no routes.
  """
  # Entry t belongs to the token before response token t; entry 0 to the prompt's last token.
  fed = outputs.routing
  parts = [fed, jnp.full_like(fed[:, :1], -1)]
  if routes is not None:
    before = jnp.repeat(routes, len(fed) // len(routes), axis=0).astype(fed.dtype)
    parts = [jnp.where(prompt_mask[:, :-1, None, None], before, -1), *parts]
  return jnp.concatenate(parts, axis=1)


def without(queue: Int[Array, "d M"], gone: Bool[Array, "d M"]) -> Int[Array, "d M"]:
  """Removes entries from each shard's queue; the others move up in order."""
  order = jnp.argsort(gone, axis=1, stable=True)
  return jnp.where(gather(gone, order), queue.shape[1] - 1, gather(queue, order))
