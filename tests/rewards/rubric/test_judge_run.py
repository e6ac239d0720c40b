"""Runs with a judge: what is logged, a kill in the middle, and a judge that is down."""

import threading

import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards import WeightedReward, grade
from jaxrl_llm.rewards.from_config import make_rewards
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.rewards.rubric import Judge
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import trajectories
from jaxrl_llm.rollouts.arrivals import drawn_of, wait_for
from jaxrl_llm.rollouts.jobs import Conversation, Draws, Job
from jaxrl_llm.run.steps import learn as learn_lib
from jaxrl_llm.tasks import Task
from jaxrl_llm.types import StopReason
from tests.rewards.rubric.fake import Reply, completion, rubric, scores, serving, written
from tests.rollouts.players import Handing, completions
from tests.rollouts.test_batch import EXAMPLES, make_rollouts
from tests.runs import call, flags, rows, run_here, tiny_config

KEY = "sk-Secret-0123456789"
SHORT = {
  "warm_start.num_steps": 0, "num_steps": 1, "log.tensorboard": False, "eval.num_prompts": 8, "eval.batch_prompts": 8,
  "rollout.num_prompts": 4, "learner.row_buckets": (8,),
}  # fmt: skip


def terms_of(**fields):
  """Makes the terms of a config on a task without problems."""
  return make_rewards(task_of("final_answer"), tiny_config(overrides=fields))


def task_of(reward):
  return Task("sums", ByteTokenizer(), (), (), (), (reward,))


def test_a_config_names_judges_beside_other_rewards(tmp_path):
  path, other = (written(tmp_path / f"{name}.json", "http://localhost:1/v1") for name in ("a", "b"))
  terms = terms_of(**{"reward.terms": (f"judge:{path}=0.5", "tags=0", f"judge:{other}=0")})
  assert [(x.name, x.weight, x.monitors) for x in terms] == [
    ("final_answer", 1, False), ("judge/a", 0.5, False), ("judge/a/correct", 0, True), ("judge/a/clear", 0, True), ("tags", 0, True),
    ("judge/b", 0, True), ("judge/b/correct", 0, True), ("judge/b/clear", 0, True),
  ]  # fmt: skip
  twin = written(tmp_path / "twin.json", "http://localhost:1/v1", name="a")
  with pytest.raises(ValueError, match="config.reward.terms: found 'judge/a' twice, expected another name in one of the rubrics"):
    terms_of(**{"reward.terms": (f"judge:{path}", f"judge:{twin}")})


def test_a_judge_can_be_the_verifier_of_a_task(tmp_path):
  reply = lambda number, body: scores("yes" if "four" in body["messages"][1]["content"] else "no", 1)
  with serving(reply) as endpoint:
    path = written(tmp_path / "a.json", endpoint.url)
    (verifier,) = make_rewards(task_of(f"judge:{path}"), tiny_config())
    with Grader([verifier]) as call:
      graded = grade([verifier], [completion("four"), completion("five")], [{"question": "2+2?"}] * 2, call=call)
  assert verifier.name == "judge/a" and graded.totals.tolist() == [0.75, 0]


def test_a_judge_is_asked_about_finished_responses_and_none_is_waited_for():
  """The whole batch is graded once all is drawn, by judgements of which most are known by then."""
  over, ids = threading.Event(), [65, 66]
  talks = [Conversation(i, (), ids, [-1.0] * 2, [True] * 2, (), StopReason.TOKEN, text=f"AB{i}") for i in (2, 3, 0, 1)]
  job = Job(EXAMPLES, 2, range(4), "", Draws(4, 8))
  with serving(lambda number, body: scores("yes" if over.wait(20) else "no")) as endpoint:
    judge = Judge(rubric(endpoint.url))
    terms = [WeightedReward("right", lambda completion, example: 1.0), WeightedReward("judge", None, 2.0, service=judge)]
    gathered = wait_for(Handing(talks[:1], talks[1:3], talks[3:]), job, rewards=terms)
    assert gathered.graded is None and judge.metrics()["judge/test/calls"] <= 3
    over.set()
    drawn, _ = drawn_of(gathered, job, ByteTokenizer(), np.arange(4), prompt_buckets=(8,))
    batch = batch_lib.assess(drawn.rollouts, drawn.responses, drawn.examples, rewards=terms, graded=drawn.graded)
    judge.close()
  assert batch.graded.totals.tolist() == [3.0] * 4 and len(endpoint.bodies) == 4


def test_what_a_monitor_does_not_know_is_in_no_mean():
  rollouts = make_rollouts()
  responses = completions(rollouts, ByteTokenizer().decode)
  fails = lambda completion, example: 1 / 0 if "9" in completion.text else 1.0
  rewards = [WeightedReward("right", lambda completion, example: 1.0), WeightedReward("seen", fails, 0.0, monitors=True)]
  batch = batch_lib.assess(rollouts, responses, EXAMPLES, rewards=rewards)
  row = batch_lib.metrics(batch._replace(advantages=np.zeros(rollouts.tokens.shape, np.float32), signal=np.zeros(2, bool)))
  assert row["reward/seen/mean"] == 1 and row["reward/seen/unknown"] == 2 and row["rewards/failed"] == 0
  assert trajectories.evidence(batch, rewards=rewards).parts.tolist() == [[1.0] * 4]


@pytest.mark.slow
def test_a_run_that_was_killed_while_learning_gets_the_same_rewards(tmp_path, monkeypatch):
  """The endpoint gives no score twice, and its every tenth answer is bad."""
  learn_from, batches, draws = train.learn_from, [], iter(range(1, 100_000))
  reply = lambda number, body: Reply(status=500) if number % 10 == 9 else scores("no", 1 + next(draws) * 1e-4)
  with serving(reply) as endpoint:
    path = written(tmp_path / "help.json", endpoint.url)
    config = tiny_config(overrides=SHORT | {"reward.terms": (f"judge:{path}=0.5",)})

    def learn(run, batch, step, **options):
      batches.append((batch.graded, run.grader.metrics()))
      run.experiment.rewards[1].service._counts["calls"] += 7
      return learn_from(run, batch, step, **options)

    def update(run, batch, step):
      # No program, which would take longer to compile than all the rest.
      if len(batches) == 1:
        raise KeyboardInterrupt
      return {}

    monkeypatch.setattr(train, "learn_from", learn)
    monkeypatch.setattr(learn_lib, "update", update)
    monkeypatch.setattr(train, "show_samples", lambda *args: None)
    monkeypatch.setattr(train, "token_scores", lambda *args: None)
    monkeypatch.setattr(train, "evaluate", lambda *args: 0.0)
    with pytest.raises(KeyboardInterrupt):
      run_here(config, tmp_path / "run")
    num_calls = len(endpoint.bodies)
    run_here(config, tmp_path / "run")
    assert len(endpoint.bodies) == num_calls + 1  # The first question of an attempt.
  (before, asked), (after, kept) = batches
  assert before.valid.all() and len(set(before.parts["judge/help"].tolist())) > 1
  assert {name: x.tolist() for name, x in before.parts.items()} == {name: x.tolist() for name, x in after.parts.items()}
  assert before.totals.tolist() == after.totals.tolist()
  assert asked["judge/help/calls"] > 0 and asked["judge/help/retries"] > 0
  assert kept["judge/help/calls"] == 0 and kept["judge/help/cache_hits"] == len(after.totals)
  (row,) = rows(tmp_path / "run", "rl")
  assert row["reward/judge/help/clear/mean"] == pytest.approx(float(after.parts["judge/help/clear"].mean()))
  assert row["rewards/failed"] == 0 and row["judge/help/calls"] == 7


@pytest.mark.slow
def test_a_judge_that_is_down_is_one_line_and_the_key_is_nowhere(tmp_path, monkeypatch):
  monkeypatch.setenv("JUDGE_KEY", KEY)
  with serving() as endpoint:
    path = written(tmp_path / "help.json", endpoint.url, api_key_env="JUDGE_KEY")
  overrides = {"reward.terms": f"('judge:{path}=0.5',)", "log.tensorboard": False}
  done = call("--config=configs/gspo.py:tiny", f"--workdir={tmp_path / 'run'}", *flags(overrides))
  errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
  assert done.returncode == 2 and len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
  assert f"error: judge {path}: found no judgement of a first question (judge_unreachable: {endpoint.url}: " in errors[0]
  files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
  assert not [text for text in [*files, done.stdout.encode(), done.stderr.encode()] if KEY.encode() in text]
