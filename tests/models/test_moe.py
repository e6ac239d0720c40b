"""Tests of mixtures of experts: dispatch, router, replayed routes, and sharded experts."""

import functools
import itertools

import chex
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.kernels.grouped import grouped_matmul_for
from jaxrl_llm.models import Experts, make_model, preset
from jaxrl_llm.models.copies import sums_by_blocks, sums_by_product, sums_for
from jaxrl_llm.models.experts import Weights, dispatch, masked
from jaxrl_llm.models.moe import balance_loss, over_mesh, route, z_loss
from tests.kernels.test_grouped_tpu import by_a_loop
from tests.marks import few

SPARSE = preset("nano-moe", vocab_size=264)
MIXED = SPARSE._replace(num_layers=3, experts=Experts(8, 2, 16, norm_top_k=False, layers=(1,)))


def draw_layer(rng, *, num_tokens=13, num_experts=5, top_k=2, width=6, hidden=4):
  x = jnp.asarray(rng.standard_normal((num_tokens, width)), jnp.float32)
  shapes = [(num_experts, width, hidden), (num_experts, width, hidden), (num_experts, hidden, width)]
  weights = Weights(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes))
  # Expert 1 is never visited, and expert 0 by half of all copies, so loads are never even.
  likely = np.array([0.5, 0.0, 0.2, 0.2, 0.1, *[0.0] * (num_experts - 5)])
  experts = jnp.asarray(np.stack([rng.choice(num_experts, top_k, replace=False, p=likely) for _ in range(num_tokens)]), jnp.int32)
  gates = jnp.asarray(rng.uniform(size=(num_tokens, top_k)), jnp.float32)
  return x, gates, experts, weights


@functools.cache
def build(name):
  """Makes a model, params in which every expert differs, and a batch of packed rows."""
  model = make_model({"sparse": SPARSE, "mixed": MIXED}[name])
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  params = jax.tree.map(lambda p: jnp.asarray(0.3 * rng.standard_normal(p.shape), jnp.float32), shapes)
  tokens = jnp.asarray(rng.integers(264, size=(8, 10)), jnp.int32)
  positions = jnp.tile(jnp.array([0, 1, 2, 3, 0, 1, 2, 3, 4, 0], jnp.int32), (8, 1))
  segments = jnp.tile(jnp.array([1, 1, 1, 1, 2, 2, 2, 2, 2, 0], jnp.int32), (8, 1))
  return model, params, (tokens, positions, segments), jax.jit(model.forward)


def dense_oracle(x, gates, experts, weights):
  """Computes `dispatch` without adapters, by running every expert on every token."""
  hidden = jax.nn.silu(jnp.einsum("nd,edf->enf", x, weights.gate)) * jnp.einsum("nd,edf->enf", x, weights.up)
  every = jnp.einsum("enf,efd->end", hidden, weights.down)
  mixture = jnp.sum(jax.nn.one_hot(experts, weights.gate.shape[0]) * gates[..., None], axis=1)
  return jnp.einsum("end,ne->nd", every, mixture)


@pytest.mark.parametrize("platform", few(["cpu", "gpu", "tpu"], 0, 2))
def test_dispatch_matches_every_expert_on_every_token(rng, platform):
  x, gates, experts, weights = draw_layer(rng)
  grouped = functools.partial(dispatch, product=grouped_matmul_for(platform, dense_bytes=0, interpret=True))
  np.testing.assert_allclose(grouped(x, gates, experts, weights), dense_oracle(x, gates, experts, weights), atol=1e-5)
  loss = lambda f: lambda x, gates, weights: jnp.sum(jnp.sin(f(x, gates, experts, weights)))
  ours, theirs = (jax.jit(jax.grad(loss(f), argnums=(0, 1, 2)))(x, gates, weights) for f in (grouped, dense_oracle))
  chex.assert_trees_all_close(ours, theirs, rtol=1e-7, atol=2e-5)


@pytest.mark.slow
@given(sizes=st.lists(st.sampled_from([0, 0, 1, 7, 8, 9, 40]), min_size=1, max_size=4), rest=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=4)
def test_groups_are_multiplied_by_their_own_matrices(sizes, rest, seed):
  """Groups may be empty or end inside a tile; rows after the last group have cotangents of 0."""
  rng, num_grouped = np.random.default_rng(seed), sum(sizes)
  shapes = ((num_grouped + rest, 3), (len(sizes), 3, 5), (num_grouped + rest, 5))
  rows, matrices, ct = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
  ct = ct.at[num_grouped:].set(0)
  products, vjp = jax.vjp(lambda *x: grouped_matmul_for("cpu")(*x, jnp.asarray(sizes, jnp.int32)), rows, matrices)
  of_rows, of_matrices = vjp(ct)
  ours = (products[:num_grouped], of_rows[:num_grouped], of_matrices)
  for x, expected, atol in zip(ours, by_a_loop(rows, matrices, ct, sizes), (1e-5, 1e-5, 1e-4), strict=True):
    np.testing.assert_allclose(x, expected, atol=atol)
  np.testing.assert_array_equal(of_rows[num_grouped:], 0)


def test_experts_on_several_devices_add_up(rng):
  x, gates, experts, weights = draw_layer(rng, num_experts=5)
  part = lambda first, last: dispatch(x, gates, experts, Weights(*(w[first:last] for w in weights[:3])), first=first)
  np.testing.assert_allclose(part(0, 2) + part(2, 3) + part(3, 5), dispatch(x, gates, experts, weights), atol=1e-5)


def test_normalised_gates_sum_to_one_for_any_routes(rng):
  logits = jnp.asarray(rng.standard_normal((20, 6)), jnp.float32)
  replay = jnp.asarray(np.stack([rng.permutation(6)[:3] for _ in range(20)]), jnp.int32)
  for routes in (None, replay):
    gates, experts, _ = route(logits, routes, top_k=3, norm_top_k=True)
    assert jnp.all(gates >= 0)
    np.testing.assert_allclose(jnp.sum(gates, axis=-1), 1, atol=1e-6)
    picked = jnp.take_along_axis(logits, experts, axis=-1)
    np.testing.assert_allclose(gates, jnp.exp(picked) / jnp.sum(jnp.exp(picked), axis=-1, keepdims=True), atol=1e-6)


def test_gates_without_normalisation_are_probabilities_over_all_experts(rng):
  logits = jnp.asarray(rng.standard_normal((20, 6)), jnp.float32)
  gates, experts, _ = route(logits, None, top_k=3, norm_top_k=False)
  np.testing.assert_allclose(gates, jnp.take_along_axis(jax.nn.softmax(logits), experts, axis=-1), atol=1e-6)
  assert jnp.all(jnp.sum(gates, axis=-1) < 1)


def test_replaying_the_live_choice_changes_no_bit(rng):
  logits = jnp.asarray(rng.standard_normal((20, 6)), jnp.float32)
  gates, experts, live = route(logits, None, top_k=2, norm_top_k=True)
  again = route(logits, experts, top_k=2, norm_top_k=True)
  assert np.array_equal(gates, again[0]) and np.array_equal(experts, again[1]) and np.array_equal(live, again[2])


def test_a_route_with_a_gap_is_routed_live(rng):
  logits = jnp.array([[3.0, 2.0, 1.0, 0.0]])
  _, experts, live = route(logits, jnp.array([[3, -1]]), top_k=2, norm_top_k=True)
  assert experts.tolist() == live.tolist() == [[0, 1]]
  _, experts, live = route(logits, jnp.array([[3, 2]]), top_k=2, norm_top_k=True)
  assert experts.tolist() == [[3, 2]] and live.tolist() == [[0, 1]]


@pytest.mark.parametrize("replay", [None, [[4, 1]]])
def test_the_router_learns_only_through_the_gates_of_visited_experts(replay):
  logits = jnp.array([[0.5, 2.0, 1.0, -1.0, 0.3]])
  replay = None if replay is None else jnp.array(replay)
  jacobian = jax.jacobian(lambda z: route(z, replay, top_k=2, norm_top_k=True)[0])(logits)[0, :, 0]
  visited = [1, 2] if replay is None else [1, 4]
  others = [e for e in range(5) if e not in visited]
  assert np.all(np.abs(jacobian[:, visited]) > 0.05) and np.all(jacobian[:, others] == 0)


@pytest.mark.parametrize("name", few(["sparse", "mixed"], 1))
def test_replaying_the_models_own_routes_changes_no_bit(name):
  model, params, rows, forward = build(name)
  out = forward(params, *rows)
  assert out.routing.shape == (8, 10, model.config.num_layers, 2)
  sparse = list(model.config.sparse_layers)
  dense = list(model.config.dense_layers)
  assert np.all(out.routing[:, :, sparse] >= 0) and np.all(out.routing[:, :, dense] == -1)
  again = forward(params, *rows, out.routing)
  assert np.array_equal(out.logits, again.logits) and np.array_equal(out.routing, again.routing)
  other = forward(params, *rows, jnp.where(out.routing < 0, -1, (out.routing + 3) % 8))
  assert not np.allclose(out.logits, other.logits, atol=1e-2)
  assert np.array_equal(other.routing[:, :, sparse], (out.routing[:, :, sparse] + 3) % 8)


@pytest.mark.exhaustive
def test_gradients_of_replayed_routes_with_and_without_rematerialisation():
  """Replaying the model's own routes gives the ordinary gradient.

  The second forward pass of a rematerialised gradient must replay as well.
  """
  model, params, rows, forward = build("sparse")
  own = forward(params, *rows).routing
  grad_of = lambda m: jax.jit(jax.grad(lambda p, routing: jnp.mean(jnp.sin(m.forward(p, *rows, routing).logits))))
  same = lambda a, b: all(np.allclose(x, y, atol=1e-6) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
  plain, frugal = grad_of(model), grad_of(make_model(model.config._replace(remat="full")))
  live = jax.jit(jax.grad(lambda p: jnp.mean(jnp.sin(model.forward(p, *rows).logits))))(params)
  other = (own + 3) % 8
  assert same(plain(params, own), live) and same(plain(params, other), frugal(params, other))
  assert not same(plain(params, other), live)


def test_log_probabilities_jump_at_a_routing_tie_unless_routes_are_replayed():
  """A shrinking step of the router across a tie changes ever less with replay, but not without."""
  _, params, rows, forward = build("sparse")
  base = params["sparse_layers"]["mlp"]["router"]
  turned = lambda angle: params | {"sparse_layers": params["sparse_layers"] | {"mlp": params["sparse_layers"]["mlp"] | {"router": angle}}}
  direction = jnp.asarray(np.random.default_rng(3).standard_normal(base.shape), jnp.float32)
  at = lambda t, routing=None: forward(turned(base + t * direction), *rows, routing)
  low, high, start = 0.0, 1.0, at(0.0)
  assert not np.array_equal(start.routing, at(high).routing)
  for _ in range(22):  # Bisection towards a place where the routes begin to differ from the start.
    middle = (low + high) / 2
    low, high = (middle, high) if np.array_equal(at(middle).routing, start.routing) else (low, middle)
  # Between `low` and `high`, 2e-7 apart, a route changes.
  changes = [
    float(jnp.max(jnp.abs(at(high, routing).logits - at(low, routing).logits))) for routing in (None, start.routing)
  ]
  assert changes[1] < 1e-3 < 1e-2 < changes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes",
  [
    {"fsdp": 2, "expert": 2, "tensor": 2},
    pytest.param({"expert": 4, "tensor": 2}, marks=pytest.mark.exhaustive),
    pytest.param({"data": 8}, marks=pytest.mark.exhaustive),
  ],
  ids=str,
)
def test_a_mesh_changes_nothing(sizes):
  model, params, rows, _ = build("mixed")
  mesh = mesh_lib.make_mesh(**({"data": 1} | sizes))
  spread = make_model(model.config, mesh=mesh)
  placed = jax.device_put(params, mesh_lib.param_shardings(mesh, spread.logical_axes, params))
  placed_rows = mesh_lib.place_rows(mesh, rows)
  loss = lambda m: lambda p, *rows: (jnp.mean(jnp.sin((out := m.forward(p, *rows)).logits)), out)
  (_, out), grads = jax.jit(jax.value_and_grad(loss(spread), has_aux=True))(placed, *placed_rows)
  (_, expected), expected_grads = jax.jit(jax.value_and_grad(loss(model), has_aux=True))(params, *rows)
  np.testing.assert_allclose(out.logits, expected.logits, atol=1e-4)
  assert np.array_equal(out.routing, expected.routing)
  chex.assert_trees_all_close(grads, expected_grads, rtol=1e-7, atol=1e-6)


def test_rows_that_a_mesh_does_not_divide_are_replicated():
  model, params, rows, forward = build("mixed")
  mesh = mesh_lib.make_mesh(data=2, expert=2, tensor=2)
  spread = make_model(model.config, mesh=mesh)
  placed = jax.device_put(params, mesh_lib.param_shardings(mesh, spread.logical_axes, params))
  one = [x[:1] for x in rows]
  np.testing.assert_allclose(jax.jit(spread.forward)(placed, *one).logits, forward(params, *rows).logits[:1], atol=1e-4)


# The mesh divides the first shape; it does not divide the rows of the second or the slots of the
# third.
@pytest.mark.parametrize(
  "shape", [pytest.param((4, 6), marks=pytest.mark.slow), (3, 6), pytest.param((4, 5), marks=pytest.mark.slow)], ids=str
)
def test_slots_may_be_sharded(shape, rng):
  mesh = mesh_lib.make_mesh(data=1, expert=2, context=2, tensor=2)
  *tokens, weights = draw_layer(rng, num_tokens=shape[0] * shape[1], num_experts=6)
  x, gates, experts = (a.reshape(*shape, -1) for a in tokens)
  spread = lambda x, gates, weights: over_mesh(x, gates, experts, weights, mesh=mesh, scale=1.0)
  flat = lambda x, gates, weights: over_mesh(x, gates, experts, weights, mesh=None, scale=1.0)
  loss = lambda f: lambda *args: (jnp.sum(jnp.sin(y := f(*args))), y)
  (_, y), grads = jax.jit(jax.value_and_grad(loss(spread), argnums=(0, 1, 2), has_aux=True))(x, gates, weights)
  (_, expected), expected_grads = jax.jit(jax.value_and_grad(loss(flat), argnums=(0, 1, 2), has_aux=True))(x, gates, weights)
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
  chex.assert_trees_all_close(grads, expected_grads, rtol=1e-4, atol=1e-4)


def test_the_balance_loss_matches_a_loop_over_tokens_and_experts(rng):
  logits = jnp.asarray(rng.standard_normal((2, 7, 4)), jnp.float32)
  _, experts = jax.lax.top_k(logits, 2)
  segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
  probs, chosen, where, expected = np.asarray(jax.nn.softmax(logits)), np.asarray(experts), np.asarray(segments), np.zeros((2, 7))
  for b in range(2):
    for t in range(7):
      same = [u for u in range(7) if where[b, u] == where[b, t]]
      for e in range(4):
        share = sum(int(e in chosen[b, u]) for u in same) / len(same)
        expected[b, t] += 4 / 2 * share * probs[b, t, e]
  np.testing.assert_allclose(balance_loss(logits, experts, segments), expected, rtol=1e-5)
  even = jnp.tile(jnp.array([[1.0, 1, 0, 0], [0, 0, 1, 1]]), (1, 2, 1)) * 1e-6
  np.testing.assert_allclose(balance_loss(even, jax.lax.top_k(even, 2)[1], jnp.ones((1, 4), jnp.int32)), 1, atol=1e-5)


def test_the_z_loss_pulls_the_log_partition_to_zero():
  assert float(z_loss(jnp.log(jnp.full((1, 1, 4), 0.25)))[0, 0]) == pytest.approx(0, abs=1e-12)
  assert float(z_loss(jnp.zeros((1, 1, 4)))[0, 0]) == pytest.approx(np.log(4) ** 2, rel=1e-5)


def test_router_losses_of_a_model_are_means_over_its_sparse_layers():
  model, params, rows, _ = build("mixed")
  out = jax.jit(functools.partial(model.forward, router_losses=True))(params, *rows)
  assert out.balance_loss.shape == out.z_loss.shape == (8, 10) and np.all(out.z_loss > 0)
  assert np.all(out.balance_loss[np.asarray(rows[2]) > 0] > 0)
  assert jax.eval_shape(model.forward, params, *rows).balance_loss is None


def test_the_router_is_float32_in_a_half_precision_model():
  model = make_model(SPARSE._replace(dtype="bfloat16", param_dtype="bfloat16"))
  mlp = jax.eval_shape(model.init, jax.random.key(0))["sparse_layers"]["mlp"]
  assert mlp["router"].dtype == jnp.float32 and mlp["gate"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ("experts", "message"),
  [
    (Experts(4, 5, 8), "experts.top_k=5 must be from 1 to experts.num_experts=4"),
    (Experts(4, 2, 8, layers=(2,)), r"experts.layers=\(2,\) must be one or more of the layers 0 to 1"),
    (Experts(4, 2, 8, layers=()), r"experts.layers=\(\) must be one or more of the layers"),
  ],
)
def test_experts_that_do_not_fit_are_refused(experts, message):
  with pytest.raises(ValueError, match=message):
    make_model(SPARSE._replace(experts=experts))


def test_experts_that_the_mesh_does_not_divide_are_refused():
  mesh = mesh_lib.make_mesh(data=1, expert=8)
  model = make_model(SPARSE._replace(experts=Experts(4, 2, 32)), mesh=mesh)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  with pytest.raises(ValueError, match="mesh.expert=8 does not divide axis 'expert' of sparse_layers/mlp/down, which has size 4"):
    mesh_lib.param_shardings(mesh, model.logical_axes, shapes)


@pytest.mark.parametrize("first", few([0, 4, 12], 0))
@pytest.mark.parametrize("adapted", few([False, True], 1))
def test_decoding_adds_up_the_same_experts_without_copying_each_token(first, adapted):
  for crowded in (False, True):
    x, gates, weights, visited = draw_copies(crowded=crowded, adapted=adapted, first=first, num_tokens=600)
    local = jax.tree.map(lambda x: x[first : first + 4], weights)
    expected = dispatch(x, gates, visited, local, first=first, scale=0.5)
    np.testing.assert_allclose(masked(x, gates, visited, local, first=first, scale=0.5), expected, atol=2e-6)
    np.testing.assert_allclose(dispatch(x, gates, visited, local, num_experts=16, first=first, scale=0.5), expected, atol=2e-6)


def test_the_usual_number_of_copies_is_bounded():
  """The branch that is usually taken has no array with a row for each of the N·K copies."""
  x, gates, experts = jnp.ones((1024, 8)), jnp.ones((1024, 8)) / 8, jnp.zeros((1024, 8), jnp.int32)
  weights = Weights(jnp.ones((2, 8, 4)), jnp.ones((2, 8, 4)), jnp.ones((2, 4, 8)))
  sums = functools.partial(sums_by_blocks, interpret=True)
  layer = lambda x, gates, weights: dispatch(x, gates, experts, weights, num_experts=64, sums=sums)
  gradient = lambda *args: jax.vjp(layer, *args)[1](x)
  rows = lambda branch: max(x.aval.shape[0] for eqn in branch.eqns for x in eqn.outvars if x.aval.ndim == 2 and x.aval.shape[1] == 8)
  forward, backward = (conditionals(jax.make_jaxpr(f)(x, gates, weights).jaxpr) for f in (layer, gradient))
  assert len(forward) == 1 and len(backward) == 2
  for full, some in forward + backward:
    assert rows(some) == 1024 and rows(full) == 8 * 1024


def conditionals(jaxpr):
  """Returns the branches of all conditionals of a program, outside of branches."""
  branches = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "cond":
      branches.append(eqn.params["branches"])
    else:
      for inner in jax.extend.core.jaxprs_in_params(eqn.params):
        branches += conditionals(inner)
  return branches


def draw_copies(*, crowded, adapted=False, first=8, num_tokens=150, top_k=4):
  """Draws a layer of 16 experts, of which a device holds the four from `first` on."""
  rng = np.random.default_rng(first)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)
  wide, tall = (draw(16, 8, 2), draw(16, 2, 12)), (draw(16, 12, 2), draw(16, 2, 8))
  loras = (wide, wide, tall) if adapted else (None, None, None)
  weights = Weights(draw(16, 8, 12), draw(16, 8, 12), draw(16, 12, 8), *loras)
  x, (gates, experts, _) = draw(num_tokens, 8), route(3 * draw(num_tokens, 16), None, top_k=top_k, norm_top_k=True)
  # All on these experts: more copies than there is usually room for.
  experts = jnp.broadcast_to(first + jnp.arange(top_k), experts.shape) if crowded else experts
  return x, gates, weights, experts


# How copies are added up, whether they exceed the room, and whether there are adapters.
ROOM = list(itertools.product(("cpu", "tpu", "product"), (False, True), (False, True)))
FEW = {("cpu", False, True), ("tpu", True, False), ("product", True, True)}


@pytest.mark.parametrize(
  ("sums", "crowded", "adapted"), few([pytest.param(*case, marks=() if case in FEW else pytest.mark.exhaustive) for case in ROOM], 5)
)
def test_gradients_with_room_for_some_copies_equal_those_of_all(sums, crowded, adapted):
  x, gates, weights, experts = draw_copies(crowded=crowded, adapted=adapted)
  sums = sums_by_product if sums == "product" else sums_for(sums, interpret=True)

  def gradients(**options):
    local = lambda weights: jax.tree.map(lambda w: w[8:12], weights)
    loss = lambda x, gates, weights: jnp.sum(jnp.sin(dispatch(x, gates, experts, local(weights), first=8, scale=0.5, **options)))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, gates, weights)

  product = grouped_matmul_for("cpu")
  ours = gradients(num_experts=16, sums=sums, product=product)
  chex.assert_trees_all_close(ours, gradients(product=product), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("crowded", few([False, True], 1))
def test_a_mesh_of_experts_has_the_gradients_of_every_expert_on_every_token(crowded):
  """With all tokens on four of 16 experts, one set of devices computes all copies."""
  x, gates, weights, experts = draw_copies(crowded=crowded, num_tokens=8 * 16)
  mesh = mesh_lib.make_mesh(data=1, fsdp=2, expert=4)
  rows = [a.reshape(8, 16, -1) for a in (x, gates, experts)]
  layer = lambda x, gates, weights: over_mesh(x, gates, rows[2], weights, mesh=mesh, scale=1.0).reshape(-1, 8)
  loss = lambda function: lambda *args: jnp.sum(jnp.sin(function(*args)))
  y, (of_x, of_gates, of_weights) = jax.jit(jax.value_and_grad(loss(layer), argnums=(0, 1, 2)))(*rows[:2], weights)
  oracle = lambda x, gates, weights: dense_oracle(x, gates, experts, weights)
  expected = jax.jit(jax.value_and_grad(loss(oracle), argnums=(0, 1, 2)))(x, gates, weights)
  ours = (y, (of_x.reshape(x.shape), of_gates.reshape(gates.shape), of_weights))
  chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=2e-5)

