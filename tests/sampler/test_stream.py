"""Sequences as they finish: together those of the sampler, early, abortable, with busy devices."""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.compiling import CompileCounter
from jaxrl_llm.models import Experts, make_model, preset
from jaxrl_llm.sampler import Requests, collect_finished, make_sampler, make_stream, to_partial
from jaxrl_llm.sampler import stream as stream_lib
from jaxrl_llm.types import StopReason
from tests.marks import few

PAD, GROUP, BUDGET, WIDTH = 256, 4, 12, 6
STOPS = tuple(range(0, 264, 12))
LENGTHS = (6, 3, 1, 4, 2, 6, 5, 3)
N = len(LENGTHS) * GROUP
CONFIGS = {
  "dense": preset("nano", vocab_size=264),
  "moe": preset("nano-moe", vocab_size=264)._replace(experts=Experts(8, 2, 16, layers=(1,))),
}
SETTINGS = {"group_size": GROUP, "max_new_tokens": BUDGET, "stop_ids": STOPS, "pad_id": PAD}
# Most tests share these settings, so that they compile once: a growing cache, and fewer rows than
# sequences.
GROWING = {"slots": 8, "cache_blocks": (4, 8)}


class Chain(NamedTuple):
  """The part of `models.Model` that the sampler calls; its logits are a token's row of a table."""

  prefill: Callable = lambda table, tokens, mask, dtype: (jnp.zeros(()), None)
  decode: Callable = lambda table, tokens, positions, cache, **_: (table[tokens], cache + 1, None)
  config: SimpleNamespace = SimpleNamespace(dtype="float32", experts=None)
  mesh: None = None
  grow: Callable = lambda cache, *_, **__: cache
  resume: Callable = lambda table, tokens, mask, cache: cache
  map_prompts: Callable = lambda function, cache: cache
  decoding_weights: Callable = lambda table: table


@functools.cache
def built(kind="dense"):
  rng = np.random.default_rng(0)
  if kind == "chain":
    return Chain(), jnp.asarray(rng.standard_normal((264, 264)), jnp.float32)
  model = make_model(CONFIGS[kind])
  scale = lambda path, p: jnp.asarray((path[-1].key == "scale") + 0.2 * rng.standard_normal(p.shape), jnp.float32)
  return model, jax.tree_util.tree_map_with_path(scale, jax.eval_shape(model.init, jax.random.key(0)))


def prompts_of(lengths=LENGTHS, width=WIDTH, seed=1):
  rng = np.random.default_rng(seed)
  prompts, mask = np.full((len(lengths), width), PAD, np.int32), np.zeros((len(lengths), width), bool)
  for row, length in enumerate(lengths):
    prompts[row, width - length :], mask[row, width - length :] = rng.integers(256, size=length), True
  return prompts, mask


def asked(**changes):
  """Makes requests of one structure, so that all of them share their programs."""
  plain = Requests(limits=np.full(N, BUDGET, np.int32), max_steps=np.int32(1000), enough_groups=np.int32(1000))
  return plain._replace(**{name: x if name == "partial" else np.asarray(x, np.int32) for name, x in changes.items()})


@functools.cache
def sampler_of(kind="dense", **settings):
  return jax.jit(make_sampler(built(kind)[0], **SETTINGS | settings))


@functools.cache
def stream_of(kind="dense", steps=4, **settings):
  model, params = built(kind)
  shapes = lambda width: (params, *prompts_of([1] * len(LENGTHS), width), jax.random.key(0), asked())
  abstract = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes(width)) for width in (6, 3)]
  return make_stream(model, steps_per_report=steps, **SETTINGS | settings, signatures=abstract if kind == "chain" else ())


def sampled(kind="dense", requests=None, seed=0, **settings):
  requests = requests or (asked() if kind == "chain" else Requests())
  return jax.device_get(sampler_of(kind, **settings)(built(kind)[1], *prompts_of(), jax.random.key(seed), requests))


def streamed(kind="dense", requests=None, seed=0, steps=4, unwanted=tuple, **settings):
  requests = requests or (asked() if kind == "chain" else Requests())
  stream = stream_of(kind, steps, **settings)
  return stream(built(kind)[1], *prompts_of(), jax.random.key(seed), requests, unwanted=unwanted)


def are_equal(actual, expected, rows=slice(None)):
  for name, x in expected._asdict().items():
    y = getattr(actual, name)
    assert (x is None) == (y is None), name
    if x is not None:
      assert isinstance(y, np.ndarray) and y.dtype == x.dtype and y.shape == x.shape, name
      np.testing.assert_allclose(y[rows], x[rows], rtol=0, atol=1e-5 if x.dtype == np.float32 else 0, err_msg=name)


@pytest.mark.parametrize(
  ("kind", "steps", "settings"),
  few([
    ("dense", 1, {}),
    ("dense", 4, GROWING),
    ("moe", 100, {"slots": 5, "record_routing": True, "temperature": 0.7, "top_k": 30, "entropy": True}),
  ], 1, by_hand=(0,)),
)
def test_all_sequences_together_are_those_of_the_sampler(kind, steps, settings):
  reports = list(streamed(kind, steps=steps, **settings))
  whole = sampled(kind, **(settings or GROWING))
  are_equal(collect_finished(reports), whole)
  are_equal(collect_finished(reversed(reports)), whole)
  assert sorted(itertools.chain(*(x.sequences.tolist() for x in reports))) == list(range(N))
  reported = [x.steps for x in reports]
  assert reported == sorted(set(reported)) and len(reports) > 1
  # With a row per sequence and a report per step, each sequence arrives with its last token.
  if not settings:
    assert all(x.rollouts.mask.sum(axis=1).tolist() == [x.steps] * len(x.sequences) for x in reports)


@pytest.mark.slow
def test_eight_devices_yield_the_same_sequences_as_one():
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  model = make_model(CONFIGS["dense"], mesh=mesh)
  params = jax.device_put(built()[1], mesh_lib.param_shardings(mesh, model.logical_axes, built()[1]))
  stream = make_stream(model, steps_per_report=4, **SETTINGS, **GROWING)
  are_equal(collect_finished(stream(params, *prompts_of(), jax.random.key(0))), sampled(**GROWING))
  compiled = CompileCounter()
  placed = mesh_lib.place_rows(mesh, prompts_of())
  are_equal(collect_finished(stream(params, *placed, jax.random.key(0))), sampled(**GROWING))
  # The source of the prompts does not matter, and every stretch keeps its arrays' shardings.
  assert compiled.count == 0


class Queue:
  """Simulation of the sampler's rows and queue, which counts steps and draws nothing."""

  def __init__(self, lengths, rows):
    self.lengths, self.waiting, self.rows, self.drawn = lengths, list(range(rows, N)), list(range(rows)), [0] * N

  def abort(self, unwanted):
    self.waiting = [i for i in self.waiting if i not in unwanted]
    self.free(lambda i: i in unwanted)

  def free(self, is_done):
    self.rows = [self.waiting.pop(0) if is_done(i) and self.waiting else i for i in self.rows]
    self.rows = [i for i in self.rows if not is_done(i)]

  def step(self):
    for i in self.rows:
      self.drawn[i] += 1
    self.free(lambda i: self.drawn[i] == self.lengths[i])


@pytest.mark.parametrize("unwanted", [set(range(N - 4)), set(range(20, N - 4)), set(range(8)), set(range(N))])
def test_unwanted_sequences_end_and_their_rows_are_refilled(unwanted):
  """After 8 steps with 8 rows, these are unwanted, in order of the cases.

  All running and most waiting sequences; some that wait before others; some running ones; all.
  """
  whole = sampled(**GROWING)
  # The second stretch is dispatched before it is known to have no room.
  answers = itertools.chain([()] * 3, itertools.repeat(unwanted))
  reports = list(streamed(**GROWING, unwanted=lambda: next(answers)))
  queue, steps = Queue(whole.mask.sum(axis=1), 8), 0
  while queue.rows:
    if steps == 8:
      assert queue.rows and queue.waiting[-4:] == [N - 4, N - 3, N - 2, N - 1] and len(queue.waiting) > 8
      queue.abort({i for i in unwanted if queue.drawn[i] < queue.lengths[i]})
    if queue.rows:
      queue.step()
      steps += 1
  rollouts, lengths = collect_finished(reports), np.array(queue.drawn)
  assert reports[-1].steps == steps and np.array_equal(rollouts.mask.sum(axis=1), lengths)
  assert 0 in lengths or unwanted == set(range(8))
  cut = lengths < queue.lengths
  assert set(np.flatnonzero(cut)) <= unwanted and cut.any()
  assert np.all(rollouts.reasons[cut] == StopReason.ABORTED) and not np.any(rollouts.stopped[cut])
  np.testing.assert_array_equal(rollouts.tokens, np.where(rollouts.mask, whole.tokens, PAD))
  np.testing.assert_allclose(rollouts.logprobs, np.where(rollouts.mask, whole.logprobs, 0), atol=1e-5)
  are_equal(rollouts, whole, rows=~cut)


def test_rows_of_one_sequence_each_end_on_demand():
  answers = itertools.chain([(), range(0, N, 2)], itertools.repeat(()))  # One answer is enough.
  rollouts, whole = collect_finished(streamed(steps=1, unwanted=lambda: next(answers))), sampled(**GROWING)
  even = np.arange(N) % 2 == 0
  are_equal(rollouts, whole, rows=~even | (whole.mask.sum(axis=1) == 1))
  assert rollouts.mask[even].sum(axis=1).tolist() == [1] * (N // 2)


@pytest.mark.slow
def test_an_unknown_sequence_cannot_be_unwanted():
  with pytest.raises(ValueError, match=f"unwanted: found sequence {N}, expected numbers from 0 to {N - 1}"):
    next(streamed("chain", **GROWING, unwanted=lambda: [N]))


@pytest.mark.parametrize(("steps", "settings"), [(1, {}), (4, GROWING)])
def test_the_next_stretch_is_dispatched_before_the_host_gets_work(monkeypatch, steps, settings):
  events, run_as_usual = [], stream_lib._run

  def watched(programs, given, progress, *, ask):
    def watch(what, run):
      def program(*args):
        events.append(what)
        return run(*args)

      return program

    stretches = [watch(("stretch", size), run) for size, run in enumerate(programs.stretches)]
    growths = [watch(("growth", size), run) for size, run in enumerate(programs.growths)]
    yield from run_as_usual(programs._replace(stretches=tuple(stretches), growths=tuple(growths)), given, progress, ask=ask)

  monkeypatch.setattr(stream_lib, "_run", watched)
  for finished in streamed(steps=steps, **settings):
    events.append(("rewards", finished.steps))
  if settings:
    # The second stretch has no room and takes no step. The third, with the larger cache, is
    # dispatched before the rewards of the first.
    assert events[:5] == [("stretch", 0), ("stretch", 0), ("growth", 0), ("stretch", 1), ("rewards", 4)]
  dispatched = 0
  for what, number in events:
    dispatched += what == "stretch"
    if what == "rewards":  # Sequences of stretch i are yielded once stretch i + 1 is dispatched.
      assert dispatched >= number / steps + 1 + bool(settings)
  assert dispatched == np.ceil(number / steps) + 1 + bool(settings)


def test_a_stretch_changes_the_loop_in_place_and_nothing_else(monkeypatch):
  seen, run_as_usual = [], stream_lib._run

  def watched(programs, given, progress, *, ask):
    seen.append((given, progress))
    return run_as_usual(programs, given, progress, ask=ask)

  monkeypatch.setattr(stream_lib, "_run", watched)
  prompts, mask = map(jnp.asarray, prompts_of())
  args = (jax.tree.map(jnp.copy, built()[1]), prompts, mask, jax.random.key(0))
  stream = stream_of("dense", 4, **GROWING)(*args)
  first = next(stream)
  ((given, progress),) = seen
  assert all(x.is_deleted() for x in jax.tree.leaves(progress)) and jax.tree.leaves(progress.loop.cache.blocks)
  assert not any(x.is_deleted() for x in jax.tree.leaves((given, args)))
  # As a learner that takes over the params does: everything was read before the call returned.
  for x in jax.tree.leaves(args):
    x.delete()
  are_equal(collect_finished([first, *stream]), sampled(**GROWING))


@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_batch():
  """Fifty different batches: the cache first grows in the second, short prompts come later."""
  (_, table), rng = built("chain"), np.random.default_rng(0)
  batches = []
  for i in range(50):
    width = 3 if i > 5 and i % 2 else 6
    limits = rng.integers(1, 4 if i == 0 else BUDGET + 1, size=N).astype(np.int32)
    prompts = prompts_of(rng.integers(1, width + 1, size=len(LENGTHS)), width, seed=i)
    batches.append((table, *prompts, jax.random.key(i), asked(limits=limits)))
  stream, sample = stream_of("chain", 4, **GROWING), sampler_of("chain", **GROWING)
  for i in (0, 7):
    sample(*batches[i])
  steps = {list(stream(*batches[0]))[-1].steps}
  compiled = CompileCounter()
  for batch in batches:
    reports, whole = list(stream(*batch)), sample(*batch)
    np.testing.assert_array_equal(collect_finished(reports).tokens, whole.tokens)
    steps.add(reports[-1].steps)
  assert compiled.count == 0 and len(steps) > 10


@pytest.mark.parametrize("requests", [{"max_steps": 0}, {"max_steps": 6}, {"enough_groups": 3}, {"max_steps": 7, "enough_groups": 1}])
def test_budgets_count_over_all_stretches(requests):
  """The rest continues later with the same result, as it does with the sampler."""
  reports = list(streamed("chain", asked(**requests), **GROWING))
  part = sampled("chain", asked(**requests), **GROWING)
  are_equal(collect_finished(reports), part)
  assert np.any(part.reasons == StopReason.UNFINISHED) and reports[-1].steps <= requests.get("max_steps", 1000)
  are_equal(
    collect_finished(streamed("chain", asked(partial=to_partial(collect_finished(reports))), **GROWING)),
    sampled("chain", **GROWING),
  )


def test_complete_responses_are_yielded_without_a_step():
  whole = sampled("chain", **GROWING)
  reports = list(streamed("chain", asked(partial=to_partial(whole)), **GROWING))
  assert [x.steps for x in reports] == [0, 0]  # One report does not have room for all.
  are_equal(collect_finished(reports), whole)


def test_one_sequence():
  stream = make_stream(built("chain")[0], steps_per_report=1, **SETTINGS | {"group_size": 1, "stop_ids": (), "max_new_tokens": 3})
  prompts, mask = prompts_of()
  (report,) = stream(built("chain")[1], prompts[:1], mask[:1], jax.random.key(0))
  assert report.sequences.tolist() == [0] and report.steps == 3 and report.rollouts.mask.all()


def test_an_abandoned_stream_does_no_harm():
  whole = sampled("chain", **GROWING)
  left, failed, beside = streamed("chain", **GROWING), streamed("chain", **GROWING), streamed("chain", **GROWING, seed=3)
  first = next(left)
  left.close()
  assert list(left) == []
  with pytest.raises(RuntimeError, match="no reward"):
    for _ in failed:
      raise RuntimeError("no reward")
  # Two streams at a time, in turns.
  again = streamed("chain", **GROWING)
  turns = [x for pair in itertools.zip_longest(again, beside) for x in enumerate(pair) if x[1] is not None]
  are_equal(collect_finished(x for i, x in turns if i == 0), whole)
  are_equal(collect_finished(x for i, x in turns if i == 1), sampled("chain", **GROWING, seed=3))
  np.testing.assert_array_equal(collect_finished([first]).tokens, whole.tokens[np.sort(first.sequences)])


def test_settings_out_of_range_are_refused():
  with pytest.raises(ValueError, match="rollout.steps_per_report: found 0, expected 1 or more"):
    make_stream(built()[0], steps_per_report=0, **SETTINGS)
  with pytest.raises(ValueError, match="rollout.slots: found 0"):
    make_stream(built()[0], slots=0, **SETTINGS)
  with pytest.raises(ValueError, match=r"requests.limits: found shape \(3,\)"):
    streamed("chain", asked(limits=np.ones(3)), **GROWING)
  with pytest.raises(ValueError, match="finished: found 0 sequences"):
    collect_finished([])
  first = next(streamed("chain", **GROWING))
  with pytest.raises(ValueError, match="each once"):
    collect_finished([first, first])
