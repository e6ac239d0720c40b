"""The sampler: one jitted program from prompts to rollouts."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jaxrl_llm.decoding.filters import check_filter
from jaxrl_llm.decoding.sampler import exchange
from jaxrl_llm.decoding.sampler import loop as loop_lib
from jaxrl_llm.decoding.sampler.begin import begin
from jaxrl_llm.decoding.sampler.requests import Requests, check_requests
from jaxrl_llm.decoding.sampler.state import Decoder, Inputs, Loop, Outputs, Settings, exchanges, num_blocks
from jaxrl_llm.decoding.stops import StopTable
from jaxrl_llm.devices.mesh import platform_of
from jaxrl_llm.models import ragged
from jaxrl_llm.types import Params, Rollouts, Shown

SampleFn = Callable[..., Rollouts]
"""`(params, prompts [n P], prompt_mask [n P], requests, shown=None) -> rollouts`.

The rollouts have N = n·G sequences. `shown` holds the pictures of the prompts.
"""


def make_sampler(model: Decoder, **settings: Any) -> SampleFn:
  """Makes a sampler that shares the learner's model and weights.

  - Each prompt is prefilled once, and its keys and values are stored once for the G samples of its
    group.
  - `slots` rows decode the N sequences. A row whose response ends takes the next sequence in the
    same `while_loop`.
  - The cache of the responses grows block by block, and attention reads only the existing blocks.
  - What a sequence draws follows from its seed (`Requests.seeds`) and its own tokens. It depends
    neither on the number of slots, nor on its neighbours, nor on the sharding of the batch, and the
    decoding engine draws the same.

  Args:
    model: Model to sample from, such as a `models.Model`.
    group_size: Number of samples per prompt (G).
    max_new_tokens: Budget of a response, in tokens (R).
    stop_ids: Tokens that end a response. The stop token is kept and counts as an action.
    pad_id: Token that fills the slots after the end.
    temperature, top_k, top_p: Settings of `filters.make_filter`. With a temperature of 0 the G
      samples of a prompt are the same.
    slots: Number of sequences decoded at once. None means 128 per CPU device and 512 per
      accelerator, or all sequences if nothing ends a response before its budget.
    cache_dtype: One of `models.CACHE_DTYPES`; None means the model's own dtype.
    cache_blocks: Sizes in tokens by which the response cache grows, which add up to
      `max_new_tokens`; None means `default_blocks`.
    record_routing: Whether to return the experts that tokens visit.
    entropy: Whether to return the entropy of every distribution that was drawn from.
    stop_table: Stop strings and sequences, made by `stops.make_stop_table`.

  Returns:
    The sampler, to be jitted once. Its shapes depend only on the prompts' bucket. Prompts are
    padded on the left.

  Raises:
    ValueError: If a setting is out of range.

  References:
    Orca: a distributed serving system for transformer-based generative models, OSDI 2022.
  """
  settings = make_settings(model, **settings)

  def sample(
    params: Params,
    prompts: Int[Array, "n P"],
    prompt_mask: Bool[Array, "n P"],
    requests: Requests,
    shown: Shown | None = None,
  ) -> Rollouts:
    check_requests(requests, len(prompts) * settings.group_size, settings.max_new_tokens)
    inputs, loop, routes = begin(model, settings, params, prompts, prompt_mask, requests, shown)
    numbers, outputs = _run(model, settings, inputs, loop)
    if exchanges(loop):
      outputs = exchange.restore(settings, numbers, outputs)
    return loop_lib.rollouts(settings, prompts, prompt_mask, outputs, routes)

  return sample


def _run(model: Decoder, settings: Settings, inputs: Inputs, loop: Loop) -> tuple[Int[Array, "d M"], Outputs]:
  """Steps until everything is drawn, with one loop per cache size.

  Each further loop is inside a branch that is taken only if it is needed.

  Returns:
    The numbers of the sequences as the shards hold them in the end, and their outputs.
  """
  inputs, loop = exchange.run(model, settings, inputs, loop)
  stop = lambda loop: (inputs.numbers, loop.outputs)
  if num_blocks(settings, loop) == len(settings.cache_blocks):
    return stop(loop)
  proceed = lambda loop: _run(model, settings, inputs, loop_lib.grow(model, settings, loop))
  return jax.lax.cond(loop_lib.has_demand(settings, inputs, loop), proceed, stop, loop)


def make_settings(model: Decoder, *, record_routing: bool = False, **settings: Any) -> Settings:
  """Checks the settings of `make_sampler` and fills in those that depend on the model.

  Raises:
    ValueError: If a setting is out of range. One line, with the field's name in configs.
  """
  route_shape = (model.config.num_layers, model.config.experts.top_k) if record_routing and model.config.experts else None
  given = Settings(**settings, route_shape=route_shape)
  check_filter(given.temperature, given.top_k, given.top_p, section="rollout.")
  blocks = default_blocks(given.max_new_tokens, model.config, model.mesh) if given.cache_blocks is None else tuple(given.cache_blocks)
  for name in ("group_size", "max_new_tokens"):
    if getattr(given, name) < 1:
      raise ValueError(f"rollout.{name}: found {getattr(given, name)}, expected 1 or more")
  if given.slots is not None and given.slots < 1:
    raise ValueError(f"rollout.slots: found {given.slots}, expected 1 or more, or None")
  if any(size < 1 for size in blocks) or sum(blocks) != given.max_new_tokens:
    raise ValueError(
      f"rollout.cache_blocks: found {blocks}, expected positive sizes that add up to rollout.max_new_tokens={given.max_new_tokens}, or None"
    )
  table = (given.stop_table or StopTable())._replace(ids=np.array(given.stop_ids, np.int32))
  dtype = given.cache_dtype or model.config.dtype
  return given._replace(stop_ids=tuple(given.stop_ids), stop_table=table, cache_dtype=dtype, cache_blocks=blocks)


def default_blocks(max_new_tokens: int, config: Any, mesh: Mesh | None) -> tuple[int, ...]:
  """Returns blocks of a quarter, a quarter and a half of the budget.

  A budget of at most 64 tokens is one block, because each block costs the compilation of a loop. So
  is a budget whose columns the kernel of a GPU reads: it skips those that no row sees, and each
  block takes two more writes and one more launch of the kernel in every layer and step.

  Args:
    max_new_tokens: Budget of a response.
    config: Shape of the model, such as a `ModelConfig`; read for GPUs alone.
    mesh: Device mesh; None is the default device.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> [default_blocks(budget, preset("qwen3-0.6b"), None) for budget in (1024, 48)]
    [(256, 256, 512), (48,)]
  """
  by_kernel = lambda: ragged.is_used(config.decode_attention, "gpu", config.head_dim, max_new_tokens)
  if max_new_tokens <= 64 or platform_of(mesh) == "gpu" and by_kernel():
    return (max_new_tokens,)
  quarter = max_new_tokens // 4
  return (quarter, quarter, max_new_tokens - 2 * quarter)
