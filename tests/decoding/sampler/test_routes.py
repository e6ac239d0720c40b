"""Experts that tokens visit during sampling: recorded, and the same as the learner's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.sampler import make_filter, make_sampler, seeded
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.train_step import policy_outputs
from jaxrl_llm.models import Experts, lower_precision, make_model, preset, routing
from jaxrl_llm.rollouts import trajectories
from jaxrl_llm.types import TrainBatch
from tests.batches import pack_rows
from tests.decoding.sampler.nano import PAD, prompts_of, weights_of

CONFIG = preset("nano-moe", vocab_size=264)._replace(num_layers=3, experts=Experts(8, 2, 16, layers=(0, 2)))
STOPS = tuple(range(0, 264, 5))


@functools.cache
def drawn(dtype="float32"):
  """Returns the learner's model and params, rollouts of a sampler in some dtype, and the batch."""
  model, sampling = make_model(CONFIG), make_model(CONFIG._replace(dtype=dtype))
  params = weights_of(model, 0.3)
  sample = make_sampler(sampling, record_routing=True, group_size=2, max_new_tokens=7, stop_ids=STOPS, pad_id=PAD)
  prompts = prompts_of((5, 2, 1, 4), 5)
  rollouts = jax.device_get(jax.jit(sample)(lower_precision(params, dtype), *prompts, seeded(jax.random.key(1), 8)))
  sequences = trajectories.trajectories(rollouts)
  batch = pack_rows(sequences, row_tokens=16, row_buckets=(8,))
  return model, params, rollouts, jax.tree.map(jnp.asarray, batch)


@functools.cache
def learner():
  model, _, _, _ = drawn()
  return jax.jit(functools.partial(policy_outputs, model.logprobs, make_filter()))


def used(outputs, batch: TrainBatch):
  return routing.replayed(batch.routing, outputs.live_routing)


@pytest.mark.slow
def test_every_token_but_the_last_has_its_route():
  _, _, rollouts, _ = drawn()
  assert rollouts.routing.shape == (8, 12, 3, 2) and rollouts.routing.dtype == np.int16
  for row in range(8):
    here = np.concatenate([rollouts.prompt_mask[row], rollouts.mask[row]])
    known = np.all(rollouts.routing[row][:, [0, 2]] >= 0, axis=(1, 2))
    last = np.flatnonzero(here)[-1]
    assert not known[last] and np.array_equal(np.delete(known, last), np.delete(here, last))
  assert np.all(rollouts.routing[:, :, 1] == -1)  # A dense layer has none.
  assert np.unique(rollouts.mask.sum(axis=1)).size > 1  # Otherwise the lengths would test nothing.


def test_packing_keeps_each_route_with_its_token():
  _, _, rollouts, batch = drawn()
  sequences = trajectories.trajectories(rollouts)
  layout = packing.arrange(sequences, row_tokens=16, row_buckets=(8,))
  for sequence, row, slots in zip(sequences, layout.rows, layout.slots, strict=True):
    assert np.array_equal(batch.tokens[row, slots], sequence.tokens) and np.array_equal(batch.routing[row, slots], sequence.routing)
  assert np.all(np.asarray(batch.routing)[np.asarray(batch.segments) == 0] == -1)


@pytest.mark.slow
def test_replaying_the_samplers_routes_makes_the_overlap_exactly_one():
  """With a sampler in bfloat16 some routes differ. With replay none does.

  Only the last tokens fall back to the live router.
  """
  _, params, _, batch = drawn("bfloat16")
  live = learner()(params, batch._replace(routing=None)).live_routing
  assert float(routing.comparison(live, batch.routing, batch.segments)) > 0
  replayed = used(learner()(params, batch), batch)
  assert float(routing.comparison(replayed, batch.routing, batch.segments)) == 0
  metrics = routing.replay_metrics(batch.routing, batch.segments, sparse_layers=(0, 2))
  assert float(metrics["moe/replay_fallback"]) == 0


def test_replaying_the_learners_own_routes_keeps_the_ratio_at_exactly_one():
  _, params, _, batch = drawn()
  live = batch._replace(routing=jnp.full_like(batch.routing, -1))
  old = learner()(params, live)
  replayed = learner()(params, batch._replace(routing=old.live_routing.astype(jnp.int16)))
  assert np.array_equal(old.logprobs, replayed.logprobs)
  assert np.all(np.exp(np.asarray(replayed.logprobs - old.logprobs)) == 1)


def test_routes_are_recorded_only_on_request_and_only_with_experts():
  prompts, settings = jnp.zeros((1, 2), jnp.int32), dict(group_size=1, max_new_tokens=2, stop_ids=(), pad_id=0)
  for config, asked in ((CONFIG, False), (preset("nano", vocab_size=264), True)):
    model = make_model(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    sample = make_sampler(model, record_routing=asked, **settings)
    assert jax.eval_shape(sample, params, prompts, prompts == 0, seeded(jax.random.key(0), 1)).routing is None
