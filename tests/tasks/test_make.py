"""Tasks by name, and messages for wrong settings."""

import importlib.util

import pytest

from jaxrl_llm import rewards, tasks
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.tasks.sets import drills, figures, products, word_problems


@pytest.mark.parametrize("levels", [(1,), [3, 2]])
def test_levels_filter_every_split(task, data_dir, levels):
  some = tasks.make("arithmetic", levels=levels, data_dir=data_dir)
  for name in ("train", "test", "demonstrations"):
    assert list(getattr(some, name)) == [row for row in getattr(task, name) if row["level"] in levels]
    assert len(getattr(some, name))


def test_generated_problems_have_no_report_even_with_other_test_levels(data_dir):
  assert tasks.make("arithmetic", levels=(1,), test_levels=(2,), data_dir=data_dir).report is None


@pytest.mark.parametrize("levels", [(), (4,), (1, 0)])
def test_unknown_or_no_levels(levels, tmp_path):
  with pytest.raises(ValueError, match=r"^task.levels: found .*expected one or more of \(1, 2, 3\)$"):
    tasks.make("arithmetic", levels=levels, data_dir=tmp_path)
  assert list(tmp_path.iterdir()) == []  # The error comes before anything is built.


@pytest.fixture
def few(monkeypatch, tmp_path, data_dir):
  """Data folder of each task, whose dataset is small or already built."""
  monkeypatch.setattr(word_problems, "NUM_PROBLEMS", 60)
  monkeypatch.setattr(products, "_PROBLEMS_PER_LEVEL", 60)
  monkeypatch.setattr(drills, "_PROBLEMS_PER_LEVEL", 60)
  monkeypatch.setattr(figures, "PROBLEMS_PER_ANSWER", 2)
  return dict.fromkeys(tasks.TASKS, tmp_path) | {"arithmetic": data_dir}


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task(name, few):
  task = tasks.make(name, data_dir=few[name], pictures=PictureConfig())
  assert task.name == name and task.rewards and set(task.rewards) <= set(rewards.REWARDS)
  assert isinstance(task.tokenizer, ByteTokenizer)
  for source in (task.train, task.test, task.demonstrations):
    assert source[0].keys() >= {"question", "answer", "level", "prompt", "response"}


class OtherTokenizer(ByteTokenizer):
  """Stand-in for a checkpoint's tokenizer."""


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_task_uses_the_policys_tokenizer(name, monkeypatch):
  row = {"question": "1+1", "answer": "2", "level": {"largest": 4, "times": 1}.get(name, 2), "response": ""}
  splits = {split: [row] for split in ("train", "test", "demonstrations")}
  monkeypatch.setattr(tasks.storage, "load_splits", lambda *args, **settings: splits)
  tokenizer = OtherTokenizer()
  task = tasks.make(name, tokenizer=tokenizer, pictures=PictureConfig())
  assert task.tokenizer is tokenizer
  assert task.step_rewards is None  # A verifier of steps reads bytes.
  assert task.train[0] == row | {"prompt": task.train[0]["prompt"]} and "1+1" in task.train[0]["prompt"]


def test_names_and_settings_are_checked_without_loading_anything(tmp_path):
  sets = {"gsm8k", "math", "dapo_math", "aime24", "aime25", "hmmt25", "livecodebench", "codeforces", "zebralogic", "champ", "human_eval"}
  assert sets | {"file", "mixture"} < set(tasks.names())
  (tmp_path / "a.csv").write_text("a")
  assert list(tasks.task_problems("file", {"path": tmp_path / "a.csv", "reward": "maths"})) == []


@pytest.mark.parametrize(
  "name, settings, start, end",
  [
    ("arithmetic", {"path": "x"}, "task.path: found 'x', expected None, because task arithmetic", "takes no settings of its own"),
    ("livecodebench", {"afer": "2025-01-01"}, "task.afer: found '2025-01-01', expected None", "did you mean 'after'?"),
    ("livecodebench", {"after": "tomorrow"}, "task.after: found 'tomorrow'", "such as 2024-08-01"),
    ("gsm8", {}, "task.name: found 'gsm8', expected one of arithmetic, ", "gym:NAME; did you mean 'gsm8k'?"),
    ("go", {}, "task.name: found 'go', expected one of arithmetic, ", "gym:NAME"),
    ("", {}, "task.name: found '', expected one of arithmetic, ", "gym:NAME"),
    ("file", {}, "task.path: found None", "such as problems.jsonl"),
    ("file", {"path": "no.jsonl"}, "no.jsonl: found no such file", ""),
    ("gsm8k", {"prompt_template": "{"}, "task.prompt_template: found '{'", ""),
    ("mixture", {"parts": ("gsm8=1",)}, "task.name: found 'gsm8'", "did you mean 'gsm8k'?"),
    ("gym:chain_sum", {"config": "{"}, "task.config: found '{'", ""),
  ],
)
def test_one_line_for_each_wrong_setting(name, settings, start, end):
  (line,) = map(str, tasks.task_problems(name, settings))
  assert line.startswith(start) and line.endswith(end) and "\n" not in line


@pytest.mark.parametrize(
  ("name", "settings"), [("figures", {}), ("blank_figures", {}), ("mathvision", {}), ("file", {"images_column": "images"})]
)
def test_without_pillow_a_task_of_pictures_says_how_to_get_it(name, settings, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  (line,) = tasks.task_problems(name, settings)
  assert str(line) == "pictures need the package pillow: pip install 'jaxrl-llm[vision]'"
