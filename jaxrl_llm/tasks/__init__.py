"""What a policy is trained on: problems, how they are written as tokens, and demonstrations. NumPy and text; no JAX."""

import difflib
import os
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jaxrl_llm.tasks import arithmetic, storage
from jaxrl_llm.tasks.storage import Row
from jaxrl_llm.tasks.tokenizer import ByteTokenizer


class Task(NamedTuple):
  """A task, loaded.

  Attributes:
    name: its key in `TASKS`.
    tokenizer: text to ids and back.
    train: problems to train on. A row has `question`, `answer`, `level`, `prompt` (what the policy is given) and `response`
      ("" but in demonstrations).
    test: problems held out from training and demonstrations.
    demonstrations: training problems with responses to imitate, right or wrong.
    rewards: names of the reward functions the task is meant for.
    step_rewards: `(row, response's ids) -> [(index of a step's last token, reward), ...]`; None where no verifier of steps exists.
  """

  name: str
  tokenizer: ByteTokenizer
  train: Sequence[Row]
  test: Sequence[Row]
  demonstrations: Sequence[Row]
  rewards: tuple[str, ...]
  step_rewards: Callable[[Row, Sequence[int]], list[tuple[int, float]]] | None = None


def arithmetic_task(*, levels: Collection[int] | None = None, data_dir: str | os.PathLike | None = None) -> Task:
  """Multi-step arithmetic; see `make`."""
  levels = arithmetic.LEVELS if levels is None else tuple(levels)
  if not levels or not set(levels) <= set(arithmetic.LEVELS):
    raise ValueError(f"task.levels: found {levels}, expected one or more of {arithmetic.LEVELS}")
  splits = {
    split: [row | {"prompt": arithmetic.render_prompt(row["question"])} for row in rows if row["level"] in levels]
    for split, rows in storage.load_splits(arithmetic.Arithmetic, data_dir=data_dir).items()
  }
  return Task(name="arithmetic", tokenizer=ByteTokenizer(), rewards=("final_answer",), step_rewards=arithmetic.step_rewards, **splits)


TASKS: dict[str, Callable[..., Task]] = {
  "arithmetic": arithmetic_task,
}


def make(name: str, *, levels: Collection[int] | None = None, data_dir: str | os.PathLike | None = None) -> Task:
  """Loads a task; its dataset is built first where it is absent, in some seconds.

  Args:
    name: a key of `TASKS`.
    levels: difficulties to keep, in all splits; None keeps all.
    data_dir: local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.

  Returns:
    The task.

  Raises:
    ValueError: no such task or level, a folder that cannot be written, or a damaged dataset. One line, with the fix.

  Example:
    >>> make("aritmetic")
    Traceback (most recent call last):
    ...
    ValueError: task.name: found 'aritmetic', expected one of arithmetic; did you mean 'arithmetic'?
  """
  if name not in TASKS:
    close = difflib.get_close_matches(str(name), TASKS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"task.name: found {name!r}, expected one of {', '.join(TASKS)}{hint}")
  return TASKS[name](levels=levels, data_dir=data_dir)
