"""Sequences as they finish: together what the sampler returns at once, early, ended on demand, and without a device that waits."""

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
from jaxrl_llm.sampler import Requests, begun, gather, make_sampler, make_stream
from jaxrl_llm.sampler import stream as stream_lib
from jaxrl_llm.types import StopReason

PAD, GROUP, BUDGET, WIDTH = 256, 4, 12, 6
STOPS = tuple(range(0, 264, 12))
LENGTHS = (6, 3, 1, 4, 2, 6, 5, 3)
N = len(LENGTHS) * GROUP
CONFIGS = {
  "dense": preset("nano", vocab_size=264),
  "moe": preset("nano-moe", vocab_size=264)._replace(experts=Experts(8, 2, 16, layers=(1,))),
}
SETTINGS = {"group_size": GROUP, "max_new_tokens": BUDGET, "stop_ids": STOPS, "pad_id": PAD}
# What most tests share, so that it is compiled once: a cache that grows, and fewer rows than sequences.
GROWING = {"slots": 8, "cache_blocks": (4, 8)}


class Chain(NamedTuple):
  """As much of `models.Model` as the sampler calls: a token's row of a table has the logits of the next."""

  prefill: Callable = lambda table, tokens, mask, dtype: (jnp.zeros(()), None)
  decode: Callable = lambda table, tokens, positions, cache, **_: (table[tokens], cache + 1, None)
  config: SimpleNamespace = SimpleNamespace(dtype="float32", experts=None)
  mesh: None = None
  grow: Callable = lambda cache, *_, **__: cache
  resume: Callable = lambda table, tokens, mask, cache: cache
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
  """Requests of one structure, whatever is asked: they share their programs."""
  plain = Requests(limits=np.full(N, BUDGET, np.int32), max_steps=np.int32(1000), enough_groups=np.int32(1000))
  return plain._replace(**{name: x if name == "begun" else np.asarray(x, np.int32) for name, x in changes.items()})


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


def are_equal(found, expected, rows=slice(None)):
  for name, x in expected._asdict().items():
    y = getattr(found, name)
    assert (x is None) == (y is None), name
    if x is not None:
      assert isinstance(y, np.ndarray) and y.dtype == x.dtype and y.shape == x.shape, name
      np.testing.assert_allclose(y[rows], x[rows], rtol=0, atol=1e-5 if x.dtype == np.float32 else 0, err_msg=name)


@pytest.mark.parametrize(
  ("kind", "steps", "settings"),
  [
    ("dense", 1, {}),
    ("dense", 4, GROWING),
    ("moe", 100, {"slots": 5, "record_routing": True, "temperature": 0.7, "top_k": 30, "entropy": True}),
  ],
)
def test_all_sequences_together_are_those_of_the_sampler(kind, steps, settings):
  found = list(streamed(kind, steps=steps, **settings))
  whole = sampled(kind, **(settings or GROWING))
  are_equal(gather(found), whole)
  are_equal(gather(reversed(found)), whole)
  assert sorted(itertools.chain(*(x.sequences.tolist() for x in found))) == list(range(N))
  reported = [x.steps for x in found]
  assert reported == sorted(set(reported)) and len(found) > 1
  if not settings:  # A row for each and a report at each step: each sequence comes with its last token.
    assert all(x.rollouts.mask.sum(axis=1).tolist() == [x.steps] * len(x.sequences) for x in found)


@pytest.mark.slow
def test_eight_devices_hand_out_what_one_does():
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  model = make_model(CONFIGS["dense"], mesh=mesh)
  params = jax.device_put(built()[1], mesh_lib.param_shardings(mesh, model.logical_axes, built()[1]))
  stream = make_stream(model, steps_per_report=4, **SETTINGS, **GROWING)
  are_equal(gather(stream(params, *prompts_of(), jax.random.key(0))), sampled(**GROWING))
  compiled = CompileCounter()
  placed = mesh_lib.place_rows(mesh, prompts_of())
  are_equal(gather(stream(params, *placed, jax.random.key(0))), sampled(**GROWING))
  assert compiled.count == 0  # Wherever prompts come from, and every stretch leaves its arrays where it found them.


class Queue:
  """The rows and the line of the sampler, on the host: a step takes the time of a step, and nothing is drawn."""

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
def test_sequences_that_nobody_wants_end_and_their_rows_go_to_the_next(unwanted):
  """After 8 steps, with 8 rows: all that run and most that wait; some that wait before others; some that run; all."""
  whole = sampled(**GROWING)
  answers = itertools.chain([()] * 3, itertools.repeat(unwanted))  # The second stretch is there before anybody knows that it has no room.
  found = list(streamed(**GROWING, unwanted=lambda: next(answers)))
  queue, steps = Queue(whole.mask.sum(axis=1), 8), 0
  while queue.rows:
    if steps == 8:
      assert queue.rows and queue.waiting[-4:] == [N - 4, N - 3, N - 2, N - 1] and len(queue.waiting) > 8
      queue.abort({i for i in unwanted if queue.drawn[i] < queue.lengths[i]})
    if queue.rows:
      queue.step()
      steps += 1
  rollouts, lengths = gather(found), np.array(queue.drawn)
  assert found[-1].steps == steps and np.array_equal(rollouts.mask.sum(axis=1), lengths)
  assert 0 in lengths or unwanted == set(range(8))
  cut = lengths < queue.lengths
  assert set(np.flatnonzero(cut)) <= unwanted and cut.any()
  assert np.all(rollouts.reasons[cut] == StopReason.ABORTED) and not np.any(rollouts.stopped[cut])
  np.testing.assert_array_equal(rollouts.tokens, np.where(rollouts.mask, whole.tokens, PAD))
  np.testing.assert_allclose(rollouts.logprobs, np.where(rollouts.mask, whole.logprobs, 0), atol=1e-5)
  are_equal(rollouts, whole, rows=~cut)


def test_rows_of_one_sequence_each_end_on_demand():
  answers = itertools.chain([(), range(0, N, 2)], itertools.repeat(()))  # Said once is enough.
  rollouts, whole = gather(streamed(steps=1, unwanted=lambda: next(answers))), sampled(**GROWING)
  even = np.arange(N) % 2 == 0
  are_equal(rollouts, whole, rows=~even | (whole.mask.sum(axis=1) == 1))
  assert rollouts.mask[even].sum(axis=1).tolist() == [1] * (N // 2)


def test_a_sequence_that_there_is_not_cannot_be_unwanted():
  with pytest.raises(ValueError, match=f"unwanted: found the sequence {N}, expected numbers from 0 to {N - 1}"):
    next(streamed("chain", **GROWING, unwanted=lambda: [N]))


@pytest.mark.parametrize(("steps", "settings"), [(1, {}), (4, GROWING)])
def test_the_devices_have_work_before_the_host_gets_any(monkeypatch, steps, settings):
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
    # The second stretch finds no room and takes no step; the third, in the larger cache, is there before the rewards of the first.
    assert events[:5] == [("stretch", 0), ("stretch", 0), ("growth", 0), ("stretch", 1), ("rewards", 4)]
  dispatched = 0
  for what, number in events:
    dispatched += what == "stretch"
    if what == "rewards":  # Those of stretch i are handed over when stretch i + 1 is there.
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
  for x in jax.tree.leaves(args):  # As a learner does that is given the params: everything was read when the call returned.
    x.delete()
  are_equal(gather([first, *stream]), sampled(**GROWING))


def test_nothing_is_compiled_after_the_first_batch():
  """Fifty batches of other lengths; the cache first grows in the second of them, and short prompts come later still."""
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
    found, whole = list(stream(*batch)), sample(*batch)
    np.testing.assert_array_equal(gather(found).tokens, whole.tokens)
    steps.add(found[-1].steps)
  assert compiled.count == 0 and len(steps) > 10


@pytest.mark.parametrize("requests", [{"max_steps": 0}, {"max_steps": 6}, {"enough_groups": 3}, {"max_steps": 7, "enough_groups": 1}])
def test_budgets_count_over_all_stretches(requests):
  """And what is left goes on later, as it does with the sampler, to the same end."""
  found = list(streamed("chain", asked(**requests), **GROWING))
  part = sampled("chain", asked(**requests), **GROWING)
  are_equal(gather(found), part)
  assert np.any(part.reasons == StopReason.UNFINISHED) and found[-1].steps <= requests.get("max_steps", 1000)
  are_equal(gather(streamed("chain", asked(begun=begun(gather(found))), **GROWING)), sampled("chain", **GROWING))


def test_what_is_complete_already_comes_without_a_step():
  whole = sampled("chain", **GROWING)
  found = list(streamed("chain", asked(begun=begun(whole)), **GROWING))
  assert [x.steps for x in found] == [0, 0]  # More than a report has room for.
  are_equal(gather(found), whole)


def test_one_sequence():
  stream = make_stream(built("chain")[0], steps_per_report=1, **SETTINGS | {"group_size": 1, "stop_ids": (), "max_new_tokens": 3})
  prompts, mask = prompts_of()
  (found,) = stream(built("chain")[1], prompts[:1], mask[:1], jax.random.key(0))
  assert found.sequences.tolist() == [0] and found.steps == 3 and found.rollouts.mask.all()


def test_a_stream_that_is_left_does_no_harm():
  whole = sampled("chain", **GROWING)
  left, failed, beside = streamed("chain", **GROWING), streamed("chain", **GROWING), streamed("chain", **GROWING, seed=3)
  first = next(left)
  left.close()
  assert list(left) == []
  with pytest.raises(RuntimeError, match="no reward"):
    for _ in failed:
      raise RuntimeError("no reward")
  # Two at a time, in turns.
  again = streamed("chain", **GROWING)
  turns = [x for pair in itertools.zip_longest(again, beside) for x in enumerate(pair) if x[1] is not None]
  are_equal(gather(x for i, x in turns if i == 0), whole)
  are_equal(gather(x for i, x in turns if i == 1), sampled("chain", **GROWING, seed=3))
  np.testing.assert_array_equal(gather([first]).tokens, whole.tokens[np.sort(first.sequences)])


def test_what_is_out_of_range_is_refused():
  with pytest.raises(ValueError, match="rollout.steps_per_report: found 0, expected 1 or more"):
    make_stream(built()[0], steps_per_report=0, **SETTINGS)
  with pytest.raises(ValueError, match="rollout.slots: found 0"):
    make_stream(built()[0], slots=0, **SETTINGS)
  with pytest.raises(ValueError, match=r"requests.limits: found shape \(3,\)"):
    streamed("chain", asked(limits=np.ones(3)), **GROWING)
  with pytest.raises(ValueError, match="finished: found 0 sequences"):
    gather([])
  first = next(streamed("chain", **GROWING))
  with pytest.raises(ValueError, match="each once"):
    gather([first, first])
