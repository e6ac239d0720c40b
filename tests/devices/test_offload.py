"""Tests of moments in host memory: the same steps and guard, and fewer bytes on the devices."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.offload import check_offload, is_on_host, offloaded
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step
from jaxrl_llm.types import Objective, PolicyOutputs, TrainBatch, TrainState

PARAMS = {"a": jnp.arange(8.0), "b_bias": jnp.ones((8, 2)), "frozen": None, "c": jnp.ones((4, 4)), "d": jnp.full((8,), -2.0)}
LOGICAL = {"a": ("embed",), "b_bias": ("embed", "rank"), "frozen": None, "c": ("layers", "embed"), "d": ("vocab",)}


def optimizer(wrap):
  decayed = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "bias" not in path[-1].key, params)
  adamw = optax.adamw(optax.linear_schedule(1e-1, 0.0, 5), weight_decay=0.1, mask=decayed)
  return optax.with_extra_args_support(optax.chain(optax.clip_by_global_norm(0.5), wrap(adamw)))


def placed(chain):
  """Places a fresh state with moments on the hosts, and returns it with its shardings."""
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  params = mesh_lib.param_shardings(mesh, LOGICAL, PARAMS)
  state = TrainState(PARAMS, chain.init(PARAMS), step=jnp.int32(0), skipped=jnp.int32(0))
  shardings = mesh_lib.state_shardings(mesh, chain, state, params, offload=True)
  return jax.device_put(state, shardings), shardings


def step_of(chain, shardings=None):
  def step(state, finite):
    grads = jax.tree.map(lambda x: jnp.sin(x) + 0.1 * state.step, state.params)
    updates, opt_state = chain.update(grads, state.opt_state, state.params, finite=finite)
    return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1, state.skipped)

  return jax.jit(step, donate_argnums=0, out_shardings=shardings)


def test_the_same_steps_follow_and_moments_stay_on_the_hosts():
  plain, chain = optimizer(lambda x: x), optimizer(offloaded)
  expected = jax.tree.map(jnp.copy, TrainState(PARAMS, plain.init(PARAMS), step=jnp.int32(0), skipped=jnp.int32(0)))
  state, shardings = placed(chain)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
  assert kinds == {"pinned_host"} and not any(map(is_on_host, jax.tree.leaves(state.params)))
  for _ in range(3):
    state, expected = step_of(chain, shardings)(state, True), step_of(plain)(expected, True)
  chex.assert_trees_all_close(state, expected, rtol=1e-6)
  assert jax.tree.map(lambda x: x.sharding, state.opt_state) == shardings.opt_state
  assert sum(map(is_on_host, jax.tree.leaves(state.opt_state))) == 2 * 4


def test_an_update_that_is_not_finite_leaves_the_state_as_it_was():
  chain = optimizer(offloaded)
  state, shardings = placed(chain)
  state = step_of(chain, shardings)(state, True)
  before = jax.device_get(state.opt_state)
  after = jax.device_get(step_of(chain, shardings)(state, False).opt_state)
  chex.assert_trees_all_equal(after, before)


def test_a_tensor_waits_until_the_one_two_before_it_is_back():
  chain = optimizer(offloaded)
  state, _ = placed(chain)
  traced = jax.make_jaxpr(step_of(chain))(state, True)
  # There are four tensors, and two may be on the devices at once.
  assert str(traced).count("optimization_barrier") == 2
  # The update itself sends them back, not only the program's output shardings.
  assert sum(x.memory_space == jax.memory.Space.Host for x in traced.out_avals) == 2 * 4


def test_a_train_step_keeps_its_moments_on_the_hosts():
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  settings = dict(learning_rate=0.1, warmup_steps=1, weight_decay=0.1, b1=0.9, b2=0.99, max_grad_norm=1.0)
  outputs_fn = lambda params, batch: PolicyOutputs(batch.advantages * (jnp.sum(params["a"]) + jnp.sum(params["c"] ** 2)))
  objective = Objective(weigh=lambda mask, segments: mask, token_loss=lambda outputs, batch: (outputs.logprobs, {}))
  params = {name: PARAMS[name] for name in ("a", "c", "d")}
  ones, states = jnp.ones((4, 2)), {}
  for offload in (False, True):
    optimizer, schedule = make_optimizer(**settings, offload=offload)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer)
    of_params = mesh_lib.param_shardings(mesh, {name: LOGICAL[name] for name in params}, params)
    shardings = mesh_lib.state_shardings(mesh, optimizer, state, of_params, offload=offload)
    step = make_train_step(outputs_fn, objective, optimizer, learning_rate=schedule)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, mesh_lib.replicated(mesh)))
    state = jax.device_put(state, shardings)
    for advantage in (1.0, jnp.nan, -1.0):  # The second update is refused.
      ids = jnp.zeros((4, 2), jnp.int32)
      state, _ = step(state, TrainBatch(ids, ids, ids, ones, advantage * ones, ones))
    states[offload] = state
  assert int(states[True].skipped) == 1 and sum(map(is_on_host, jax.tree.leaves(states[True].opt_state))) == 2 * 3
  chex.assert_trees_all_close(states[True], states[False], rtol=1e-6)


def test_offloading_on_cpu_is_refused():
  check_offload("tpu")
  with pytest.raises(ValueError, match="config.learner.offload_optimizer: found True on cpu, .*expected False"):
    check_offload("cpu")
