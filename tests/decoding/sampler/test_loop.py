"""Refilled rows, shared prompts and caches in blocks, against single sequences without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.draw import draw, sequence_keys
from jaxrl_llm.decoding.sampler import Requests, make_filter, make_sampler, make_stop_table, seeded, to_partial
from jaxrl_llm.types import Rollouts, StopReason
from tests.decoding.sampler.nano import LENGTHS, PAD, built, prompts_of
from tests.marks import few

GROUP, BUDGET = 4, 12
STOPS = tuple(range(0, 264, 12))
N = len(LENGTHS) * GROUP
SETTINGS = dict(group_size=GROUP, max_new_tokens=BUDGET, stop_ids=STOPS, pad_id=PAD)


@functools.cache
def sampler_of(kind="dense", **settings):
  return jax.jit(make_sampler(built(kind)[0], **SETTINGS | settings))


def sampled(kind="dense", *, requests=None, seed=0, table=None, **settings):
  # A table has no hash.
  make = sampler_of if table is None else functools.partial(sampler_of.__wrapped__, stop_table=table)
  requests = (requests or Requests())._replace(seeds=seeds_of(seed))
  return jax.device_get(make(kind, **settings)(built(kind)[1], *prompts_of(), requests))


def seeds_of(seed=0):
  return seeded(jax.random.key(seed), N).seeds


def cut(whole, lengths):
  """Returns the first tokens of responses, to be continued."""
  reasons = np.full(N, StopReason.UNFINISHED, np.int8)
  return to_partial(whole._replace(mask=np.arange(BUDGET) < lengths[:, None], reasons=reasons))


@functools.cache
def one_by_one(kind="dense", temperature=1.0, top_k=0, top_p=1.0, seed=0):
  """Draws every sequence by a full forward pass over its own tokens at every step."""
  model, params = built(kind)
  prompts, mask = map(np.asarray, prompts_of())
  width = prompts.shape[1] + BUDGET
  filter_logits = make_filter(temperature=temperature, top_k=top_k, top_p=top_p)

  @jax.jit
  def step(tokens, length, key):
    here = jnp.arange(width)[None]
    logits = model.logits(params, tokens[None], here, (here < length).astype(jnp.int32))[0, length - 1]
    token, logprob = draw(filter_logits(logits)[None], key[None])
    return token[0], logprob[0], jax.nn.log_softmax(logits)[token[0]]

  responses = []
  for i, own in enumerate(sequence_keys(seeds_of(seed))):
    tokens = np.zeros(width, np.int32)
    length = start = int(mask[i // GROUP].sum())
    tokens[:length] = prompts[i // GROUP][mask[i // GROUP]]
    logprobs, raw = [], []
    for t in range(BUDGET):
      token, logprob, plain = step(tokens, length, jax.random.fold_in(own, t))
      tokens[length], length = token, length + 1
      logprobs.append(float(logprob))
      raw.append(float(plain))
      if int(token) in STOPS:
        break
    responses.append((tokens[start:length].tolist(), logprobs, raw))
  return responses


def assert_equals_reference(rollouts: Rollouts, reference):
  assert rollouts.mask.sum(axis=1).tolist() == [len(tokens) for tokens, _, _ in reference]
  for row, (tokens, logprobs, raw) in enumerate(reference):
    drawn = rollouts.mask[row]
    assert rollouts.tokens[row][drawn].tolist() == tokens
    assert rollouts.stopped[row] == (tokens[-1] in STOPS)
    assert rollouts.reasons[row] == (StopReason.TOKEN if tokens[-1] in STOPS else StopReason.LENGTH)
    np.testing.assert_allclose(rollouts.logprobs[row][drawn], logprobs, atol=1e-5)
    np.testing.assert_allclose(rollouts.raw_logprobs[row][drawn], raw, atol=1e-5)


@pytest.mark.parametrize(
  ("kind", "settings"),
  few([
    ("dense", {}),
    ("dense", {"slots": 5}),
    ("dense", {"slots": 16, "cache_blocks": (3, 4, 5)}),
    ("dense", {"slots": 1}),
    ("dense", {"cache_blocks": (4, 8)}),
    ("dense", {"slots": 8, "temperature": 0.7, "top_k": 30, "top_p": 0.9}),
    ("moe", {"slots": 6, "cache_blocks": (6, 6)}),
    # Responses longer than windows, in two blocks.
    ("window", {"slots": 6, "cache_blocks": (4, 8)}),
  ], 0, 5, 6, 7),
)
def test_tokens_and_logprobs_are_those_of_one_sequence_at_a_time(kind, settings):
  drawing = {name: settings[name] for name in ("temperature", "top_k", "top_p") if name in settings}
  reference = one_by_one(kind, **drawing)
  # Ends are early and late, so rows are refilled at many steps.
  assert len({len(tokens) for tokens, _, _ in reference}) > 5
  assert_equals_reference(sampled(kind, **settings), reference)


def test_a_prompt_is_prefilled_and_kept_once():
  """No array of the program holds a prompt's keys or values once per sample."""
  model, params = built()
  for group in (1, 4):
    sample = make_sampler(model, group_size=group, max_new_tokens=4, stop_ids=(), pad_id=0)
    program = str(jax.make_jaxpr(sample)(params, *prompts_of(width=17), seeded(jax.random.key(0), group * len(LENGTHS))))
    kept = lambda rows: f"f32[{rows},{model.config.num_kv_heads},{model.config.head_dim},16]"
    assert kept(len(LENGTHS)) in program and (group == 1 or kept(group * len(LENGTHS)) not in program)


@pytest.mark.parametrize(("dtype", "error"), few([("bfloat16", 0.02), ("int8", 0.05)], 1))
def test_a_smaller_cache_costs_little_precision(dtype, error):
  exact = sampled(max_new_tokens=1, stop_ids=())
  small = sampled(max_new_tokens=1, stop_ids=(), cache_dtype=dtype)
  same = exact.tokens[:, 0] == small.tokens[:, 0]
  assert same.mean() > 0.9
  difference = np.abs(exact.logprobs - small.logprobs)[same]
  assert 1e-6 < difference.max() < error


def test_limits_and_temperatures_of_single_sequences():
  limits = jnp.arange(N) % BUDGET + 1
  temperatures = jnp.where(jnp.arange(N) % 2 == 0, 1.0, 0.0)
  rollouts = sampled(slots=8, requests=Requests(limits=limits, temperatures=temperatures))
  lengths = rollouts.mask.sum(axis=1)
  assert np.all(lengths <= limits) and np.all((lengths == limits) | rollouts.stopped)
  for row, (tokens, logprobs, _) in enumerate(one_by_one()):
    if row % 2 == 0:
      assert rollouts.tokens[row, : lengths[row]].tolist() == tokens[: lengths[row]]
      np.testing.assert_allclose(rollouts.logprobs[row, : lengths[row]], logprobs[: lengths[row]], atol=1e-5)
  greedy = np.arange(N) % 2 == 1
  assert np.all(rollouts.logprobs[greedy] == 0) and np.all(rollouts.raw_logprobs[greedy][rollouts.mask[greedy]] < 0)
  # All greedy samples of a prompt are the same, up to their limits.
  for a, b in zip(range(1, N, GROUP), range(3, N, GROUP), strict=True):
    both = min(lengths[a], lengths[b])
    assert np.array_equal(rollouts.tokens[a, :both], rollouts.tokens[b, :both])


@pytest.mark.slow
def test_at_temperature_zero_every_sample_is_the_greedy_response():
  rollouts, expected = sampled(temperature=0.0, slots=8), one_by_one(temperature=0.0)
  for row, (tokens, _, _) in enumerate(expected):
    assert rollouts.tokens[row][rollouts.mask[row]].tolist() == tokens[: rollouts.mask[row].sum()]
  assert np.all(rollouts.logprobs == 0)


def test_stop_tokens_wait_for_the_minimum_number_of_tokens():
  least = jnp.arange(N) % 5
  rollouts = sampled(slots=8, requests=Requests(min_new_tokens=least), entropy=True)
  is_stop = np.isin(rollouts.tokens, STOPS) & rollouts.mask
  assert not np.any(is_stop & (np.arange(BUDGET) < np.asarray(least)[:, None]))
  assert np.all((rollouts.mask.sum(axis=1) > least) | ~rollouts.stopped)
  early = rollouts.mask & (np.arange(BUDGET) < np.asarray(least)[:, None])
  # The others have the mass of the stop tokens.
  assert np.all(rollouts.logprobs[early] >= rollouts.raw_logprobs[early])
  np.testing.assert_allclose(rollouts.logprobs[rollouts.mask & ~early], rollouts.raw_logprobs[rollouts.mask & ~early], atol=1e-5)
  assert np.all(rollouts.entropy[rollouts.mask] > 0) and np.all(rollouts.entropy[~rollouts.mask] == 0)


@pytest.mark.parametrize(
  ("kind", "settings"),
  few([(kind, {"slots": 8, "cache_blocks": (4, 8)}) for kind in ("dense", "window")] + [("moe", {"record_routing": True})],
      rest="slow", by_hand=(2,)),
)  # fmt: skip
def test_continuing_after_a_budget_of_steps_equals_an_uninterrupted_run(kind, settings):
  """Calls of a few steps, each continuing the last result, give the same tokens.

  The log-probabilities are those first reported.
  """
  whole = sampled(kind, **settings)
  rounds, part = 0, None
  while part is None or np.any(part.reasons == StopReason.UNFINISHED):
    before, rounds = part, rounds + 1
    part = sampled(kind, requests=Requests(partial=before and to_partial(before), max_steps=jnp.int32(5)), **settings)
    assert rounds < 20
    if before is not None:
      lengths = before.mask.sum(axis=1)
      assert np.all(part.mask.sum(axis=1) >= lengths) and np.sum(part.mask) > np.sum(before.mask)
      for name in ("tokens", "logprobs", "raw_logprobs"):
        assert np.array_equal(getattr(part, name)[before.mask], getattr(before, name)[before.mask])
  assert rounds == (3 if kind == "moe" else rounds) and rounds > 2
  np.testing.assert_array_equal(part.tokens, whole.tokens)
  np.testing.assert_array_equal(part.reasons, whole.reasons)
  np.testing.assert_allclose(part.logprobs, whole.logprobs, atol=1e-5)
  if kind == "moe":
    np.testing.assert_array_equal(part.routing, whole.routing)


def test_partial_responses_beyond_the_rows_are_replayed():
  """20 partial responses and 4 rows, which only another source than this sampler can give."""
  whole = sampled()
  lengths = np.minimum(whole.mask.sum(axis=1) - 1, 3) * (np.arange(N) < 20)
  rollouts = sampled(slots=4, requests=Requests(partial=cut(whole, lengths)))
  np.testing.assert_array_equal(rollouts.tokens, whole.tokens)
  np.testing.assert_allclose(rollouts.logprobs, whole.logprobs, atol=1e-5)


@pytest.mark.slow
def test_stop_strings_end_a_response():
  plain, ends = sampled(stop_ids=()), 0
  letters, pair = [token for token in plain.tokens[:, 3].tolist() if token < 128][:2], plain.tokens[9, 4:6].tolist()
  table = make_stop_table([bytes([i]) if i < 256 else None for i in range(264)], list(map(chr, letters)), [pair])
  rollouts = sampled(stop_ids=(), slots=8, table=table)
  for row in range(N):
    whole = plain.tokens[row].tolist()
    hits = [t for t, token in enumerate(whole) if token in letters or whole[max(t - 1, 0) : t + 1] == pair]
    length = hits[0] + 1 if hits else BUDGET
    assert rollouts.tokens[row][rollouts.mask[row]].tolist() == whole[:length]
    assert rollouts.reasons[row] == (StopReason.STRING if hits else StopReason.LENGTH) and rollouts.stopped[row] == bool(hits)
    ends += bool(hits)
  assert 0 < ends < N


@pytest.mark.slow
def test_prompts_of_one_token():
  (_, params), prompts = built(), jnp.array([[5], [9]])
  sample = sampler_of(group_size=2, max_new_tokens=3, stop_ids=(), slots=2)
  requests, margin = seeded(jax.random.key(0), 4), ((0, 0), (3, 0))
  narrow = sample(params, prompts, jnp.ones((2, 1), bool), requests)
  wide = sample(params, jnp.pad(prompts, margin), jnp.pad(jnp.ones((2, 1), bool), margin), requests)
  assert np.array_equal(narrow.tokens, wide.tokens)
  np.testing.assert_allclose(narrow.logprobs, wide.logprobs, atol=1e-5)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"slots": 0}, "rollout.slots: found 0, expected 1 or more"),
    ({"group_size": 0}, "rollout.group_size: found 0"),
    ({"max_new_tokens": 0}, "rollout.max_new_tokens: found 0"),
    ({"cache_blocks": (4, 4)}, r"rollout.cache_blocks: found \(4, 4\), expected positive sizes that add up to rollout.max_new_tokens=12"),
    ({"cache_blocks": (12, 0)}, "rollout.cache_blocks"),
    ({"temperature": -0.1}, "rollout.temperature: found -0.1"),
  ],
)
def test_settings_out_of_range_are_refused_before_anything_is_traced(settings, message):
  with pytest.raises(ValueError, match=message):
    make_sampler(built()[0], **SETTINGS | settings)


def test_requests_of_another_number_of_sequences_are_refused():
  with pytest.raises(ValueError, match=r"requests.limits: found shape \(3,\) for 32 sequences, expected \(32,\)"):
    sampled(requests=Requests(limits=jnp.ones(3, jnp.int32)))
  with pytest.raises(ValueError, match=r"requests.seeds: found None for 32 sequences, expected the shape \(32, 2\)"):
    sampler_of()(built()[1], *prompts_of(), Requests())


@pytest.mark.slow
def test_the_loop_ends_once_enough_groups_are_complete():
  whole = sampled()
  enough = sampled(requests=Requests(enough_groups=jnp.int32(2)))
  done = np.all(enough.reasons.reshape(-1, GROUP) != StopReason.UNFINISHED, axis=1)
  # The step at which each group is complete.
  last = whole.mask.sum(axis=1).reshape(-1, GROUP).max(axis=1)
  steps = np.sort(last)[1]
  assert np.array_equal(done, last <= steps) and 2 <= done.sum() < len(LENGTHS)
  assert np.array_equal(enough.mask, whole.mask & (np.arange(BUDGET) < steps))
  rest = sampled(requests=Requests(partial=to_partial(enough)))
  np.testing.assert_array_equal(rest.tokens, whole.tokens)


def test_stop_sequences_are_detected_across_calls():
  """Sequences that begin in one call and end in the next."""
  plain = sampled(stop_ids=())
  ends = [plain.tokens[row, 2:5].tolist() for row in range(0, N, 3)]
  table = make_stop_table([None] * 264, sequences=ends)
  before = sampled(stop_ids=(), table=table, requests=Requests(max_steps=jnp.int32(4)))
  rollouts = sampled(stop_ids=(), table=table, requests=Requests(partial=to_partial(before)))
  assert np.all(before.mask.sum(axis=1) == 4)
  for row in range(0, N, 3):
    assert rollouts.reasons[row] == StopReason.STRING and rollouts.mask[row].sum() == 5
    assert np.array_equal(rollouts.tokens[row, :5], plain.tokens[row, :5])
  assert np.any(rollouts.reasons == StopReason.LENGTH)


def test_a_replayed_response_keeps_its_tokens():
  """20 partial responses, 4 rows and few steps: unfinished replays return them unchanged."""
  whole = sampled()
  lengths = np.minimum(whole.mask.sum(axis=1) - 1, 5) * (np.arange(N) < 20)
  rollouts = sampled(slots=4, requests=Requests(partial=cut(whole, lengths), max_steps=jnp.int32(7)))
  assert np.all(rollouts.mask.sum(axis=1) >= lengths) and np.any(rollouts.mask.sum(axis=1) > lengths)
  np.testing.assert_array_equal(rollouts.tokens[rollouts.mask], whole.tokens[rollouts.mask])
  assert np.all(rollouts.tokens[~rollouts.mask] == PAD)
