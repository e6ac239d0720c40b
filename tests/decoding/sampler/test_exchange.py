"""Samples that move between shards: the tokens of one device, in fewer steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.pod import hlo, lengths
from jaxrl_llm.decoding.sampler import Requests, exchange, make_sampler, make_stop_table, seeded, to_partial
from jaxrl_llm.decoding.sampler.begin import begin
from jaxrl_llm.decoding.sampler.sampler import make_settings
from jaxrl_llm.decoding.sampler.state import Outputs
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.types import Rollouts, StopReason
from tests.decoding.sampler import nano
from tests.decoding.sampler.nano import PAD, Chain
from tests.marks import few

GROUP, BUDGET, PROMPTS, SHARDS = 4, 12, 16, 8
N = PROMPTS * GROUP
SETTINGS = dict(group_size=GROUP, max_new_tokens=BUDGET, stop_ids=tuple(range(0, 264, 24)), pad_id=PAD, slots=16)


@functools.cache
def built(kind, **axes):
  """Returns a model and its params, on one device or on a mesh with these axes."""
  if kind != "chain":
    return nano.built(kind, **axes)
  mesh, table = mesh_lib.make_mesh(**axes) if axes else None, np.random.default_rng(0).standard_normal((264, 264)).astype(np.float32)
  return Chain(mesh=mesh), jnp.asarray(table) if mesh is None else jax.device_put(table, mesh_lib.replicated(mesh))


def prompts_of(mesh, width=6):
  rng = np.random.default_rng(1)
  mask = np.arange(width) >= width - rng.integers(1, width + 1, (PROMPTS, 1))
  prompts = np.where(mask, rng.integers(256, size=mask.shape), PAD).astype(np.int32)
  return (prompts, mask) if mesh is None else mesh_lib.place_rows(mesh, (prompts, mask))


def uneven(long=BUDGET, short=2, num_long=4):
  """Makes limits by which all long responses belong to the prompts of the first shards."""
  return jnp.asarray(np.where(np.arange(N) < num_long * GROUP, long, short), jnp.int32)


def complete(settings):
  return SETTINGS | settings | ({"stop_table": TABLE} if settings.get("stop_ids") == () else {})


@functools.cache
def sampler_of(kind, axes, **settings):
  model, _ = built(kind, **dict(axes))
  return jax.jit(make_sampler(model, **complete(settings)))


def with_seeds(requests, seed=0):
  return requests._replace(seeds=seeded(jax.random.key(seed), N).seeds)


def sampled(kind, requests, seed=0, *, axes=(), **settings) -> Rollouts:
  model, params = built(kind, **dict(axes))
  args = (params, *prompts_of(model.mesh), with_seeds(requests, seed))
  return jax.device_get(sampler_of(kind, tuple(axes), **settings)(*args))


def steps_of(kind, requests, *, axes, **settings):
  """Returns the steps of the loop, and the numbers of the sequences as the shards hold them."""
  model, params = built(kind, **dict(axes))
  settings = make_settings(model, **complete(settings | {"cache_blocks": None}))

  def run(*args):
    inputs, loop, _ = begin(model, settings, *args)
    inputs, loop = exchange.run(model, settings, inputs, loop)
    return loop.step, inputs.numbers[:, :-1]

  step, numbers = jax.jit(run)(params, *prompts_of(model.mesh), with_seeds(requests))
  return int(step), np.asarray(numbers)


def steps_alone(of_samples):
  """Returns the steps of responses of these lengths if shards exchange nothing."""
  shards = of_samples.reshape(SHARDS, -1, GROUP)
  return max(lengths.simulate(shard, slots=2, shards=1, blocks=(BUDGET,), block_columns=1).steps for shard in shards)


def are_equal(actual, expected, atol=1e-5):
  for name, x in expected._asdict().items():
    y = getattr(actual, name)
    assert (x is None) == (y is None), name
    if x is not None:
      np.testing.assert_allclose(y, x, rtol=0, atol=atol if x.dtype == np.float32 else 0, err_msg=name)


DATA = (("data", 8),)
TABLE = make_stop_table([bytes([i]) if i < 256 else None for i in range(264)], ["a", "c", "e", "g", "\n"], [(7, 9)])


@pytest.mark.parametrize(
  ("kind", "axes", "settings"),
  few([
    pytest.param("dense", DATA, {"cache_blocks": (4, 8)}, marks=pytest.mark.exhaustive),
    pytest.param("dense", (("data", 2), ("fsdp", 2), ("tensor", 2)), {"cache_dtype": "int8"}, marks=pytest.mark.exhaustive),
    ("moe", (("fsdp", 4), ("expert", 2)), {"record_routing": True, "entropy": True, "temperature": 0.8, "top_k": 30}),
    ("chain", DATA, {"stop_ids": ()}),
    ("window", (("fsdp", 4), ("tensor", 2)), {"cache_blocks": (4, 8)}),
  ], 3),
  ids=["growing cache", "int8 and heads over devices", "routes", "stop strings", "windows"],
)
def test_an_exchange_keeps_tokens_logprobs_reasons_and_routes(kind, axes, settings):
  requests = Requests(
    limits=uneven(),
    temperatures=jnp.where(jnp.arange(N) % 3 == 0, 0.5, 1.0),
    min_new_tokens=jnp.arange(N, dtype=jnp.int32) % 3,
  )
  one, eight = sampled(kind, requests, **settings), sampled(kind, requests, axes=axes, **settings)
  are_equal(eight, one, atol=1e-3 if "cache_dtype" in settings else 1e-5)
  _, numbers = steps_of(kind, requests, axes=axes, **settings)
  assert np.mean(numbers != np.arange(N).reshape(numbers.shape)) > 0.1
  assert len(np.unique(one.reasons)) > 1 and len(np.unique(one.mask.sum(axis=1))) > 3


@pytest.mark.parametrize("seed", few(range(3), 0, rest="exhaustive"))
def test_steps_are_those_of_the_simulation_and_fewer(seed):
  limits = np.asarray(uneven()) if seed == 0 else np.random.default_rng(seed).integers(1, BUDGET + 1, (PROMPTS, 1)).repeat(GROUP)
  step, _ = steps_of("chain", Requests(limits=jnp.asarray(limits, jnp.int32)), axes=DATA, stop_ids=(263,))
  of_prompts = limits.reshape(PROMPTS, GROUP)
  assert step == lengths.simulate(of_prompts, slots=16, shards=SHARDS, blocks=(BUDGET,), block_columns=1).steps
  assert limits.sum() / 16 <= step < (0.6 if seed == 0 else 1) * steps_alone(limits)


@pytest.mark.slow
def test_partial_responses_move_too():
  """Sequences are cut while others have moved; more are then replayed than there are rows."""
  requests = Requests(limits=uneven())
  whole = sampled("dense", requests)
  part, rounds = None, 0
  while part is None or np.any(part.reasons == StopReason.UNFINISHED):
    partial = to_partial(whole._replace(mask=np.zeros_like(whole.mask), reasons=np.full(N, StopReason.UNFINISHED, np.int8)))
    partial = to_partial(part) if part else partial
    part = sampled("dense", requests._replace(partial=partial, max_steps=jnp.int32(9)), axes=DATA)
    np.testing.assert_array_equal(part.tokens[part.mask], whole.tokens[part.mask])
    rounds += 1
  assert rounds > 2
  are_equal(part, whole)
  # All responses of the first shards have tokens already, and most have to wait.
  kept = np.minimum(whole.mask.sum(axis=1) - 1, 3) * (np.arange(N) < 6 * GROUP)
  cut = whole._replace(mask=np.arange(BUDGET) < kept[:, None], reasons=np.full(N, StopReason.UNFINISHED, np.int8))
  requests = requests._replace(partial=to_partial(cut), max_steps=jnp.int32(1000))
  are_equal(sampled("dense", requests, axes=DATA), whole)
  _, numbers = steps_of("dense", requests, axes=DATA)
  away = numbers[numbers != np.arange(N).reshape(numbers.shape)]
  assert np.any(kept[away] > 0)


@pytest.mark.exhaustive
def test_enough_groups_are_counted_across_shards():
  asked = lambda groups, steps: Requests(limits=uneven(), enough_groups=jnp.int32(groups), max_steps=jnp.int32(steps))
  step, _ = steps_of("chain", asked(12, 1000), axes=DATA)
  whole = sampled("chain", asked(1000, 1000))

  def num_complete(steps):
    part = sampled("chain", asked(1000, steps), axes=DATA)
    np.testing.assert_array_equal(part.tokens, np.where(part.mask, whole.tokens, PAD))
    return np.sum(np.all(part.reasons.reshape(-1, GROUP) != StopReason.UNFINISHED, axis=1))

  assert num_complete(step - 1) < 12 <= num_complete(step) < PROMPTS


def test_outputs_return_from_any_exchanges(rng):
  """Columns of a group are permuted among all places, as many exchanges would permute them."""
  settings = make_settings(Chain(), **SETTINGS)
  numbers = np.arange(N).reshape(PROMPTS, GROUP)
  for column in range(GROUP):
    numbers[:, column] = rng.permutation(numbers[:, column])
  numbers = np.pad(numbers.reshape(SHARDS, -1), ((0, 0), (0, 1)))
  of_numbers = lambda x: Outputs(x[..., None] * np.ones(3, int), x[..., None] * np.ones(2, np.float32), None, None, None, x, -x)
  outputs = jax.tree.map(jnp.asarray, of_numbers(numbers))
  restored = jax.jit(functools.partial(exchange.restore, settings))(jnp.asarray(numbers), outputs)
  jax.tree.map(np.testing.assert_array_equal, restored, of_numbers(np.pad(np.arange(N).reshape(SHARDS, -1), ((0, 0), (0, 1)))))


@pytest.mark.parametrize(
  "axes",
  [
    pytest.param(DATA, marks=pytest.mark.slow, id="one axis"),
    pytest.param((("data", 2), ("fsdp", 2), ("expert", 2)), marks=pytest.mark.exhaustive, id="three axes"),
  ],
)
def test_devices_send_one_prompt(axes):
  """With long prompts, nothing that is sent is larger than the keys and values of one of them."""
  model, params = built("dense", **dict(axes))
  prompts = prompts_of(model.mesh, width=129)
  args = (params, *prompts, with_seeds(Requests(limits=uneven())))
  settings = make_settings(model, **SETTINGS)
  text = sampler_of("dense", axes).lower(*args).compile().as_text()
  cache = jax.eval_shape(lambda *args: begin(model, settings, *args)[1].cache, *args)
  of_prompt = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.prompts)) // PROMPTS
  sent = [x.num_bytes for x in hlo.collectives(text, num_devices=8, unknown_trips=2) if x.times > 1]
  assert of_prompt / model.config.num_layers / 2 <= max(sent) <= of_prompt * 1.1
