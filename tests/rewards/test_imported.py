"""User functions as rewards."""

import pytest

from jaxrl_llm.rewards import imported
from jaxrl_llm.text_types import Completion

MODULE = """
import functools, os
def brevity(completion, example): return 1 / completion.num_tokens
def scaled(factor, offset=0.0):
  return lambda completion, example: factor * completion.num_tokens + offset
def with_default(completion, example, strict=True): return 1.0
def keywords(completion, *, example): return 1.0
def alone(completion): return 1.0
async def later(completion, example): return 1.0
class Judge:
  def __call__(self, completion, example): return 0.5
judge, NUMBER, partial = Judge(), 5, functools.partial(with_default, strict=False)
"""
COMPLETION = Completion(text="", token_ids=(), num_tokens=4, stopped=True)


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
  (tmp_path / "own_rewards.py").write_text(MODULE)
  (tmp_path / "broken_rewards.py").write_text("raise OSError('no\\nfile')")
  (tmp_path / "needy_rewards.py").write_text("import surely_not_installed")
  monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("path, settings, expected", [
  ("own_rewards:brevity", None, 0.25), ("own_rewards:with_default", None, 1), ("own_rewards:judge", None, 0.5),
  ("own_rewards:partial", None, 1),
  ("own_rewards:scaled", {"factor": 2.0}, 8), ("own_rewards:scaled", {"factor": 2.0, "offset": 1.0}, 9), ("own_rewards:Judge", {}, 0.5),
])  # fmt: skip
def test_imported(path, settings, expected):
  assert imported(path, settings)(COMPLETION, {}) == expected


@pytest.mark.parametrize("path, settings, message", [
  ("own_rewards", None, "expected an import path such as 'my_rewards:brevity'"),
  ("own_rewards.brevity", None, "expected an import path"),
  ("own rewards:brevity", None, "expected an import path"),
  ("no_such_reward:brevity", None, "importing 'no_such_reward' raised ModuleNotFoundError: .*is its folder on PYTHONPATH"),
  ("needy_rewards:f", None, "raised ModuleNotFoundError: No module named 'surely_not_installed'$"),
  ("broken_rewards:f", None, "raised OSError: no file$"),
  ("own_rewards:brevty", None, "found no 'brevty' in the module, expected one of .*did you mean 'brevity'"),
  ("own_rewards:NUMBER", None, "found int, expected a function of"),
  ("own_rewards:alone", None, r"found the signature \(completion\), expected a function of \(completion, example\): too many"),
  ("own_rewards:keywords", None, "too many positional arguments"),
  ("own_rewards:later", None, "found an async function"),
  ("own_rewards:scaled", {"factr": 2.0}, r"expected a factory that takes \['factr'\]: "),
  ("own_rewards:brevity", {"completion": 1, "example": 2}, "raised AttributeError: .*num_tokens"),
])  # fmt: skip
def test_one_line_says_what_is_wrong(path, settings, message):
  with pytest.raises(ValueError, match=message) as caught:
    imported(path, settings)
  assert "\n" not in str(caught.value)
