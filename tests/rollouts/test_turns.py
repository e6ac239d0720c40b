"""Conversations over the decoding engine: exact tokens at any pace, and failures of one sample."""

import functools
import random
import threading
import time

import numpy as np
import pytest

from jaxrl_llm.decoding.engine.loop import DecodingEngine
from jaxrl_llm.decoding.engine.make import make_engine, vocabulary_of
from jaxrl_llm.decoding.engine.programs import make_programs
from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rollouts import arrivals, jobs, trajectories
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts.drawing_queue import DrawingQueue
from jaxrl_llm.rollouts.environments import Environment, Reply
from jaxrl_llm.rollouts.jobs import Conversation, Draws, EngineError, Job
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.rollouts.turns import play_turns
from jaxrl_llm.tasks.sets.environment import environment_reward, turn_steps
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason
from tests.rollouts.talks import BUDGET, COUNTING, EXAMPLES, GROUP, STOPS, TOKENIZER, built, logprobs_of
from tests.runs import column, run_here, tiny_config

SIZE, CONTEXT, CHUNK, SPANS = GROUP * len(EXAMPLES), 4 + BUDGET, 8, 4
DRAWS = Draws(BUDGET, 4, stop_ids=STOPS)
JOB = Job(EXAMPLES, GROUP, [1000 + i for i in range(SIZE)], "batch", DRAWS)


@functools.cache
def programs_of(slots):
  model, params = built()
  sizes = dict(slots=slots, context=CONTEXT, chunk=CHUNK, spans=SPANS, steps=4)
  return make_programs(model, params, cache_dtype="float32", vocabulary=vocabulary_of(TOKENIZER)[0], **sizes)


@pytest.fixture
def engine_of():
  """Returns a function that makes an engine with an empty cache."""
  engines = []

  def make(slots=SIZE, version=0):
    model, params = built()
    options = dict(slots=slots, chunk=CHUNK, spans=SPANS, version=version)
    programs = programs_of(slots)
    engines.append(DecodingEngine(model, programs, programs.weights(params), EngineLimits(CONTEXT, 64), **options))
    return engines[-1]

  yield make
  for engine in engines:
    engine.close()


def begin(engine, environment=COUNTING, job=JOB, **rules):
  return play_turns(engine, job, rules=Rules(environment, **({"max_turns": 5} | rules)), tokenizer=TOKENIZER)


def drawn(talks, job=JOB, **options):
  return arrivals.gather(talks, job, TOKENIZER, prompt_buckets=(4, 8), **options)


def test_tokens_and_log_probabilities_are_those_of_the_draw(engine_of):
  result, metrics = drawn(begin(engine_of()))
  rollouts, several = result.rollouts, 0
  for row, response in enumerate(result.responses):
    own, tokens, start = rollouts.written[row], rollouts.tokens[row], 0
    for number, turn in enumerate(response.turns):
      assert own[start : turn.end + 1].all() and TOKENIZER.decode(tokens[start : turn.end + 1]) == turn.text
      assert turn.reward == (float(number) if tokens[turn.end] in STOPS else 0.0)
      start = turn.end + 1
      if number + 1 < len(response.turns):
        assert tokens[start : start + number + 1].tolist() == [100 + number] * (number + 1)
        assert not own[start : start + number + 1].any()
        start += number + 1
    assert start == rollouts.mask[row].sum() and response.num_tokens == own.sum() == len(response.token_ids)
    assert response.stopped == (len(response.turns) == 3 and tokens[start - 1] in STOPS)
    mask = rollouts.mask[row]
    np.testing.assert_allclose(rollouts.logprobs[row][mask][own[mask]], logprobs_of(rollouts, row)[own[mask]], atol=1e-5)
    assert np.all(rollouts.logprobs[row][~own] == 0)
    several += len(response.turns) == 3
  assert several >= 2, "no conversation had three turns: nothing was tested"
  assert metrics["conversation/turns/max"] == 3 and metrics["conversation/failed"] == 0
  # Each token passes through the model once, but for prompts that are computed twice or copied and
  # for what is drawn behind a stop.
  total = rollouts.mask.sum() + rollouts.prompt_mask.sum()
  assert 0 < metrics["conversation/computed_tokens"] <= total + 3 * sum(len(x.turns) for x in result.responses)
  assert metrics["conversation/cached_tokens"] > 0


@pytest.mark.parametrize("slots, at_once", [(SIZE, None), (2, None), (2, 2)])
def test_delays_and_rows_change_no_token(slots, at_once, engine_of):
  reference, _ = drawn(begin(engine_of()))
  delays = random.Random(slots)

  def step(state, turn):
    time.sleep(delays.choice((0, 0.002, 0.02)))
    return COUNTING.step(state, turn)

  other, _ = drawn(begin(engine_of(slots), Environment(COUNTING.reset, step), JOB._replace(at_once=at_once), num_threads=3))
  for name in ("tokens", "mask", "written", "reasons", "prompts"):
    assert np.array_equal(getattr(other.rollouts, name), getattr(reference.rollouts, name)), name
  np.testing.assert_allclose(other.rollouts.logprobs, reference.rollouts.logprobs, atol=1e-5)
  assert [*other.responses] == [*reference.responses]


def test_seeds_and_turns_tell_draws_apart(engine_of):
  reference, _ = drawn(begin(engine_of()))
  other, _ = drawn(begin(engine_of(), job=(job := JOB._replace(seeds=[*JOB.seeds[:-1], 5]))), job)
  same = [np.array_equal(*rows) for rows in zip(reference.rollouts.tokens, other.rollouts.tokens, strict=True)]
  assert same == [True] * (SIZE - 1) + [False]
  assert len({jobs.turn_seed(seed, turn) for seed in range(50) for turn in range(50)}) == 2500


def test_samples_share_their_opening_and_turns_say_in_which_state_they_began(engine_of):
  job = JOB._replace(group_size=4, seeds=[*range(8)])
  environment = COUNTING._replace(shares_opening=2, state_key=lambda number: f"at {number}")
  responses = drawn(begin(engine_of(), environment, job), job)[0].responses
  words = [[turn.text for turn in response.turns] for response in responses]
  for row in range(0, 8, 2):
    assert words[row][0] == words[row + 1][0] and words[row][1:] != words[row + 1][1:]
  assert len({opening for opening, *_ in words}) > 2
  assert all([turn.state for turn in response.turns] == [f"at {i}" for i in range(len(response.turns))] for response in responses)
  broken = COUNTING._replace(state_key=lambda number: {0: "at 0"}[number])
  failures = [response.failed for response in drawn(begin(engine_of(), broken))[0].responses if len(response.turns) > 1]
  assert failures and set(failures) == {("raised", "the environment: KeyError: 1")}


def test_a_slow_environment_holds_up_only_its_own_conversation(engine_of):
  released, slow = threading.Event(), []

  def step(state, turn):
    if not slow:
      slow.append(turn)
      assert released.wait(60)
    return COUNTING.step(state, turn)

  talks, finished = begin(engine_of(), Environment(COUNTING.reset, step), JOB._replace(at_once=2), num_threads=2), []
  for part in talks:
    finished += part
    if len(finished) == SIZE - 1:
      assert slow
      released.set()
  assert len(finished) == SIZE and finished[-1].turns[0].text == slow[0].text
  reference, _ = drawn(begin(engine_of()))
  result = jobs.to_rollouts(finished, EXAMPLES, TOKENIZER, draws=DRAWS, prompt_buckets=(4,))[0]
  assert np.array_equal(result.tokens, reference.rollouts.tokens)


def test_failures_of_the_environment_cost_one_sample(engine_of):
  block = threading.Event()

  def step(number, turn):
    match turn.num_tokens % 4:
      case 1:
        raise KeyError("no such tool")
      case 2:
        block.wait(60)
      case 3:
        return number, Reply(reward=float("nan"), done=True)
    return number, Reply(reward=1.0, done=True)

  job = JOB._replace(group_size=6, seeds=list(range(12)))
  result, metrics = drawn(begin(engine_of(), Environment(lambda row: 0, step), job, timeout_s=0.3, num_threads=1), job)
  causes = set()
  for response, reason in zip(result.responses, result.rollouts.reasons, strict=True):
    if response.turns[0].end < BUDGET - 1:
      expected = {0: None, 1: "raised", 2: "timeout", 3: "not_finite"}[response.num_tokens % 4]
      assert (response.failed and response.failed[0]) == expected and len(response.turns) == 1
      assert (reason == StopReason.ABORTED) == (expected is not None)
      causes.add(expected)
  assert {"raised", "timeout"} <= causes, causes
  assert any("KeyError: 'no such tool'" in x.failed[1] for x in result.responses if x.failed)
  assert metrics["conversation/failed"] == sum(x.failed is not None for x in result.responses)
  block.set()


def test_budgets_truncate_a_conversation(engine_of):
  result, _ = drawn(begin(engine_of(), max_turns=1))
  assert all(len(response.turns) == 1 and not response.stopped for response in result.responses)
  endless = Environment(reset=lambda row: None, step=lambda state, turn: (state, Reply("ab" * 5)))
  result, _ = drawn(begin(engine_of(), endless, max_turns=99, max_turn_tokens=2))
  assert set(result.rollouts.reasons.tolist()) == {StopReason.LENGTH}
  # A reply that would leave no room for a turn is left out: the last token is the policy's.
  assert all(result.rollouts.written[row][result.rollouts.mask[row]][-1] for row in range(SIZE))


def test_conversations_are_graded_while_others_talk(engine_of):
  released, graded = threading.Event(), []

  def step(state, turn):
    if state == 0 and turn.num_tokens == longest:
      assert released.wait(60)  # Until the others have their rewards.
    return COUNTING.step(state, turn)

  def count(completion, example):
    graded.append(example["prompt"])
    if len(graded) == SIZE - waiting:
      released.set()
    return float(completion.num_tokens)

  reference, _ = drawn(begin(engine_of()))
  firsts = [response.turns[0].end + 1 for response in reference.responses if response.turns[0].end < BUDGET - 1]
  longest = max(firsts)
  waiting = firsts.count(longest)
  result, metrics = drawn(begin(engine_of(), Environment(COUNTING.reset, step)), rewards=[WeightedReward("count", count)])
  known = result.graded.failed == None  # noqa: E711 (an array)
  assert SIZE - waiting <= known.sum() < SIZE and metrics["perf/reward_overlap_s"] > 0
  assert result.graded.totals[known].tolist() == [x.num_tokens for x, own in zip(result.responses, known, strict=True) if own]
  assert [*result.responses] == [*reference.responses]


def test_an_error_of_the_engine_is_one_line(engine_of):
  engine = engine_of()

  def broken(*args):
    raise ValueError("no such\nprogram")

  engine._programs = engine._programs._replace(stretches=dict.fromkeys(engine._programs.stretches, broken))
  with pytest.raises(EngineError, match="^the decoding engine: ValueError: no such program$"):
    drawn(begin(engine))
  with pytest.raises(EngineError, match="^the decoding engine: ValueError: no such program$"):
    drawn(begin(engine))  # As later batches see it.


def test_other_weights_wait_for_conversations_in_flight(engine_of):
  reference, _ = drawn(begin(engine_of()))
  released, model_params = threading.Event(), built()[1]
  waits = Environment(COUNTING.reset, lambda state, turn: (released.wait(60), COUNTING.step(state, turn))[1])
  play = lambda environment: lambda engine, job: begin(engine, environment, job)
  engine = DrawingQueue(lambda params, version: engine_of(version=version), waits=True)
  with engine:
    engine.publish(model_params, 1)
    first = engine.begin(play(waits), JOB)
    timer = threading.Timer(0.2, released.set)
    timer.start()
    engine.publish(model_params, 2)
    second = engine.begin(play(COUNTING), JOB)
    assert released.is_set()
    assert np.array_equal(drawn(first)[0].rollouts.tokens, reference.rollouts.tokens)
    drawn(second)
  engine.publish(model_params, 3)
  talks = engine.begin(play(COUNTING), JOB)
  engine.close()
  talks.wait()


def test_what_is_raised_between_gives_up_the_rest(engine_of):
  block = threading.Event()
  talks = begin(engine_of(), Environment(lambda row: None, lambda state, turn: (block.wait(60), Reply())))

  def between():
    raise KeyError("SIGTERM")

  with pytest.raises(KeyError, match="SIGTERM"):
    drawn(talks, between=between)
  talks.wait()
  block.set()


def test_closing_gives_up_what_is_in_flight(engine_of):
  engine, block = engine_of(), threading.Event()
  talks = begin(engine, Environment(lambda row: None, lambda state, turn: (block.wait(60), Reply())))
  talks.close()
  talks.close()
  talks.wait()
  # All rows are free again.
  reference, _ = drawn(begin(engine))
  assert len(reference.responses) == SIZE
  block.set()


def conversation(sequence, **changes):
  given = dict(prompt=(), tokens=(65, 66), logprobs=(-1.0, -2.0), written=(True, True), turns=(Turn("AB", "", 0.0, 1),))
  return Conversation(sequence, **given | {"reason": StopReason.TOKEN} | changes)


def test_rollouts_take_the_prompts_of_their_conversations():
  others = [conversation(i) for i in range(1, 6)]
  failed = conversation(0, prompt=(1, 2, 3, 4, 5), tokens=(), logprobs=(), written=(), turns=(), reason=StopReason.ABORTED)
  failed = failed._replace(failed=("raised", "the harness: gone"))
  rollouts, responses = jobs.to_rollouts([*others[::-1], failed], EXAMPLES, TOKENIZER, draws=DRAWS, prompt_buckets=(8, 4))
  assert rollouts.prompts.shape == (6, 8) and rollouts.prompts[0][rollouts.prompt_mask[0]].tolist() == [1, 2, 3, 4, 5]
  assert rollouts.prompts[3][rollouts.prompt_mask[3]].tolist() == TOKENIZER.encode_prompt("7")
  assert responses[0].failed and rollouts.mask.sum(axis=1).tolist() == [1, 2, 2, 2, 2, 2] and not rollouts.written[0].any()
  for wrong in (others[:4], [*others, conversation(0, logprobs=(1.0,))], [*others, conversation(0, prompt=[1] * 9)]):
    with pytest.raises(ValueError, match="expected"):
      jobs.to_rollouts(wrong, EXAMPLES, TOKENIZER, draws=DRAWS, prompt_buckets=(8, 4))


def test_the_engine_of_a_queue_compiles_nothing_twice():
  model, params = built()
  made = []

  def make(params, version):
    made.append(version)
    return make_engine(model, params, slots=SIZE, context=CONTEXT, max_requests=64, chunk=CHUNK, spans=SPANS, version=version)

  with DrawingQueue(make, waits=True) as engine:
    for version in (0, 0, 1):
      engine.publish(params, version)
      drawn(engine.begin(lambda engine, job: begin(engine, job=job), JOB))
  assert made == [0]


def test_narrow_programs_are_used_only_if_they_have_the_same_bits(engine_of, monkeypatch):
  reference, _ = drawn(begin(engine_of()))
  monkeypatch.setattr("jaxrl_llm.decoding.engine.programs.stretch_widths", lambda slots, *_: (slots, 3))
  programs, calls = programs_of.__wrapped__(SIZE), []

  def noted(*args):
    calls.append(len(args[-1]))
    return programs.stretches[3](*args)

  def other(*args):
    cache, own = noted(*args)
    return cache, own._replace(logprobs=np.nextafter(np.asarray(own.logprobs), np.float32(-np.inf)))

  for narrow in (noted, other):
    changed = programs._replace(stretches={**programs.stretches, 3: narrow})
    monkeypatch.setattr("tests.rollouts.test_turns.programs_of", lambda slots, changed=changed: changed)
    calls.clear()
    engine = engine_of()
    result, _ = drawn(begin(engine))
    assert np.array_equal(result.rollouts.logprobs, reference.rollouts.logprobs)
    if narrow is other:
      assert calls == [3] and engine._widths == [SIZE]


def test_nothing_is_learned_from_replies_and_turns_are_steps(engine_of):
  result, _ = drawn(begin(engine_of()))
  rollouts, responses = result.rollouts, result.responses
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


def test_a_stop_text_ends_only_its_own_turn(engine_of):
  """A turn of the policy ends with one of these letters, and its message continues."""
  letters = tuple(chr(i) for i in range(65, 97))
  job = JOB._replace(draws=DRAWS._replace(stop_ids=(), stops=letters))
  result, _ = drawn(begin(engine_of(), job=job), job)
  assert max(len(response.turns) for response in result.responses) == 3
  for response in result.responses:
    assert all(turn.text[-1] in letters and not set(turn.text[:-1]) & set(letters) for turn in response.turns[:-1])
  assert any(len(turn.text) > 1 for response in result.responses for turn in response.turns), "every turn ended at once"


@pytest.mark.slow
def test_a_run_with_a_tool_logs_its_conversations(tmp_path):
  changes = {"warm_start.num_steps": 4, "num_steps": 2, "eval.every": 2, "log.tensorboard": False, "warm_start.batch_size": 8}
  summary = run_here(tiny_config("tools", changes), tmp_path / "run")
  assert summary["status"] == "finished"
  assert {"samples.jsonl", "report.html", "checkpoints"} <= {path.name for path in (tmp_path / "run").iterdir()}
  of = lambda name: column(tmp_path / "run", name)
  assert all(x >= 1 for x in of("conversation/turns/mean"))
  assert len(of("conversation/computed_tokens")) == 2 and all(x > 0 for x in of("conversation/computed_tokens"))
  assert max(of("rollout_corr/logprob_abs_diff/max")) <= 1e-5
  assert "reward/environment/mean" in (tmp_path / "run" / "metrics.jsonl").read_text()
