"""One update under any split: devices, axes, micro-batches and buckets of rows change nothing."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.train_step import init_state, make_train_step, policy_outputs
from jaxrl_llm.models import Experts, make_model, preset
from jaxrl_llm.objectives.distillation import gkd
from jaxrl_llm.objectives.divergence import comparer
from tests.marks import few

VOCAB, ROWS, ROW_TOKENS = 64, 32, 40
NUM_PROMPTS, GROUP = 8, 4

# Eight devices divide every axis.
_NANO = preset("nano", vocab_size=VOCAB)._replace(num_heads=16, num_kv_heads=8, head_dim=4)
MODELS = {"dense": _NANO, "sparse": _NANO._replace(experts=Experts(num_experts=8, top_k=2, d_ff=16))}

# A student learns from a wider teacher over the whole vocabulary, beside the objective's own loss.
TAUGHT, TEACHER = "taught", _NANO._replace(d_model=48, num_layers=3)

DEVICES, SPLITS, AT_ONCE, LAYOUTS = (2, 4, 8), ("fsdp", "tensor", "expert", "context"), (None, 16, 8), ("packed", "padded", "shared")

# This optimizer stores the gradient unchanged as its state.
GRADIENT = optax.GradientTransformation(
  lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads)
)
OBJECTIVE = objectives.make("gspo", clip_low=0.05, clip_high=0.08, kl_coef=0.1, entropy_coef=0.01)


@functools.cache
def sequences():
  """Makes groups of sequences with a prompt each.

  Their lengths differ on purpose, so that a mean within any part of the batch would be wrong.
  """
  rng, trajectories, refs = np.random.default_rng(5), [], []
  for _ in range(NUM_PROMPTS):
    prompt = rng.integers(1, VOCAB, size=rng.integers(1, 7))
    for _ in range(GROUP):
      response = rng.integers(1, VOCAB, size=rng.integers(1, 20))
      mask = np.concatenate([np.zeros(len(prompt)), np.ones(len(response))]).astype(np.float32)
      if len(response) > 6:
        mask[len(prompt) + 3] = 0  # A token of another speaker inside the response.
      scores = np.float32(-np.log(VOCAB) + 0.3 * rng.standard_normal((2, len(mask)))) * mask
      advantages = np.full(len(mask), rng.standard_normal(), np.float32) * mask
      trajectories.append(
        packing.Trajectory(np.concatenate([prompt, response]).astype(np.int32), mask, advantages, scores[0])
      )
      refs.append(scores[1])
  return trajectories, refs


@functools.cache
def laid_out(layout, bucket=ROWS):
  """Packs the same sequences: many per row, one per row, or each prompt once for its responses."""
  trajectories, refs = sequences()
  if layout == "padded":
    slots = [np.arange(len(x.tokens)) for x in trajectories]
    places = packing.Layout((bucket, ROW_TOKENS), list(range(ROWS)), slots, [(1, 0, 0)] * ROWS, shares=False, held=np.arange(bucket))
  else:
    places = packing.arrange(
      trajectories, row_tokens=ROW_TOKENS, row_buckets=(bucket,), share_prompts=layout == "shared"
    )
  batch = packing.pack(trajectories, places)
  return batch._replace(ref_logprobs=packing.lay(refs, places))


@functools.cache
def weights(shape, seed=0):
  return jax.jit(make_model(shape).init)(jax.random.key(seed))


@functools.lru_cache(maxsize=1)
def built(name, sizes):
  """Builds a model, its state on a mesh, the mesh (None for one device) and any teachers."""
  mesh = mesh_lib.make_mesh(**({"data": 1} | dict(sizes)), devices=jax.devices()[: int(np.prod([n for _, n in sizes]))]) if sizes else None
  shape = MODELS["dense" if name == TAUGHT else name]
  model = make_model(shape, mesh=mesh)
  state, teachers = init_state(weights(shape), GRADIENT), [weights(TEACHER, seed=1)] if name == TAUGHT else []
  if mesh is not None:
    params = mesh_lib.param_shardings(mesh, model.logical_axes, state.params)
    state = jax.device_put(state, mesh_lib.state_shardings(mesh, GRADIENT, state, params))
    axes = make_model(TEACHER).logical_axes
    teachers = [jax.device_put(x, mesh_lib.param_shardings(mesh, axes, x)) for x in teachers]
  return model, state, mesh, teachers


@functools.lru_cache(maxsize=1)  # All programs together would fill a laptop's memory.
def program(name, sizes, rows_at_once):
  """Makes the program of an update, the same for all layouts of one shape."""
  model, _, mesh, _ = built(name, sizes)
  losses = {"balance": 0.1, "z": 0.01} if name == "sparse" else {}
  filter_logits = make_filter(temperature=0.9)
  outputs_fn = functools.partial(policy_outputs, model.logprobs, filter_logits, learns_entropy=True, router_losses=tuple(losses))
  streams = []
  if name == TAUGHT:
    of_teacher = dict(teacher_fn=make_model(TEACHER, mesh=mesh).teacher, comparer=comparer(beta=0.4, temperature=1.2))
    outputs_fn, streams = functools.partial(outputs_fn, **of_teacher), [gkd(0.7)]
  settings = dict(streams=streams, learning_rate=lambda _: 1.0, rows_at_once=rows_at_once, router_coefs=losses)
  return jax.jit(make_train_step(outputs_fn, OBJECTIVE, GRADIENT, **settings))


@functools.cache
def update(name, sizes=(), rows_at_once=None, layout="padded", bucket=ROWS):
  """Runs an update and returns its gradient and metrics."""
  _, state, mesh, teachers = built(name, sizes)
  rows = laid_out(layout, bucket)
  batch = jax.tree.map(jnp.asarray, rows) if mesh is None else mesh_lib.place_tokens(mesh, rows)
  new, metrics = program(name, sizes, rows_at_once)(state, batch, *teachers)
  return jax.device_get((new.opt_state, metrics))


def differences(name, sizes, rows_at_once, layout, bucket=ROWS):
  """Returns the largest relative difference of each metric and each weight's gradient."""
  (expected_grads, expected), (grads, metrics) = update(name), update(name, sizes, rows_at_once, layout, bucket)
  assert metrics.keys() == expected.keys()
  by_name = {
    metric: abs(value - expected[metric]) / max(abs(expected[metric]), 1) for metric, value in metrics.items()
  }
  for metric in ("actor/loss", "actor/grad_norm"):
    by_name[metric] = abs(metrics[metric] - expected[metric]) / abs(expected[metric])
  # Rounding errors of large gradients affect small ones.
  least = 0.01 * expected["actor/grad_norm"]
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
    by_name[jax.tree_util.keystr(path, simple=True, separator="/")] = np.max(np.abs(a - b)) / max(
      np.max(np.abs(b)), least
    )
  return by_name


def check(name, sizes, rows_at_once, layout, bucket=ROWS):
  by_name = differences(name, sizes, rows_at_once, layout, bucket)
  # XLA on CPUs sums the products of very thin matrices, here of two columns per device, row by row.
  limit = 2e-5 if name == "sparse" else 1e-5
  assert not {what: x for what, x in by_name.items() if not x <= limit}


@pytest.mark.slow
def test_the_reference_update_is_worth_comparing():
  for name in MODELS:
    grads, metrics = update(name)
    assert metrics["actor/pg_clipfrac"] > 0 and metrics["actor/ref_kl"] > 0 and metrics["train/skipped"] == 0
    assert all(np.max(np.abs(g)) > 1e-5 for g in jax.tree.leaves(grads))
  assert {"moe/balance_loss", "moe/z_loss"} <= metrics.keys()
  packed, padded, shared = (laid_out(layout) for layout in LAYOUTS)
  slots = [np.count_nonzero(np.any(x.segments, axis=1)) for x in (packed, padded, shared)]
  assert slots[2] < slots[0] < slots[1] == ROWS and packed.prefixes is padded.prefixes is None and np.any(shared.prefixes)


def covering():
  """Yields cases that cover every pair of choices.

  They are a Latin square of axis and devices against rows at a time and layout.
  """
  for (a, axis), (d, devices) in itertools.product(enumerate(SPLITS), enumerate(DEVICES)):
    name = ("dense", "sparse")[(d == 1) ^ a % 2]
    yield name, ((axis, devices),), AT_ONCE[(a + d) % 3], LAYOUTS[(a + 2 * d) % 3]


COVERING = [
  *covering(),
  ("dense", (), 8, "shared"),
  ("sparse", (("expert", 2), ("context", 2), ("tensor", 2)), 16, "shared"),
]
BY_DEFAULT = (0, 12)  # Sharded weights, and micro-batches that share prompts.
FEW = {0, 4, 8, 11, 13}  # Cases that contain each choice at least once, and one with three axes.
FULL = itertools.product(MODELS, [(), *(((axis, n),) for axis in SPLITS for n in DEVICES)], AT_ONCE, LAYOUTS)
REST = [
  *(case for case in FULL if case not in COVERING),
  ("dense", (("fsdp", 2), ("context", 2), ("tensor", 2)), 16, "shared"),
  ("sparse", (("data", 2), ("expert", 2), ("context", 2)), 8, "shared"),
]


def label(case):
  name, sizes, rows_at_once, layout = case
  return "-".join([name, *(f"{axis}{n}" for axis, n in sizes), f"{rows_at_once or 'all'}rows", layout])


def test_every_pair_of_choices_is_covered():
  cases = [(name, *sizes[0], at_once, layout) for name, sizes, at_once, layout in covering()]
  choices = (tuple(MODELS), SPLITS, DEVICES, AT_ONCE, LAYOUTS)
  for i, j in itertools.combinations(range(len(choices)), 2):
    assert {(case[i], case[j]) for case in cases} == set(itertools.product(choices[i], choices[j])), (choices[i], choices[j])


def test_every_choice_is_among_the_few():
  cases = [(name, axis, n, at_once, layout) for name, sizes, at_once, layout in (COVERING[i] for i in FEW) for axis, n in sizes]
  for seen, choices in zip(zip(*cases, strict=True), (tuple(MODELS), SPLITS, DEVICES, AT_ONCE, LAYOUTS), strict=True):
    assert set(seen) == set(choices)


@pytest.mark.parametrize(
  "case", few(map(pytest.param, COVERING), *BY_DEFAULT, rest="slow", by_hand=sorted({*range(len(COVERING))} - FEW)), ids=label
)
def test_no_split_changes_an_update(case):
  check(*case)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("sizes", "rows_at_once", "layout"),
  # On eight devices XLA's pool of eight threads deadlocks now and then: the collectives of student
  # and teacher are independent, and each that waits holds a thread.
  [((), 8, "shared"), ((("context", 2), ("tensor", 2)), 16, "packed")],
  ids=["micro-batches", "four devices"],
)
def test_no_split_changes_an_update_with_a_teacher(sizes, rows_at_once, layout):
  """The teacher's term has weights of its own: a token mean beside a sequence mean."""
  metrics, alone = update(TAUGHT)[1], update("dense")[1]
  terms = metrics["actor/pg_loss"] + metrics["actor/kl_loss"] + metrics["actor/entropy_loss"] + metrics["teacher/gkd_loss"]
  assert metrics["actor/loss"] == pytest.approx(terms, rel=1e-5) and metrics["teacher/gkd_loss"] > 1e-3
  assert metrics["teacher/gkd_loss"] == pytest.approx(0.7 * metrics["teacher/divergence"], rel=1e-5)
  assert all(metrics[name] == pytest.approx(x, rel=1e-5) for name, x in alone.items() if name not in ("actor/loss", "actor/grad_norm"))
  check(TAUGHT, sizes, rows_at_once, layout)


BUCKETS = {16: "shared", 24: "packed", 40: "padded"}
"""Layouts that fit into buckets of two, three and five micro-batches of 8 rows."""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "sizes", "rows_at_once"),
  [("dense", (), 8), pytest.param("dense", (("fsdp", 4),), 8, marks=pytest.mark.exhaustive),
   pytest.param("sparse", (("expert", 2), ("context", 2)), 8, marks=pytest.mark.exhaustive)],
  ids=["one device", "four devices", "experts on four devices"],
)  # fmt: skip
@pytest.mark.parametrize("bucket", few(BUCKETS, 0))
def test_no_bucket_of_rows_changes_an_update(bucket, name, sizes, rows_at_once):
  """The same 8 rows at a time are two, three or five micro-batches."""
  assert len(laid_out(BUCKETS[bucket], bucket).mask) == bucket
  check(name, sizes, rows_at_once, BUCKETS[bucket], bucket)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", REST, ids=label)
def test_no_split_changes_an_update_in_any_combination(case):
  check(*case)
