"""Setup of the decode loop: prefill of the prompts and the assignment of sequences to rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PyTree

from jaxrl_llm.decoding.draw import sequence_keys
from jaxrl_llm.decoding.sampler.requests import Requests, finished_before, split_into_shards
from jaxrl_llm.decoding.sampler.state import NEVER, Decoder, Inputs, Loop, Outputs, Settings, gather, is_active
from jaxrl_llm.decoding.stops import RUNNING, Matching, advance_stops
from jaxrl_llm.devices.mesh import num_row_shards, platform_of, row_sharding
from jaxrl_llm.types import Params, Shown, StopReason

# Default number of rows per device: as many as keep its arithmetic busy. More rows would only wait
# for the longest response of all. The CPU's number was measured (experiments/LOG.md); on
# accelerators more rows share each read of the weights.
_ROWS = {"cpu": 128, "gpu": 512, "tpu": 512}
# Fields of `Inputs` and `Loop` that are not split into shards.
_UNSPLIT = ("weights", "prompts_seen", "written", "cache")
# The width of the prompts' cache is a multiple of this, so that rows of keys are aligned to
# vectors.
_ALIGNMENT = 16


def begin(
  model: Decoder,
  settings: Settings,
  params: Params,
  prompts: Int[Array, "n P"],
  prompt_mask: Bool[Array, "n P"],
  requests: Requests,
  shown: Shown | None = None,
) -> tuple[Inputs, Loop, Int[Array, "n _ L K"] | None]:
  """Prefills each prompt once and assigns the first sequences to rows.

  All tokens of a prompt but the last are prefilled. The last one is the first that a row decodes,
  so that every row of a group draws its first token like any other, and no prompt logits are kept.

  Returns:
    The inputs of every step, the loop before its first step, and the routes of the prefilled
    tokens, which are None if not recorded.
  """
  num_prompts, width = prompts.shape
  num_sequences = num_prompts * settings.group_size
  num_shards, rows = num_shards_and_rows(model.mesh, num_prompts, settings)
  per_shard = num_sequences // num_shards
  each = lambda x: split_into_shards(jnp.repeat(x, settings.group_size, axis=0), num_shards)

  cache, routes, seen = None, None, None
  if width > 1:
    margin = ((0, 0), (-(width - 1) % _ALIGNMENT, 0))
    seen = jnp.pad(prompt_mask[:, :-1], margin)
    tokens = jnp.pad(prompts[:, :-1], margin, constant_values=settings.pad_id)
    cache, routes = model.prefill(params, tokens, seen, dtype=settings.cache_dtype, **_shown_before_last(shown, margin))
    routes = routes[:, margin[1][0] :] if settings.route_shape else None
  # A resumed response may need the whole cache from the first step.
  num_blocks = 1 if requests.partial is None else len(settings.cache_blocks)
  for size in settings.cache_blocks[:num_blocks]:
    cache = model.grow(cache, rows, size, dtype=settings.cache_dtype, most=sum(settings.cache_blocks))

  reasons = finished_before(requests, num_sequences)
  waiting = split_into_shards(reasons, num_shards)[:, :-1] == RUNNING
  is_partial = (
    waiting
    if requests.partial is None
    else waiting & (split_into_shards(requests.partial.lengths, num_shards)[:, :-1] > 0)
  )
  order = jnp.argsort(jnp.where(is_partial, 0, jnp.where(waiting, 1, 2)), axis=1, stable=True)
  queue = jnp.where(jnp.arange(per_shard) < jnp.sum(waiting, axis=1, keepdims=True), order, per_shard)
  queue = jnp.concatenate([queue, jnp.full((num_shards, 1), per_shard)], axis=1)
  limits = jnp.full((num_sequences,), settings.max_new_tokens) if requests.limits is None else requests.limits
  kept = requests._replace(
    seeds=None,
    limits=jnp.clip(limits, 1, settings.max_new_tokens),
    partial=requests.partial
    and requests.partial._replace(logprobs=None, raw_logprobs=None, reasons=None, routing=None, entropy=None),
  )
  inputs = Inputs(
    weights=model.decoding_weights(params),
    prompts_seen=seen,
    positions=each((jnp.sum(prompt_mask, axis=1) if shown is None else shown.ends) - 1),
    tokens=each(prompts[:, -1]),
    queue=queue,
    numbers=split_into_shards(jnp.arange(num_sequences), num_shards),
    # Made once, not at each step.
    keys=split_into_shards(jax.random.key_data(sequence_keys(requests.seeds)), num_shards),
    requests=split_into_shards(kept, num_shards),
  )
  # If every sequence has its own row, row i decodes sequence i and no lookup is needed.
  first = (
    jnp.broadcast_to(jnp.arange(per_shard), (num_shards, per_shard))
    if rows == num_sequences
    else queue[:, : rows // num_shards]
  )
  loop = Loop(
    step=jnp.zeros((), jnp.int32),
    written=jnp.full((sum(settings.cache_blocks[:num_blocks]),), NEVER),
    cache=cache,
    sequences=first,
    lengths=jnp.zeros(first.shape, jnp.int32),
    tokens=gather(inputs.tokens, first),
    matching=settings.stop_table.start(*first.shape),
    started=jnp.full((num_shards,), rows // num_shards),
    outputs=_initial_outputs(settings, reasons, requests, num_shards),
  )
  if requests.partial is not None:
    loop = _resume(model, settings, params, prompts, prompt_mask, inputs, loop)
  return _place(inputs, model.mesh, num_shards), _place(loop, model.mesh, num_shards), routes


def _shown_before_last(shown: Shown | None, margin: tuple) -> dict[str, Any]:
  """Returns the arguments for pictures of a prefill of prompts without their last tokens."""
  if shown is None:
    return {}
  positions = jnp.pad(shown.positions[:, :-1], (*margin, (0, 0)))
  slots = jnp.pad(shown.images.slots[:, :-1], margin, constant_values=-1)
  return dict(positions=positions, images=shown.images._replace(slots=slots))


def num_shards_and_rows(mesh: Mesh | None, num_prompts: int, settings: Settings) -> tuple[int, int]:
  """Returns the number of shards of the batch and the number of rows over all shards.

  Each device has its own shard, with its own queue of waiting sequences, if the mesh divides the
  prompts and the rows. Otherwise there is one shard.
  """
  num_sequences = num_prompts * settings.group_size
  rows = num_rows(mesh, num_sequences, settings.slots, ends_early=not settings.stop_table.is_empty)
  shards = 1 if mesh is None else num_row_shards(mesh)
  return (shards if num_prompts % shards == 0 and rows % shards == 0 else 1), rows


def num_rows(mesh: Mesh | None, num_sequences: int, slots: int | None, *, ends_early: bool = True) -> int:
  """Returns the number of rows that decode N sequences.

  Args:
    mesh: Mesh of the sampler; None means one device.
    num_sequences: Number of sequences (N).
    slots: Number of rows that the user asked for; None means the platform's default.
    ends_early: Whether a response can end before its budget. If none can, no row is ever refilled.

  Example:
    >>> num_rows(None, 512, None), num_rows(None, 64, None), num_rows(None, 512, None, ends_early=False), num_rows(None, 512, 20)
    (128, 64, 512, 20)
  """
  platform = platform_of(mesh)
  default = _ROWS.get(platform, _ROWS["gpu"]) * (1 if mesh is None else num_row_shards(mesh))
  return min(slots or (default if ends_early else num_sequences), num_sequences)


def _resume(
  model: Decoder, settings: Settings, params: Params, prompts, prompt_mask, inputs: Inputs, loop: Loop
) -> Loop:
  """Prefills the existing tokens of the first rows' responses, as if earlier steps had cached them.

  On one device a call never leaves more unfinished responses than there are rows. Any further
  responses get a row later and feed their existing tokens step by step.
  """
  here, num_rows, budget, partial = (
    loop.sequences,
    loop.sequences.size,
    settings.max_new_tokens,
    inputs.requests.partial,
  )
  lengths = gather(partial.lengths, here)
  # Each response follows its prompt and is aligned right, without its last token: the first step
  # feeds it.
  response = gather(partial.tokens, here).reshape(num_rows, -1)
  numbers = gather(inputs.numbers, here).reshape(-1) // settings.group_size
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
    matching=_initial_matching(settings, inputs, loop, lengths),
  )


def _initial_matching(settings: Settings, inputs: Inputs, loop: Loop, lengths: Int[Array, "d b"]) -> Matching:
  """Returns the states of the stop rule after the existing tokens of the rows' responses."""
  tokens = gather(inputs.requests.partial.tokens, loop.sequences)

  def feed(t, matching):
    reasons = jnp.where(t < lengths, RUNNING, int(StopReason.UNFINISHED))
    size = jnp.broadcast_to(t + 1, lengths.shape)
    return advance_stops(settings.stop_table, matching, reasons, tokens[..., t], lengths=size, limits=size)[0]

  return jax.lax.fori_loop(0, jnp.max(lengths), feed, loop.matching)


def _place(tree: PyTree, mesh: Mesh | None, num_shards: int) -> PyTree:
  """Places each shard on its own device."""
  if mesh is None or mesh.size == 1 or num_shards == 1:
    return tree
  shard = lambda x: jax.lax.with_sharding_constraint(x, row_sharding(mesh)) if jnp.ndim(x) else x
  return tree._replace(**{name: jax.tree.map(shard, x) for name, x in tree._asdict().items() if name not in _UNSPLIT})


def _initial_outputs(settings: Settings, reasons: Int[Array, " N"], requests: Requests, num_shards: int) -> Outputs:
  """Makes the outputs before the first step, with the existing tokens of partial responses."""
  partial, shape = requests.partial, (len(reasons), settings.max_new_tokens)
  zeros = jnp.zeros(shape, jnp.float32)
  is_plain = settings.temperature == 1 and not settings.top_k and settings.top_p == 1
  outputs = Outputs(
    tokens=jnp.full(shape, settings.pad_id, jnp.int32),
    logprobs=zeros,
    raw_logprobs=None
    if is_plain and requests.temperatures is None and requests.min_new_tokens is None and partial is None
    else zeros,
    entropy=zeros if settings.entropy else None,
    routing=None if settings.route_shape is None else jnp.full((*shape, *settings.route_shape), -1, jnp.int16),
    lengths=jnp.zeros(shape[:1], jnp.int32),
    reasons=reasons,
  )
  if partial is not None:
    outputs = outputs._replace(lengths=partial.lengths)
    there = jnp.arange(shape[1]) < partial.lengths[:, None]
    for name, empty in dict(tokens=settings.pad_id, logprobs=0, raw_logprobs=0, routing=-1, entropy=0).items():
      before, slots = getattr(partial, name), getattr(outputs, name)
      if before is not None and slots is not None:
        known = there[(..., *[None] * (before.ndim - 2))]
        outputs = outputs._replace(**{name: jnp.where(known, before, empty).astype(slots.dtype)})
  outputs = split_into_shards(outputs, num_shards)
  # The dummy sequence never runs.
  return outputs._replace(reasons=outputs.reasons.at[:, -1].set(StopReason.LENGTH))
