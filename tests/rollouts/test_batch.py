"""Handmade rollouts: their grades, trajectories, metrics and sample rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.estimators import make_credit
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.pretrained import png
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.thumbnails import thumbnail
from jaxrl_llm.rewards import RewardSpec, WeightedReward, weighted
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import dynamic_sampling, trajectories
from jaxrl_llm.rollouts.jobs import sequence_seeds, turn_seed
from jaxrl_llm.types import Rollouts
from tests.rollouts.players import completions, swept, with_reasons

TOKENIZER = ByteTokenizer()
PAD, EOS = TOKENIZER.pad_id, TOKENIZER.eos_id
EXAMPLES = [{"prompt": "1+1", "answer": "2", "level": 1}, {"prompt": "9", "answer": "9", "level": 2}]
RESPONSES = ["#2", "#3", "#9", "9999"]  # The last one reaches the budget of 4 tokens.


def make_rollouts() -> Rollouts:
  """Makes rollouts of two prompts with two samples each."""
  prompts = np.full((4, 5), PAD, np.int32)
  tokens, logprobs = np.full((4, 4), PAD, np.int32), np.zeros((4, 4), np.float32)
  stopped = np.array([True, True, True, False])
  for row, response in enumerate(RESPONSES):
    prompt = TOKENIZER.encode(EXAMPLES[row // 2]["prompt"], add_bos=True)
    prompts[row, 5 - len(prompt) :] = prompt
    ids = TOKENIZER.encode(response) + [EOS] * int(stopped[row])
    tokens[row, : len(ids)], logprobs[row, : len(ids)] = ids, -0.5 - np.arange(len(ids)) - 10 * row
  return Rollouts(prompts, prompts != PAD, tokens, tokens != PAD, logprobs, stopped)


def right(completion, example):
  return float(completion.stopped and completion.text == f"#{example['answer']}")


def length(completion, example):
  return completion.num_tokens


TERMS = [WeightedReward("right", right), WeightedReward("length", length, 0.1)]


def make_batch() -> batch_lib.Batch:
  """Makes a graded batch with the advantages 1, -1, 0.5 and -0.5 at all response tokens.

  Its first group carries a signal.
  """
  rollouts = make_rollouts()
  responses = completions(rollouts, TOKENIZER.decode)
  batch = batch_lib.assess(rollouts, responses, EXAMPLES, rewards=TERMS)
  return batch._replace(advantages=np.float32([[1], [-1], [0.5], [-0.5]]) * rollouts.mask, signal=np.array([True, False]))


def test_completions_keep_the_stop_token_and_count_it():
  responses = completions(make_rollouts(), TOKENIZER.decode)
  assert [c.text for c in responses] == RESPONSES
  assert [c.token_ids for c in responses] == [(35, 50, EOS), (35, 51, EOS), (35, 57, EOS), (57, 57, 57, 57)]
  assert [c.num_tokens for c in responses] == [3, 3, 3, 4] and [c.stopped for c in responses] == [
    True,
    True,
    True,
    False,
  ]


def test_each_response_is_graded_with_its_own_example():
  batch = make_batch()
  assert batch.group_size == 2 and [e["answer"] for e in batch.examples] == ["2", "2", "9", "9"]
  assert batch.graded.totals.dtype == np.float32 and all(part.dtype == np.float32 for part in batch.graded.parts.values())
  np.testing.assert_allclose(batch.graded.totals, [1.3, 0.3, 1.3, 0.4], rtol=1e-6)
  assert batch.graded.parts["right"].tolist() == [1, 0, 1, 0] and batch.graded.parts["length"].tolist() == [3, 3, 3, 4]


def test_a_term_of_a_group_is_added_to_a_batch_and_makes_no_group_mixed():
  terms = [WeightedReward("right", right), weighted("length_by_pass_rate", RewardSpec("length_by_pass_rate"), -0.5)]
  rollouts = make_rollouts()
  batch = batch_lib.assess(rollouts, completions(rollouts, TOKENIZER.decode), EXAMPLES, rewards=terms)
  assert batch.graded.totals.tolist() == [0.75, -0.25, 1 - 0.25 * 3 / 4, -0.25]
  solved = [WeightedReward("right", lambda completion, example: 1.0), terms[1]]
  batch = batch_lib.assess(rollouts, completions(rollouts, TOKENIZER.decode), EXAMPLES, rewards=solved)
  signal = lambda shaped: dynamic_sampling.with_signal(batch, make_credit("group", 2), shaped=shaped, rewards=solved).tolist()
  assert signal(True) == [False, True] and signal(False) == [False, False]


def sequences_of(values):
  """Prepends junk for the prompts, which must not be read, to values of the responses."""
  rollouts = make_rollouts()
  prompts = rollouts.prompt_mask.sum(axis=1)
  return [np.concatenate([np.full(n, 99.0), x[m]]).astype(np.float32) for n, x, m in zip(prompts, values, rollouts.mask, strict=True)]


def test_evidence_holds_each_response_in_its_row():
  batch = make_batch()
  mask = batch.rollouts.mask
  plain = trajectories.evidence(batch, rewards=TERMS)
  np.testing.assert_array_equal(plain.rewards, batch.graded.totals)
  np.testing.assert_allclose(plain.weights @ plain.parts, batch.graded.totals, rtol=1e-6)
  np.testing.assert_array_equal(plain.mask, mask)
  np.testing.assert_array_equal(plain.written, mask)
  assert plain.kl is plain.values is plain.step_rewards is plain.step_ends is None

  values, old, ref = (np.arange(16.0).reshape(4, 4) * scale for scale in (1, 10, -1))
  evidence = trajectories.evidence(
    batch, rewards=TERMS, kl=lambda old, ref: old - ref, kl_coef=0.5, old_logprobs=sequences_of(old), ref_logprobs=sequences_of(ref),
    values=sequences_of(values),
  )  # fmt: skip
  np.testing.assert_array_equal(evidence.values, values * mask)
  np.testing.assert_array_equal(evidence.kl, (old - ref) * mask)
  assert evidence.kl_coef == 0.5


def test_whole_sequences_have_zeros_for_the_prompts():
  values = np.arange(1.0, 17.0).reshape(4, 4)
  sequences = trajectories.whole_sequences(values, make_rollouts())
  for x, sequence in zip(sequences, trajectories.trajectories(make_rollouts()), strict=True):
    assert len(x) == len(sequence.tokens) and not x[sequence.mask == 0].any()
  assert sequences[3].tolist() == [0, 0, 13, 14, 15, 16]


def test_trajectories_join_prompt_and_response():
  rollouts = make_rollouts()
  sequences = trajectories.trajectories(rollouts)
  bos = TOKENIZER.bos_id
  assert sequences[0].tokens.tolist() == [bos, 49, 43, 49, 35, 50, EOS]
  assert sequences[3].tokens.tolist() == [bos, 57, 57, 57, 57, 57]
  assert sequences[0].mask.tolist() == [0, 0, 0, 0, 1, 1, 1] and sequences[3].mask.tolist() == [0, 0, 1, 1, 1, 1]
  for row, sequence in enumerate(sequences):
    num_prompt = int(rollouts.prompt_mask[row].sum())
    assert not sequence.advantages.any()
    np.testing.assert_array_equal(sequence.sampler_logprobs[num_prompt:], rollouts.logprobs[row][rollouts.mask[row]])
    assert not sequence.sampler_logprobs[:num_prompt].any()
    assert sequence.routing is None
    assert (sequence.tokens.dtype, *(x.dtype for x in sequence[1:4])) == (np.int32, *3 * [np.dtype("float32")])


def test_metrics_by_hand():
  row = batch_lib.metrics(make_batch())
  digests = [row.pop(name) for name in list(row) if name.endswith("_sha256")]
  assert len(digests) == 7 and all(len(digest) == 64 for digest in digests)
  expected = {
    "critic/rewards/mean": 0.825,
    "critic/rewards/max": 1.3,
    "critic/rewards/min": 0.3,
    # A mean over tokens; the last response has one more.
    "critic/advantages/mean": -0.5 / 13,
    "critic/advantages/max": 1.0,
    "critic/advantages/min": -1.0,
    "response_length/mean": 3.25,
    "response_length/max": 4,
    "response_length/min": 3,
    "response_length/clip_ratio": 0.25,
    "prompt_length/mean": 3.0,
    "reward/right/mean": 0.5,
    "reward/length/mean": 3.25,
    "rewards/failed": 0.0,
    "rollout/counted": 1.0,
    "group/frac_reward_zero_std": 0.5,
  }
  assert row.keys() == expected.keys() and all(type(value) is float for value in row.values())
  np.testing.assert_allclose([row[name] for name in expected], list(expected.values()), atol=1e-6)


def test_the_digest_depends_on_every_token():
  batch = make_batch()
  digest = lambda rollouts: batch_lib.metrics(batch._replace(rollouts=rollouts))["rollout/tokens_sha256"]
  seen = {digest(batch.rollouts)}
  for row, slot in np.ndindex(batch.rollouts.tokens.shape):
    tokens = batch.rollouts.tokens.copy()
    tokens[row, slot] ^= 1
    seen.add(digest(batch.rollouts._replace(tokens=tokens)))
  mask = batch.rollouts.mask.copy()
  mask[0, 3] = True
  seen.add(digest(batch.rollouts._replace(mask=mask)))
  assert len(seen) == 1 + 16 + 1
  assert digest(jax.tree.map(np.copy, batch.rollouts)) in seen
  # The digest depends on nothing but the tokens.
  assert digest(batch.rollouts._replace(logprobs=batch.rollouts.logprobs + 1)) in seen


def test_another_order_of_the_groups_has_another_hash_of_tokens_and_the_same_of_sequences():
  batch, order = make_batch(), np.array([2, 3, 0, 1])
  names = [name for name in batch.rollouts._fields if getattr(batch.rollouts, name) is not None]
  moved = batch._replace(rollouts=batch.rollouts._replace(**{name: getattr(batch.rollouts, name)[order] for name in names}))
  tokens = batch.rollouts.tokens.copy()
  tokens[0, 0] ^= 1
  other = batch._replace(rollouts=batch.rollouts._replace(tokens=tokens))
  rows = [batch_lib.metrics(x) for x in (batch, moved, other)]
  digests = lambda name: [row[f"rollout/{name}_sha256"] for row in rows]
  assert digests("sequences")[0] == digests("sequences")[1] != digests("sequences")[2]
  assert len(set(digests("tokens"))) == 3 and digests("prompts")[0] == digests("prompts")[2] != digests("prompts")[1]


def test_each_part_of_a_step_has_a_hash_of_its_own():
  batch = make_batch()
  totals, counts, logprobs, advantages = (
    x.copy() for x in (batch.graded.totals, batch.counted, batch.rollouts.logprobs, batch.advantages)
  )
  totals[1] += 1
  counts[1] ^= True
  logprobs[1, 0] = np.nextafter(logprobs[1, 0], np.float32(-9))
  advantages[1, 0] += 1
  changes = {
    "rewards": batch._replace(graded=batch.graded._replace(totals=totals)),
    "loss_mask": batch._replace(counted=counts),
    "logprobs": batch._replace(rollouts=batch.rollouts._replace(logprobs=logprobs)),
    "advantages": batch._replace(advantages=advantages),
  }
  before = batch_lib.metrics(batch)
  for name, changed in changes.items():
    after = batch_lib.metrics(changed)
    assert [x for x in before if x.endswith("_sha256") and before[x] != after[x]] == [f"rollout/{name}_sha256"]


@pytest.mark.parametrize(("num_rows", "expected"), [(0, []), (1, [0]), (2, [0, 2]), (3, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_sample_rows_come_from_as_many_prompts_as_there_are(num_rows, expected):
  rows = batch_lib.sample_rows(make_batch(), num_rows=num_rows, token_text=TOKENIZER.decode)
  assert [row["response"] for row in rows] == [RESPONSES[i] for i in expected]


def test_a_sample_row_has_small_copies_of_its_pictures():
  pytest.importorskip("PIL")
  batch, picture = make_batch(), png.encode(np.zeros((9, 9, 3), np.uint8))
  shown = batch._replace(examples=[dict(example, images=(picture,) if i < 2 else ()) for i, example in enumerate(batch.examples)])
  rows = batch_lib.sample_rows(shown, num_rows=4, token_text=TOKENIZER.decode)
  assert [row.get("images") for row in rows] == [[thumbnail(picture)]] * 2 + [None] * 2


def test_a_sample_row_by_hand():
  (row,) = batch_lib.sample_rows(make_batch(), num_rows=1, token_text=TOKENIZER.decode)
  assert row["tokens"] == ["#", "2", ""] and row["token_ids"] == [35, 50, EOS] and row["logprobs"] == [-0.5, -1.5, -2.5]
  assert (row["prompt"], row["answer"], row["level"], row["num_tokens"], row["stopped"]) == ("1+1", "2", 1, 3, True)
  np.testing.assert_allclose([row["reward"], row["advantage"]], [1.3, 1.0], rtol=1e-6)


def test_the_first_term_decides_what_is_correct():
  """`jax.tree.map` would sort the terms by name: "length" before "right"."""
  whole = make_batch()._replace(counted=np.full(4, True))
  joined = dynamic_sampling.join([dynamic_sampling.select(whole, np.array([2, 3])), whole])
  joined = joined._replace(advantages=np.zeros_like(joined.rollouts.logprobs))
  for batch, expected in ((whole, [True, False, True, False]), (joined, [True, False, True, False, True, False])):
    assert [*batch.graded.parts] == ["right", "length"]
    rows = batch_lib.sample_rows(batch, num_rows=len(expected), token_text=TOKENIZER.decode)
    assert [row["correct"] for row in rows] == expected


def test_a_sample_row_has_the_responses_part_of_its_token_scores():
  scores = [{"entropy": np.array([9, 9, 9, 0.1, 1 / 3, np.nan]), "gate_weight": np.full(6, np.nan)} for _ in RESPONSES]
  (row,) = batch_lib.sample_rows(make_batch(), num_rows=1, token_text=TOKENIZER.decode, token_scores=scores)
  assert row["entropy"][:2] == [0.1, 0.333333] and np.isnan(row["entropy"][2]) and "gate_weight" not in row


def test_a_sweep_passes_encoded_prompts_to_the_sampler_and_returns_host_arrays():
  mesh, seen = mesh_lib.make_mesh(data=2, fsdp=1, tensor=4), {}

  def sample(params, prompts, prompt_mask, requests):
    seen.update(params=params, prompts=prompts, mask=prompt_mask, seeds=requests.seeds)
    return jax.tree.map(jnp.asarray, with_reasons(make_rollouts()))

  key = jax.random.key(3)
  sizes = dict(group_size=2, new_tokens=4, prompt_buckets=(5, 9))
  rollouts, responses = swept(sample, "weights", EXAMPLES, key, mesh=mesh, tokenizer=TOKENIZER, **sizes)
  assert seen["params"] == "weights" and seen["seeds"].sharding == mesh_lib.row_sharding(mesh)
  seeds = [turn_seed(seed, 0) for seed in sequence_seeds(key, 4)]
  assert [int(low) | int(high) << 32 for low, high in seen["seeds"]] == seeds
  np.testing.assert_array_equal(seen["prompts"], make_rollouts().prompts[::2])
  np.testing.assert_array_equal(seen["mask"], make_rollouts().prompt_mask[::2])
  assert seen["prompts"].sharding == mesh_lib.row_sharding(mesh)
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(rollouts)) and rollouts.routing is None
  assert [response.text for response in responses] == RESPONSES


def fails_on(text):
  """Makes a reward like `right` that is NaN for one response."""
  return lambda completion, example: float("nan") if completion.text == text else right(completion, example)


def test_a_response_without_a_reward_counts_nowhere():
  rollouts = make_rollouts()
  responses = completions(rollouts, TOKENIZER.decode)
  batch = batch_lib.assess(rollouts, responses, EXAMPLES, rewards=[WeightedReward("right", fails_on("#3"))])
  assert batch.graded.failed.tolist() == [None, "not_finite", None, None] and batch.graded.valid.tolist() == [True, False, True, True]
  batch = batch._replace(counted=batch_lib.counted(batch, skips_truncated=False, whole_groups=False))
  assert batch.counted.tolist() == [True, False, True, True]
  assert [sequence.mask.sum() for sequence in trajectories.trajectories(rollouts, batch.counted)] == [3, 0, 3, 4]
  evidence = trajectories.evidence(batch, rewards=[WeightedReward("right", fails_on("#3"))])
  assert evidence.mask.sum(axis=1).tolist() == [3, 0, 3, 4] and evidence.valid.tolist() == [True, False, True, True]
  row = batch_lib.metrics(batch._replace(advantages=np.ones((4, 4), np.float32), signal=np.array([True, True])))
  assert row["rewards/failed"] == row["rewards/failed/not_finite"] == 1 and "rewards/failed/timeout" not in row
  assert row["reward/right/mean"] == pytest.approx(2 / 3) and row["rollout/counted"] == 0.75


def test_sequences_that_do_not_count():
  batch = make_batch()
  batch = batch._replace(graded=batch.graded._replace(failed=np.array(["died", None, None, None], object)))
  choose = lambda truncated, groups: batch_lib.counted(batch, skips_truncated=truncated, whole_groups=groups).tolist()
  assert choose(False, False) == [False, True, True, True]
  assert choose(False, True) == [False, False, True, True]
  assert choose(True, False) == [False, True, True, False], "the last one was truncated"


def test_verdicts_leave_out_shaping_terms():
  rollouts = make_rollouts()
  terms = [TERMS[0], TERMS[1]._replace(shapes=True)]
  batch = batch_lib.assess(rollouts, completions(rollouts, TOKENIZER.decode), EXAMPLES, rewards=terms)
  assert batch.graded.verdicts.tolist() == [1, 0, 1, 0] and batch.graded.totals[3] == pytest.approx(0.4)
