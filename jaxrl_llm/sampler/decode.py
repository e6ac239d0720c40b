"""The decode loop: one jitted program from prompts to rollouts."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxrl_llm.sampler.filters import make_filter
from jaxrl_llm.types import Params, Rollouts

SampleFn = Callable[[Params, Int[Array, "n P"], Bool[Array, "n P"], PRNGKeyArray], Rollouts]
"""`(params, prompts, prompt_mask, key) -> rollouts`, with N = n·G sequences."""


class _Loop(NamedTuple):
  step: Int[Array, ""]
  cache: PyTree
  tokens: Int[Array, "N R"]
  mask: Bool[Array, "N R"]
  logprobs: Float[Array, "N R"]
  done: Bool[Array, " N"]


def make_sampler(
  init_cache: Callable[[int, int], PyTree],
  decode: Callable[..., tuple[Float[Array, "N V"], PyTree]],
  *,
  group_size: int,
  max_new_tokens: int,
  stop_ids: tuple[int, ...],
  pad_id: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
) -> SampleFn:
  """A sampler that shares the learner's model and weights.

  Prompts are prefilled once and their keys and values repeated for the G samples of the group. Decoding then runs in a `while_loop`
  that ends when every row has drawn a stop token or `max_new_tokens` are drawn. Row i at step t draws with
  `fold_in(fold_in(key, i), t)`: no two rows or steps share noise, and a row's tokens do not depend on how the batch is sharded.

  Args:
    init_cache: `(batch, slots) -> cache` of the model.
    decode: `(params, tokens, positions, cache, slot) -> (logits after the last token, cache)` of the model.
    group_size: samples for each prompt (G).
    max_new_tokens: budget of a response, in tokens (R).
    stop_ids: tokens that end a response; the stop token is kept and counts as an action.
    pad_id: fills the slots after the end.
    temperature: see `filters.make_filter`.
    top_k: see `filters.make_filter`.
    top_p: see `filters.make_filter`.

  Returns:
    The sampler, to be jitted once; its shapes depend on the prompts' bucket only.
  """
  filter_logits = make_filter(temperature=temperature, top_k=top_k, top_p=top_p)
  stops = jnp.array(stop_ids, jnp.int32)

  def draw(logits: Float[Array, "N V"], keys, step) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    logprobs = jax.nn.log_softmax(filter_logits(logits), axis=-1)
    tokens = jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, step), row))(keys, logprobs)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]

  def record(loop: _Loop, tokens, logprobs) -> _Loop:
    alive = ~loop.done
    column = lambda array, values: jax.lax.dynamic_update_slice_in_dim(array, values[:, None], loop.step, axis=1)
    return loop._replace(
      step=loop.step + 1,
      tokens=column(loop.tokens, jnp.where(alive, tokens, pad_id)),
      mask=column(loop.mask, alive),
      logprobs=column(loop.logprobs, jnp.where(alive, logprobs, 0)),
      done=loop.done | jnp.isin(tokens, stops),
    )

  def sample(
    params: Params, prompts: Int[Array, "n P"], prompt_mask: Bool[Array, "n P"], key: PRNGKeyArray
  ) -> Rollouts:
    num_prompts, num_slots = prompts.shape
    cache = init_cache(num_prompts, num_slots + max_new_tokens)
    # Prompts are padded on the left, so that every row writes the same slot at the same step: one slice, no scatter.
    drawn = jnp.ones((num_prompts, max_new_tokens), bool)
    cache = cache._replace(valid=jnp.concatenate([prompt_mask, drawn], axis=1))
    positions = jnp.maximum(jnp.cumsum(prompt_mask, axis=1) - 1, 0)
    logits, cache = decode(params, prompts, positions, cache, jnp.zeros((), jnp.int32))

    repeat = lambda x, axis=0: jnp.repeat(x, group_size, axis=axis)
    cache = cache._replace(k=repeat(cache.k, 1), v=repeat(cache.v, 1), valid=repeat(cache.valid))
    if cache.routing is not None:
      cache = cache._replace(routing=repeat(cache.routing, 1))
    prompts, prompt_mask, logits = repeat(prompts), repeat(prompt_mask), repeat(logits)
    lengths = jnp.sum(prompt_mask, axis=1)
    num_rows = num_prompts * group_size
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(num_rows))

    loop = _Loop(
      step=jnp.zeros((), jnp.int32),
      cache=cache,
      tokens=jnp.full((num_rows, max_new_tokens), pad_id, jnp.int32),
      mask=jnp.zeros((num_rows, max_new_tokens), bool),
      logprobs=jnp.zeros((num_rows, max_new_tokens), jnp.float32),
      done=jnp.zeros((num_rows,), bool),
    )
    loop = record(loop, *draw(logits, keys, loop.step))

    def body(loop: _Loop) -> _Loop:
      last = jax.lax.dynamic_slice_in_dim(loop.tokens, loop.step - 1, 1, axis=1)
      position = (lengths + loop.step - 1)[:, None]
      logits, cache = decode(params, last, position, loop.cache, num_slots + loop.step - 1)
      return record(loop._replace(cache=cache), *draw(logits, keys, loop.step))

    loop = jax.lax.while_loop(lambda loop: (loop.step < max_new_tokens) & ~jnp.all(loop.done), body, loop)
    return Rollouts(prompts, prompt_mask, loop.tokens, loop.mask, loop.logprobs, stopped=loop.done, routing=routes(loop, prompt_mask))

  def routes(loop: _Loop, prompt_mask: Bool[Array, "N P"]) -> Int[Array, "N S L K"] | None:
    """Which experts each token visited; -1 for a row's last one, which is fed back only where other rows go on for longer."""
    if loop.cache.routing is None:
      return None
    fed = loop.mask & jnp.roll(loop.mask, -1, axis=1).at[:, -1].set(False)
    known = jnp.concatenate([prompt_mask, fed], axis=1)
    return jnp.where(known[..., None, None], jnp.moveaxis(loop.cache.routing, 0, 2), -1)

  return sample
