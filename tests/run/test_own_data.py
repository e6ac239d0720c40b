"""Training on a user's own file; rewards that may hang run in workers and fail one sample each."""

import json

import pytest

from jaxrl_llm import train
from jaxrl_llm.config import check
from jaxrl_llm.rewards import RewardSpec, WeightedReward, weighted
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.text_types import Completion
from tests import runs
from tests.runs import quick, rows, run_here, tiny_config

SMALL = {
  "task.name": "file", "task.levels": None, "num_steps": 2, "warm_start.num_steps": 2, "warm_start.batch_size": 8,
  "rollout.prompt_buckets": (8,), "eval.every": 2, "eval.num_prompts": 8, "eval.batch_prompts": 8, "log.tensorboard": False,
  "reward.workers": 1,
}  # fmt: skip


@pytest.fixture
def problems(tmp_path):
  """A file of sums whose demonstrations end with a number, and three unusable rows."""
  lines = [json.dumps({"q": f"{a}+{b}", "gold": str(a + b), "why": f"#### {a + b}"}) for a in range(8) for b in range(8)]
  lines += [json.dumps({"q": "1+9", "gold": None}), '{"q": broken', json.dumps({"q": "0+0", "gold": "0", "why": "x"})]
  path = tmp_path / "mine.jsonl"
  path.write_text("\n".join(lines) + "\n")
  return path


def config_of(path, **changes):
  columns = {"task.question_column": "q", "task.answer_column": "gold", "task.response_column": "why", "task.path": str(path)}
  return tiny_config(overrides=SMALL | columns | {name.replace("__", "."): value for name, value in changes.items()})


@pytest.mark.slow
def test_a_file_trains_and_its_bad_rows_are_counted(problems, tmp_path):
  summary = run_here(config_of(problems, task__reward="maths"), tmp_path / "run")
  assert summary["status"] == "finished"
  assert (summary["data"]["read"], summary["data"]["kept"]) == (67, 64) and sum(summary["data"]["dropped"].values()) == 3
  steps = rows(tmp_path / "run", "rl")
  assert [row["rewards/failed"] for row in steps] == [0, 0] and all("reward/maths/mean" in row for row in steps)


@pytest.mark.exhaustive
def test_a_run_does_not_resume_with_other_problems(problems, tmp_path):
  config = config_of(problems, warm_start__num_steps=0, num_steps=1)
  run_here(config, tmp_path / "run")
  problems.write_text(problems.read_text().replace("7+7", "7+70"))
  runs.load_once.cache_clear()
  with quick(), pytest.raises(ValueError, match="config.task: found other problems than those"):
    train.start_run(config, tmp_path / "run")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"task__path": None}, "task.path"),
    ({"task__path": "no/such.jsonl"}, "no/such.jsonl"),
    ({"task__size": 3}, "config.task.size: found 3, expected None, because task file does not read it"),
    ({"task__reward": "math"}, "did you mean 'maths'"),
    ({"task__test_source": "x"}, "config.task.test_source"),
    ({"sandbox__backend": "dockr"}, "did you mean 'docker'"),
  ],
)
def test_bad_settings_are_one_line_each(problems, changes, message):
  (line,) = check.config_problems(config_of(problems, **changes))
  assert message in line


def user(text):
  return {"role": "user", "content": text}


SUMS = [(f"{a}+{b}=", a + b) for a in range(6) for b in range(6)]
PUBLISHED = {
  "verl": [
    {"data_source": "sums", "prompt": [user(q)], "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(a)},
     "extra_info": {"split": "train", "index": i}} for i, (q, a) in enumerate(SUMS)],
  "trl": [{"prompt": [{"role": "system", "content": "Add."}, user(q)], "solution": f"$\\boxed{{{a}}}$"} for q, a in SUMS],
  "trl_messages": [{"messages": [user(q), {"role": "assistant", "content": str(a)}]} for q, a in SUMS],
  "olympiadbench": [
    {"id": i, "question": q, "solution": [f"It is {a}."], "final_answer": [str(a)], "context": None, "is_multiple_answer": False}
    for i, (q, a) in enumerate(SUMS)],
  "mmlu": [
    {"question": "Which one is it?", "subject": "arithmetic", "choices": [f"{q}{x}" for x in (a + 1, a, a + 2, a + 3)], "answer": 1 + i % 3}
    for i, (q, a) in enumerate(SUMS)],
}  # fmt: skip
REWARDS = {"verl": "final_number", "trl": "maths", "trl_messages": "final_number", "olympiadbench": "final_number", "mmlu": "choice"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_formats_train_as_they_are(name, tmp_path):
  import pyarrow
  from pyarrow import parquet

  parquet.write_table(pyarrow.Table.from_pylist(PUBLISHED[name]), tmp_path / "train.parquet")
  # The same shapes for all, so that they are compiled once.
  sizes = {"rollout.prompt_buckets": (80,), "learner.row_tokens": 104, "learner.row_buckets": (16,), "warm_start.num_steps": 0}
  config = tiny_config(overrides=SMALL | sizes | {"task.path": str(tmp_path / "train.parquet")})
  assert not check.config_problems(config)
  summary = run_here(config, tmp_path / "run")
  assert summary["status"] == "finished" and (summary["data"]["read"], summary["data"]["kept"]) == (36, 36)
  assert [f"reward/{REWARDS[name]}/mean" in row for row in rows(tmp_path / "run", "rl")] == [True, True]


HOSTILE = "import os, time\n\ndef judge(completion, example):\n" + "".join(
  f"  if completion.text == {name!r}: {what}\n"
  for name, what in {"hang": "time.sleep(60)", "exit": "os._exit(0)", "nan": "return float('nan')", "raise": "raise OSError"}.items()
) + "  return 0.5\n"


def test_a_users_function_is_called_in_a_worker(tmp_path, monkeypatch):
  (tmp_path / "own_reward.py").write_text(HOSTILE)
  monkeypatch.syspath_prepend(str(tmp_path))
  term = weighted("own", RewardSpec("imported", {"path": "own_reward:judge"}))
  texts = ["fine", "hang", "exit", "nan", "raise", "fine"]
  completions = [Completion(text, (1,), 1, True) for text in texts]
  with Grader([term], num_workers=1, timeout_s=1.0) as grader:
    outcomes = grader(term, completions, [{}] * len(texts))
    assert grader.pool.num_workers == 1, "a worker that died was replaced"
  assert [x.cause for x in outcomes] == [None, "timeout", "died", "not_finite", "raised", None]
  assert outcomes[0].value == outcomes[-1].value == 0.5


def test_each_row_of_a_mixture_is_graded_by_its_own_verifier():
  one, two = (WeightedReward(name, lambda completion, example, value=value: value) for name, value in (("one", 1.0), ("two", 2.0)))
  grader = Grader([term := WeightedReward("verifier", one.fn, routes=(one, two))])
  outcomes = grader(
    term, [Completion("", (1,), 1, True)] * 3, [{"reward": "two"}, {"reward": "one"}, {"reward": "two"}]
  )
  assert grader.pool is None and [x.value for x in outcomes] == [2.0, 1.0, 2.0]


def test_a_function_that_always_fails_stops_the_run_and_says_why(problems, tmp_path, monkeypatch):
  (tmp_path / "broken_reward.py").write_text("def judge(completion, example):\n  return example['golden']\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match="found none for any of .* responses.*KeyError: 'golden'"):
    run_here(config_of(problems, task__reward="broken_reward:judge", eval__num_prompts=1, warm_start__num_steps=0), tmp_path / "run")
