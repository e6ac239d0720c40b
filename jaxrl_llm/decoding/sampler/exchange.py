"""Exchange of waiting sequences between shards.

Each shard has its own rows, its own queue, and places for its prompts: a place holds the cached
prompt on the shard's device, and the G samples that attend to it. Without an exchange, a shard
whose queue is empty would idle while others still have waiting sequences. Instead, its place whose
samples are all done takes over a prompt from the shard with the longest queue, and with it all
samples that still wait:

  - The prompt's keys and values are copied, since samples that have started still attend to them.
  - Each waiting sample swaps places with the done one of the same index, with all that belongs to
    either.

A sample keeps its seed, so its tokens stay the same.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from jaxrl_llm.decoding.sampler import loop as loop_lib
from jaxrl_llm.decoding.sampler.requests import Requests
from jaxrl_llm.decoding.sampler.state import Decoder, Inputs, Loop, Outputs, Settings, exchanges, gather, is_active, scatter
from jaxrl_llm.decoding.stops import RUNNING


class Move(NamedTuple):
  """A prompt and samples of it that move. Places are counted through all shards.

  Attributes:
    source: Place of the prompt; that of the target if nothing moves.
    target: Place that takes over the prompt.
    samples: Current place of each of the G samples that the target will hold; the target itself for
      those that stay.
  """

  source: Int[Array, ""]
  target: Int[Array, ""]
  samples: Int[Array, " G"]


def run(model: Decoder, settings: Settings, inputs: Inputs, loop: Loop) -> tuple[Inputs, Loop]:
  """Steps until everything is drawn or the cache is full, with an exchange whenever it is possible.

  The exchange is outside of the loop of the steps, so that a step has no branch.
  """
  proceeds = partial(loop_lib.should_continue, settings)
  steps = lambda inputs, condition, loop: jax.lax.while_loop(condition, partial(loop_lib.advance, model, settings, inputs), loop)
  if not exchanges(loop):
    return inputs, steps(inputs, partial(proceeds, inputs), loop)
  join = lambda moved: with_fixed(moved, inputs)

  def body(state: tuple[Inputs, Loop]) -> tuple[Inputs, Loop]:
    inputs, loop = join(state[0]), state[1]
    loop = steps(inputs, lambda loop: proceeds(inputs, loop) & ~is_possible(settings, inputs, loop), loop)
    inputs, loop = exchange(model, settings, inputs, loop)
    return movable(inputs), loop

  moved, loop = jax.lax.while_loop(lambda state: proceeds(join(state[0]), state[1]), body, (movable(inputs), loop))
  return join(moved), loop


def movable(inputs: Inputs) -> Inputs:
  """Returns the inputs that an exchange changes; the others are None."""
  return inputs._replace(weights=None, requests=inputs.requests._replace(max_steps=None, enough_groups=None))


def fixed(inputs: Inputs) -> Inputs:
  """Returns the inputs that no exchange changes; the others are None."""
  requests = Requests(max_steps=inputs.requests.max_steps, enough_groups=inputs.requests.enough_groups)
  return Inputs(inputs.weights, *[None] * 6, requests)


def with_fixed(moved: Inputs, fixed: Inputs) -> Inputs:
  """Joins the inputs that an exchange changes with the others."""
  requests = moved.requests._replace(max_steps=fixed.requests.max_steps, enough_groups=fixed.requests.enough_groups)
  return moved._replace(weights=fixed.weights, requests=requests)


def is_possible(settings: Settings, inputs: Inputs, loop: Loop) -> Bool[Array, ""]:
  """Returns whether an exchange would give an idle row a sequence; see `exchange`."""
  takes, waits = jnp.any(_free(settings, loop), axis=1), jnp.any(_is_waiting(inputs, loop), axis=1)
  # Together, so that the devices agree on both at once.
  return jnp.all(jnp.any(jnp.stack([takes, waits], axis=1), axis=0))


def _free(settings: Settings, loop: Loop) -> Bool[Array, "d m"]:
  """Returns the places that can take over a prompt, on shards with idle rows."""
  is_over = loop.outputs.reasons != RUNNING
  places = jnp.all(is_over[:, :-1].reshape(len(is_over), -1, settings.group_size), axis=2)
  return places & jnp.any(~is_active(loop), axis=1, keepdims=True)


def _is_waiting(inputs: Inputs, loop: Loop) -> Bool[Array, "d M"]:
  """Returns which entries of the queues are sequences that wait.

  On a shard with idle rows none does.
  """
  end = inputs.queue.shape[1] - 1
  return (jnp.arange(end + 1) >= loop.started[:, None]) & (inputs.queue != end)


def exchange(model: Decoder, settings: Settings, inputs: Inputs, loop: Loop) -> tuple[Inputs, Loop]:
  """Moves a prompt and its waiting samples to a shard with idle rows, and starts them there.

  It is the prompt of the last sequence in the longest queue. Nothing changes if no exchange is
  possible.
  """
  free, waiting, group = _free(settings, loop), _is_waiting(inputs, loop), settings.group_size
  num_shards, end = free.shape[0], inputs.queue.shape[1] - 1
  per_shard = free.shape[1]
  idle = jnp.where(jnp.any(free, axis=1), jnp.sum(~is_active(loop), axis=1), 0)
  lengths = jnp.sum(waiting, axis=1)
  giver, taker = jnp.argmax(lengths), jnp.argmax(idle)
  possible = (lengths[giver] > 0) & (idle[taker] > 0)

  line = inputs.queue[giver]
  place = jnp.where(possible, line[loop.started[giver] + lengths[giver] - 1] // group, 0)
  target_place = jnp.argmax(free[taker])
  waits = (line == (place * group + jnp.arange(group))[:, None]) & waiting[giver]
  moves = jnp.any(waits, axis=1) & possible
  target = taker * per_shard + target_place
  source = jnp.where(possible, giver * per_shard + place, target)
  move = Move(source, target, jnp.where(moves, source, target))

  shards = jnp.arange(num_shards)[:, None]
  queue = loop_lib.without(inputs.queue, waiting & (shards == giver) & (inputs.queue // group == place) & possible)
  received = jnp.sort(jnp.where(moves, target_place * group + jnp.arange(group), end))
  received = jnp.pad(received, (0, end + 1 - group), constant_values=end)
  is_taker = (shards == taker) & possible
  moved = movable(inputs)
  moved = moved._replace(
    prompts_seen=copy_prompts(move, moved.prompts_seen),
    queue=jnp.where(is_taker, received, queue),
    **move_samples(move, {name: getattr(moved, name) for name in ("positions", "tokens", "numbers", "keys", "requests")}),
  )
  inputs = with_fixed(moved, inputs)
  loop = loop._replace(
    cache=model.map_prompts(partial(copy_prompts, move), loop.cache),
    started=jnp.where(is_taker[:, 0], 0, loop.started),
    outputs=move_samples(move, loop.outputs),
  )
  return inputs, loop_lib.refill(settings, inputs, loop, ~is_active(loop))


def copy_prompts(move: Move, tree: PyTree) -> PyTree:
  """Copies the moved prompt's row of arrays [n ...] to the target's, of one array after the other.

  XLA would otherwise send the rows of several layers in one collective, with a buffer for all.
  """
  arrays, structure = jax.tree.flatten(tree)
  copied, source = [], move.source
  for x in arrays:
    is_row = lambda place, x=x: (jnp.arange(len(x)) == place).reshape(-1, *[1] * (x.ndim - 1))
    source, row = jax.lax.optimization_barrier((source, _only(is_row(source), x)))
    copied.append(jnp.where(is_row(move.target), row, x))
  return jax.tree.unflatten(structure, copied)


def _only(mask: Bool[Array, "..."], x: Array) -> Array:
  """Returns the one entry of x along the first axis that is in the mask.

  A sum sends one entry between devices, whatever axes of the mesh split x. For an index, XLA may
  gather or reduce all of x.
  """
  of_mask = jnp.where(mask, x, jnp.zeros((), x.dtype))
  return jnp.any(of_mask, axis=0) if x.dtype == bool else jnp.sum(of_mask, axis=0, dtype=x.dtype)


def move_samples(move: Move, tree: PyTree) -> PyTree:
  """Swaps the moved samples' entries of arrays [d M ...] with those of the target."""
  return _swap(tree, move.samples, jnp.broadcast_to(move.target, move.samples.shape))


def _swap(tree: PyTree, here: Int[Array, " G"], there: Int[Array, " G"]) -> PyTree:
  """Swaps entries of arrays [d M ...] between two places for each of the G samples."""
  group = len(here)

  def swap(x: Array) -> Array:
    num_shards, per_shard = x.shape[0], x.shape[1] // group
    places = jnp.stack([here, there])
    # Every shard reads entries at these slots, and those of the right shards are kept.
    slots = (places % per_shard * group + jnp.arange(group)).reshape(-1)
    is_held = jnp.arange(num_shards)[:, None] == (places // per_shard).reshape(-1)
    held = gather(x, jnp.broadcast_to(slots, is_held.shape))
    entries = jnp.roll(_only(is_held.reshape(*is_held.shape, *[1] * (x.ndim - 2)), held), group, axis=0)
    # Out-of-bounds writes are dropped.
    return scatter(x, jnp.where(is_held, slots, x.shape[1]), jnp.broadcast_to(entries, held.shape))

  return jax.tree.map(swap, tree)


def restore(settings: Settings, numbers: Int[Array, "d M"], outputs: Outputs) -> Outputs:
  """Puts the outputs back in the order of the prompts, place by place.

  Only samples that have moved are sent. A single gather of all would need all outputs on each
  device.
  """
  group = settings.group_size
  homes = jnp.arange(numbers[:, :-1].size).reshape(len(numbers), -1)

  def is_away(numbers: Int[Array, "d M"]) -> Bool[Array, " n"]:
    return jnp.any((numbers[:, :-1] != homes).reshape(-1, group), axis=1)

  def bring(state: tuple[Int[Array, "d M"], Outputs]) -> tuple[Int[Array, "d M"], Outputs]:
    numbers, _ = state
    home = jnp.argmax(is_away(numbers))
    # A sample keeps its index in the group, wherever it is.
    of_prompt = numbers[:, :-1].reshape(-1, group) // group == home
    return _swap(state, jnp.broadcast_to(home, (group,)), jnp.argmax(of_prompt, axis=0))

  return jax.lax.while_loop(lambda state: jnp.any(is_away(state[0])), bring, (numbers, outputs))[1]
