"""Tasks by name, and what a wrong setting says."""

import pytest

from jaxrl_llm import tasks


@pytest.mark.parametrize("levels", [(1,), [3, 2]])
def test_levels_filter_every_split(task, data_dir, levels):
  some = tasks.make("arithmetic", levels=levels, data_dir=data_dir)
  for name in ("train", "test", "demonstrations"):
    assert list(getattr(some, name)) == [row for row in getattr(task, name) if row["level"] in levels]
    assert len(getattr(some, name))


@pytest.mark.parametrize("levels", [(), (4,), (1, 0)])
def test_unknown_or_no_levels(levels, tmp_path):
  with pytest.raises(ValueError, match=r"^task.levels: found .*expected one or more of \(1, 2, 3\)$"):
    tasks.make("arithmetic", levels=levels, data_dir=tmp_path)
  assert list(tmp_path.iterdir()) == []  # Said before anything is built.


@pytest.mark.parametrize("name, hint", [("arithmetics", True), ("go", False), ("", False)])
def test_unknown_name(name, hint):
  with pytest.raises(ValueError, match="^task.name: found .*expected one of arithmetic") as caught:
    tasks.make(name)
  assert ("did you mean 'arithmetic'?" in str(caught.value)) == hint


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_task(name, data_dir):
  task = tasks.make(name, data_dir=data_dir)
  assert task.name == name and task.rewards
  for source in (task.train, task.test, task.demonstrations):
    assert source[0].keys() >= {"question", "answer", "level", "prompt", "response"}
