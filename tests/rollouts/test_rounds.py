"""Conversations: drawn tokens are kept, replies are not learned, and failures cost one sample."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.sampler import make_sampler, make_stop_table
from jaxrl_llm.devices.mesh import make_mesh
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import sweeps, trajectories
from jaxrl_llm.rollouts.arrivals import gather
from jaxrl_llm.rollouts.environments import Environment, Reply
from jaxrl_llm.rollouts.jobs import Draws, Job
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.rollouts.sweeps import Sweeps
from jaxrl_llm.tasks.sets.environment import environment_reward, turn_steps
from jaxrl_llm.types import StopReason
from tests.marks import few
from tests.runs import column, run_here, tiny_config

TOKENIZER, GROUP, BUDGET = ByteTokenizer(), 3, 24
STOPS = (*range(60), TOKENIZER.eos_id)  # Many, so that a random policy ends its turns.
EXAMPLES = [{"prompt": "12", "answer": "3"}, {"prompt": "7", "answer": "4"}]


def told(number, turn):
  """Replies with a few bytes, different each time, and ends after the third turn."""
  return number + 1, Reply((100 + number,) * (number + 1), reward=float(number), done=number == 2)


COUNTING = Environment(reset=lambda row: 0, step=told)


@functools.cache
def built():
  model = make_model(preset("nano", vocab_size=TOKENIZER.vocab_size))
  rng = np.random.default_rng(0)
  scale = lambda path, p: jnp.asarray((path[-1].key == "scale") + 0.2 * rng.standard_normal(p.shape), jnp.float32)
  return model, jax.tree_util.tree_map_with_path(scale, jax.eval_shape(model.init, jax.random.key(0)))


@functools.cache
def sampler(*, stops=None, **settings):
  """Makes a sampler.

  With `stops`, a turn ends after one of these letters, and the policy's message continues.
  """
  if stops:
    settings |= {"stop_table": make_stop_table(TOKENIZER.token_bytes(), list(stops)), "stop_ids": ()}
  given = dict(group_size=GROUP, max_new_tokens=BUDGET, stop_ids=STOPS, pad_id=TOKENIZER.pad_id) | settings
  return jax.jit(make_sampler(built()[0], **given))


def talk(environment=COUNTING, settings=None, **rules):
  """Draws the conversations of one batch on one device."""
  mesh = make_mesh(devices=jax.devices()[:1])
  rules = Rules(environment, **({"max_turns": 5} | rules))
  job = Job(EXAMPLES, GROUP, range(len(EXAMPLES) * GROUP), "", Draws(BUDGET, 4, stop_ids=STOPS))
  options = dict(sample=sampler(**(settings or {})), tokenizer=TOKENIZER, rules=rules, mesh=mesh, prompt_buckets=(4,))
  drawn, _ = gather(Sweeps(built()[1], job, **options), job, TOKENIZER, prompt_buckets=(4,))
  return drawn.rollouts, drawn.responses


def logprobs_of(rollouts, row):
  """Returns the log-probability of every token of a response, from one forward pass."""
  _, params = built()
  prompt = rollouts.prompts[row][rollouts.prompt_mask[row]]
  real = np.concatenate([prompt, rollouts.tokens[row][rollouts.mask[row]]])
  # One shape for all responses: a causal model does not see the padding behind them.
  ids = np.zeros((1, rollouts.prompts.shape[1] + rollouts.tokens.shape[1]), np.int32)
  ids[0, : len(real)] = real
  logprobs = np.asarray(jax.nn.log_softmax(whole_logits()(params, ids, np.arange(ids.shape[1])[None], np.ones_like(ids))[0]))
  return np.array([logprobs[t - 1, real[t]] for t in range(len(prompt), len(real))])


@functools.cache
def whole_logits():
  return jax.jit(built()[0].logits)


def test_the_samplers_log_probabilities_equal_the_learners():
  rollouts, responses = talk()
  several = 0
  for row, response in enumerate(responses):
    own = rollouts.written[row][rollouts.mask[row]]
    several += len(response.turns) == 3
    np.testing.assert_allclose(rollouts.logprobs[row][rollouts.mask[row]][own], logprobs_of(rollouts, row)[own], atol=1e-5)
    assert np.all(rollouts.logprobs[row][~rollouts.written[row]] == 0)
  assert several >= 2, "no conversation had three turns: nothing was tested"


def test_replies_are_between_the_turns_and_do_not_count_as_written():
  rollouts, responses = talk()
  for row, response in enumerate(responses):
    tokens, own, start = rollouts.tokens[row], rollouts.written[row], 0
    for number, turn in enumerate(response.turns):
      assert own[start : turn.end + 1].all() and TOKENIZER.decode(tokens[start : turn.end + 1]) == turn.text
      assert turn.reward == (float(number) if tokens[turn.end] in STOPS else 0.0)
      start = turn.end + 1
      if number + 1 < len(response.turns):
        size = number + 1
        assert tokens[start : start + size].tolist() == [100 + number] * size and not own[start : start + size].any()
        start += size
    assert start == rollouts.mask[row].sum() and response.num_tokens == own.sum() == len(response.token_ids)
    assert response.stopped == (len(response.turns) == 3 and tokens[start - 1] in STOPS)


@pytest.mark.parametrize("slots", few([1, 4], 1))
def test_the_number_of_slots_changes_nothing(slots):
  reference, _ = talk()
  rollouts, _ = talk(settings={"slots": slots})
  assert np.array_equal(rollouts.tokens, reference.tokens) and np.array_equal(rollouts.written, reference.written)
  np.testing.assert_allclose(rollouts.logprobs, reference.logprobs, atol=1e-5)


def test_a_stop_text_ends_only_its_own_turn():
  letters = "".join(chr(i) for i in range(65, 123))
  rollouts, responses = talk(settings={"stops": letters})
  assert max(len(response.turns) for response in responses) == 3
  for response in responses:
    assert all(len(turn.text) > 0 for turn in response.turns)
    assert any(len(turn.text) > 1 for turn in response.turns), "every turn ended at once"
  again, _ = talk(settings={"stops": letters, "slots": 2})
  assert np.array_equal(again.tokens, rollouts.tokens)


def test_budgets_truncate_a_conversation():
  rollouts, responses = talk(max_turns=1)
  assert all(len(response.turns) == 1 and not response.stopped for response in responses)
  assert set(rollouts.reasons.tolist()) == {StopReason.LENGTH}
  endless = Environment(reset=lambda row: None, step=lambda state, turn: (state, Reply("ab" * 5)))
  rollouts, responses = talk(endless, max_turns=99)
  assert not any(response.stopped for response in responses)
  # A reply that would leave no room for a turn is left out: the last token is the policy's.
  assert all(rollouts.written[row][rollouts.mask[row]][-1] for row in range(len(responses)))
  rollouts, responses = talk(endless, max_turns=99, max_turn_tokens=2)
  assert all(turn.end - start < 2 for x in responses for start, turn in zip((0, *(t.end + 11 for t in x.turns)), x.turns, strict=False))


def test_an_environment_that_fails_affects_only_its_own_conversation():
  def step(number, turn):
    if turn.num_tokens % 2:
      raise KeyError("no such tool")
    return number, Reply(reward=float("nan") if turn.num_tokens % 4 else 1.0, done=True)

  _, responses = talk(Environment(reset=lambda row: 0, step=step))
  complete = [x for x in responses if x.turns[0].end < BUDGET - 1]
  assert complete
  for response in complete:
    expected = {1: "raised", 3: "raised", 2: "not_finite", 0: None}[response.num_tokens % 4]
    assert (response.failed and response.failed[0]) == expected
  assert {x.failed and x.failed[0] for x in complete} > {"raised"}
  assert any("KeyError: 'no such tool'" in x.failed[1] for x in complete if x.failed)


def test_a_reply_that_never_comes_times_out():
  def step(state, turn):
    if state == "12":
      time.sleep(30)
    return state, Reply(done=True)

  started = time.monotonic()
  _, responses = talk(Environment(reset=lambda row: row["prompt"], step=step), timeout_s=0.2, num_threads=1)
  assert time.monotonic() - started < 20
  causes = [response.failed and response.failed[0] for response in responses]
  assert "timeout" in causes[:GROUP] and set(causes[GROUP:]) == {None}


def test_nothing_is_learned_from_replies_and_turns_are_steps():
  rollouts, responses = talk()
  examples = [x for x in EXAMPLES for _ in range(GROUP)]
  terms = [WeightedReward("environment", environment_reward, steps=turn_steps), WeightedReward("two", lambda completion, example: 2.0)]
  batch = batch_lib.assess(rollouts, responses, EXAMPLES, rewards=terms)
  assert len(examples) == len(batch.examples)
  evidence = trajectories.evidence(batch, rewards=terms, by_steps=True)
  assert np.array_equal(evidence.mask, rollouts.written)
  for row, response in enumerate(responses):
    ends = [turn.end for turn in response.turns]
    assert np.flatnonzero(evidence.step_ends[row]).tolist() == ends
    *others, last = evidence.step_rewards[row][ends].tolist()
    assert others == [turn.reward for turn in response.turns[:-1]] and last == 2.0 + response.turns[-1].reward
  for row, trajectory in enumerate(trajectories.trajectories(rollouts)):
    prompt = int(rollouts.prompt_mask[row].sum())
    assert trajectory.mask[:prompt].sum() == 0
    assert np.array_equal(trajectory.mask[prompt:], rollouts.written[row][rollouts.mask[row]])


TOOLS = {"warm_start.num_steps": 4, "num_steps": 2, "eval.every": 2, "log.tensorboard": False, "warm_start.batch_size": 8}


@pytest.mark.slow
def test_a_run_with_a_tool_logs_its_conversations(tmp_path):
  with pytest.MonkeyPatch.context() as patch:
    # The decoding engine draws everything: the sampler's programs never compile.
    patch.setattr(sweeps, "_dispatch", lambda *args, **options: pytest.fail("the batch sampler was called"))
    summary = run_here(tiny_config("tools", TOOLS), tmp_path / "run")
  assert summary["status"] == "finished"
  assert {"samples.jsonl", "report.html", "checkpoints"} <= {path.name for path in (tmp_path / "run").iterdir()}
  of = lambda name: column(tmp_path / "run", name)
  assert all(x >= 1 for x in of("conversation/turns/mean"))
  assert len(of("conversation/computed_tokens")) == 2 and all(x > 0 for x in of("conversation/computed_tokens"))
  assert max(of("rollout_corr/logprob_abs_diff/max")) <= 1e-5
  assert "reward/environment/mean" in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.exhaustive
def test_eight_devices_draw_the_conversations_of_two(tmp_path):
  """The batch sampler draws them, because the weights are spread over the devices."""
  one, eight = (tmp_path / name for name in ("two", "eight"))
  changes = TOOLS | {"num_steps": 1, "eval.every": 1}
  changes |= {"mesh.fsdp": 2}
  run_here(tiny_config("tools", changes), one, devices=2)
  run_here(tiny_config("tools", changes), eight, devices=8)
  assert column(one, "rollout/tokens_sha256") == column(eight, "rollout/tokens_sha256")
  np.testing.assert_allclose(column(one, "actor/pg_loss"), column(eight, "actor/pg_loss"), atol=1e-5)
