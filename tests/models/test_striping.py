"""Stripes of rows: where slots go, how even the work is, and what of it is compiled."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.kernels import flash
from jaxrl_llm.kernels.flash_tpu import ACTIVE
from jaxrl_llm.kernels.stripes import Stripes
from jaxrl_llm.learner.packing import Trajectory
from jaxrl_llm.learner.train_step import critic_outputs
from jaxrl_llm.models import Experts, make_critic, make_model, make_reward_model, preset
from jaxrl_llm.models.striping import in_row_order, striped, stripes_of
from jaxrl_llm.segments import previous_slots
from tests.batches import pack_rows
from tests.runs import ROOT


def mesh_of(**sizes):
  devices = jax.devices()[: np.prod(list(sizes.values()))]
  return mesh_lib.make_mesh(**{"data": 1, **sizes}, devices=devices)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
@pytest.mark.parametrize("held", [2, 3, 5, 127, 256, 1024, 4608])
def test_each_device_holds_as_many_slots_in_ascending_order(held, parts):
  stripes = Stripes(held * parts, parts)
  assert sorted(stripes.slots) == list(range(held * parts))
  of_devices = stripes.slots.reshape(parts, held)
  assert (np.diff(of_devices, axis=1) > 0).all()
  # Whole stripes, but for the last one of each device.
  starts = np.arange(0, held, stripes.size)
  assert all((np.diff(part) == 1).all() for device in of_devices for part in np.split(device, starts[1:]))


def test_rows_have_stripes_only_if_devices_share_them():
  mesh = mesh_of(context=4)
  assert stripes_of(40, mesh) == Stripes(40, 4)
  assert stripes_of(42, mesh) is stripes_of(4, mesh) is stripes_of(40, mesh_of(data=4)) is stripes_of(40, None) is None


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("length", [1024, 4096, 18432, 131072])
def test_one_long_sequence_is_even_work(length, parts):
  work = np.arange(1, length + 1)  # The keys that each query sees.
  of = lambda slots: work[slots].reshape(parts, -1).sum(1)
  contiguous, even = (x.max() / x.mean() for x in (of(np.arange(length)), of(Stripes(length, parts).slots)))
  assert contiguous == pytest.approx(2 - 1 / parts, abs=1e-2) and even <= 1.012


def visits(batch, slots, parts, block):
  """Counts the pairs of blocks that the kernels visit, by device and row."""
  sizes = flash._Sizes(block, flash.block(batch.segments.shape[1]), 2**20)

  @jax.jit
  def on_device(segments, prefixes, keys, slots):
    pairs, _ = flash._pairs(segments, prefixes, keys, slots, sizes)
    is_visited = (jnp.arange(len(pairs.rows)) < pairs.count) & (pairs.flags & ACTIVE != 0)
    return jnp.bincount(pairs.rows, is_visited.astype(jnp.int32), length=len(keys))

  ids_of = lambda part: jax.tree.map(lambda x: x[:, part], (batch.segments, batch.prefixes))
  return np.array([on_device(*ids_of(part), batch.segments, part) for part in map(jnp.asarray, np.split(slots, parts))])


def rows_of(length, *, share_prompts):
  """Packs responses of log-normal lengths, of 4,000 tokens in the mean, eight to each prompt."""
  rng, sequences = np.random.default_rng(0), []
  for prompt in range(8):
    for tokens in np.clip(rng.lognormal(np.log(4000) - 0.32, 0.8, 8).astype(int), 1, length - 1024):
      mask = np.repeat([0, 1], [1024, tokens]).astype(np.float32)
      sequences.append(Trajectory(np.full(len(mask), prompt, np.int32), mask, mask, mask))
  return pack_rows(sequences, row_tokens=length, row_buckets=(32,), share_prompts=share_prompts)


@pytest.mark.parametrize(("rows", "most"), [("one", 1.01), ("packed", 1.14), ("shared", 1.14)])
def test_the_kernels_of_all_devices_visit_about_as_many_blocks(rows, most):
  """Counts pairs of rows of 18,432 slots over 4 devices; a row waits for its slowest device."""
  length, parts, stripes = 18432, 4, Stripes(18432, 4)
  batch = rows_of(length, share_prompts=rows == "shared")
  if rows == "one":
    batch = batch._replace(segments=np.ones((1, length), np.int32))
  batch = jax.tree.map(jnp.asarray, batch)
  contiguous, even = (visits(batch, slots, parts, stripes.size) for slots in (np.arange(length), stripes.slots))
  ratio = lambda count: count.max(0).sum() / count.mean(0).sum()
  assert ratio(contiguous) > 1.4 and ratio(even) <= most
  assert even.sum() <= contiguous.sum()


@pytest.mark.parametrize("batch", [2, 3])
def test_slots_move_and_return_with_their_gradients(batch, rng):
  mesh = mesh_of(data=2, context=4)
  x, weights = (jnp.asarray(rng.normal(size=(batch, 20, 3)), jnp.float32) for _ in range(2))
  slots = Stripes(20, 4).slots
  moved = jax.jit(lambda x: striped(x, mesh))(x)
  np.testing.assert_array_equal(moved, x[:, slots])
  np.testing.assert_array_equal(jax.jit(lambda x: in_row_order(x, mesh))(moved), x)
  np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: jnp.sum(striped(x, mesh) * weights)))(x), weights[:, np.argsort(slots)])
  np.testing.assert_array_equal(Stripes(20, 4).joined(moved), x)
  assert striped(x, None) is in_row_order(x, None) is x


@pytest.mark.parametrize("share_prompts", [pytest.param(False, marks=pytest.mark.exhaustive), pytest.param(True, marks=pytest.mark.slow)])
def test_models_return_the_order_of_the_rows(share_prompts, rng):
  """Log-probabilities, routes, router losses, values and rewards equal those on one device."""
  sequences = []
  for prompt in (rng.integers(1, 64, 9) for _ in range(6)):
    for _ in range(4):
      mask = np.repeat([0, 1], [9, rng.integers(3, 30)]).astype(np.float32)
      tokens = np.r_[prompt, rng.integers(1, 64, len(mask) - 9)].astype(np.int32)
      sequences.append(Trajectory(tokens, mask, mask, mask))
  batch = pack_rows(sequences, row_tokens=160, row_buckets=(6,), share_prompts=share_prompts)
  shape = preset("nano", vocab_size=64)._replace(experts=Experts(4, 2, 16))

  def outputs(mesh):
    model, critic, judge = (make(shape, mesh=mesh) for make in (make_model, make_critic, make_reward_model))
    params = model.init(jax.random.key(0))
    of_critic, of_judge = critic.from_policy(params), judge.init(jax.random.key(1))
    of_critic["value_head"] = of_judge["value_head"] = jax.random.normal(jax.random.key(2), (shape.d_model,))
    sources = previous_slots(batch.segments, batch.prefixes)

    @jax.jit
    def run(batch):
      logprobs = model.logprobs(params, batch, sources, filter_logits=make_filter(), router_losses=True)
      values = critic_outputs(critic.values, of_critic, batch).values
      return logprobs, values, judge.token_rewards(of_judge, batch.tokens, batch.positions, batch.segments)

    is_real = np.asarray(batch.segments > 0)
    return [np.asarray(x)[is_real] for x in jax.tree.leaves(run(jax.tree.map(jnp.asarray, batch)))]

  batch = jax.tree.map(jnp.asarray, batch)
  expected, actual = outputs(None), outputs(mesh_of(data=2, context=4))
  assert len(actual) == len(expected) == 9
  for x, expected_x in zip(actual, expected, strict=True):
    assert x.std() > 0
    np.testing.assert_allclose(x, expected_x, rtol=1e-4, atol=1e-5)


COLLECTIVES = """
import json, os, sys
from experiments.pod import topology
topology.prepare()
import jax, jax.numpy as jnp
from experiments.pod import hlo
from experiments.pod.compiled import compile_for
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.needs import abstract_batch
from jaxrl_llm.learner.train_step import policy_outputs
from jaxrl_llm.models import make_model, model as model_lib, preset, striping, transformer
from jaxrl_llm.decoding.sampler import make_filter

sizes = dict(num_layers=5, d_model=256, num_heads=2, num_kv_heads=1, head_dim=128, d_ff=512)
shape = preset("nano", vocab_size=256)._replace(**sizes, dtype="bfloat16", remat="full")
chips = topology.describe("v6e:2x4")
mesh = mesh_lib.make_mesh(data=1, fsdp=2, context=4, devices=chips.devices)
batch = abstract_batch(mesh, 2, 4096, shares=True)

def collectives():
  model = make_model(shape, mesh=mesh)
  params = jax.eval_shape(model.init, jax.random.key(0))
  shardings = mesh_lib.param_shardings(mesh, model.logical_axes, params)
  placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  params = jax.tree.map(placed, params, shardings)
  outputs = lambda params, batch: policy_outputs(model.logprobs, make_filter(), params, batch)
  loss = lambda params, batch: outputs(params, batch).logprobs.sum()
  gradient = jax.jit(jax.grad(loss), out_shardings=shardings)
  compiled = compile_for(gradient, (params, batch), mesh, chips, only_planned=True)
  return [(x.kind, x.num_bytes, x.times) for x in hlo.collectives(compiled.text, num_devices=8)]

in_stripes = collectives()
for module in (model_lib, striping, transformer):
  module.stripes_of = lambda length, mesh: None
print(json.dumps([in_stripes, collectives()]))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the package libtpu is not installed")
def test_stripes_cost_a_few_numbers_per_token_and_no_collective_of_a_layer():
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  result = subprocess.run([sys.executable, "-c", COLLECTIVES], cwd=ROOT, env=environment, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  in_stripes, contiguous = json.loads(result.stdout.splitlines()[-1])
  of_layers = lambda collectives: sorted(x for x in collectives if x[2] >= 5)
  assert of_layers(in_stripes) == of_layers(contiguous) != []
  per_pass = lambda collectives: sum(size for _, size, times in collectives if times < 5)
  # Six ids or numbers of 4 bytes for each token of 4,096 before the layers, and two after them.
  assert 0 < per_pass(in_stripes) - per_pass(contiguous) < 12 * 4 * 4096
