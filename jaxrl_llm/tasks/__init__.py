"""What a policy is trained on: problems, how they are written as tokens, and demonstrations. NumPy and text; no JAX."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxrl_llm.tasks import arithmetic, storage, word_problems
from jaxrl_llm.tasks.storage import Row
from jaxrl_llm.tasks.tokenizer import ByteTokenizer

if TYPE_CHECKING:  # `types` imports jax, which whoever only checks a config need not load.
  from jaxrl_llm.types import Tokenizer


class Task(NamedTuple):
  """A task, loaded.

  Attributes:
    name: its key in `TASKS`.
    tokenizer: text to ids and back; the policy's.
    train: problems to train on. A row has `question`, `answer`, `level`, `prompt` (what the policy is given) and `response`
      ("" but in demonstrations).
    test: problems held out from training and demonstrations.
    demonstrations: training problems with responses to imitate, right or wrong.
    rewards: names of the reward functions the task is meant for. The first is its verifier, 1 for a right response, else 0.
    form_reward: name of the reward for the form of an answer; None where the task has none.
    step_rewards: `(row, response's ids) -> [(index of a step's last token, reward), ...]`; None where no verifier of steps exists.
  """

  name: str
  tokenizer: Tokenizer
  train: Sequence[Row]
  test: Sequence[Row]
  demonstrations: Sequence[Row]
  rewards: tuple[str, ...]
  form_reward: str | None = None
  step_rewards: Callable[[Row, Sequence[int]], list[tuple[int, float]]] | None = None


def arithmetic_task(*, levels: Collection[int] | None, data_dir: str | os.PathLike | None, tokenizer: Tokenizer | None) -> Task:
  """Multi-step arithmetic; see `make`."""
  return Task(
    name="arithmetic",
    tokenizer=tokenizer or ByteTokenizer(),
    rewards=("final_answer",),
    step_rewards=arithmetic.step_rewards if tokenizer is None else None,  # They read the ids as bytes.
    **_load(arithmetic.Arithmetic, arithmetic.LEVELS, arithmetic.render_prompt, levels=levels, data_dir=data_dir),
  )


def gsm_symbolic_task(*, levels: Collection[int] | None, data_dir: str | os.PathLike | None, tokenizer: Tokenizer | None) -> Task:
  """Grade-school word problems; see `make`."""
  return Task(
    name="gsm_symbolic",
    tokenizer=tokenizer or ByteTokenizer(),
    rewards=("final_number",),
    form_reward="answer_form",
    **_load(word_problems.GsmSymbolic, word_problems.LEVELS, word_problems.render_prompt, levels=levels, data_dir=data_dir),
  )


def _load(builder_class, known_levels, render_prompt, *, levels, data_dir) -> dict[str, list[Row]]:
  """The splits of a dataset, with prompts, at some of its levels."""
  levels = known_levels if levels is None else tuple(levels)
  if not levels or not set(levels) <= set(known_levels):
    raise ValueError(f"task.levels: found {levels}, expected one or more of {known_levels}")
  return {
    split: [row | {"prompt": render_prompt(row["question"])} for row in rows if row["level"] in levels]
    for split, rows in storage.load_splits(builder_class, data_dir=data_dir).items()
  }


TASKS: dict[str, Callable[..., Task]] = {
  "arithmetic": arithmetic_task,
  "gsm_symbolic": gsm_symbolic_task,
}


def make(
  name: str,
  *,
  levels: Collection[int] | None = None,
  data_dir: str | os.PathLike | None = None,
  tokenizer: Tokenizer | None = None,
) -> Task:
  """Loads a task; its dataset is built first where it is absent, in some seconds.

  Args:
    name: a key of `TASKS`.
    levels: difficulties to keep, in all splits; None keeps all.
    data_dir: local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.
    tokenizer: the checkpoint's, where the policy comes from one; None is the task's own, of bytes.

  Returns:
    The task.

  Raises:
    ImportError: a dataset to build without the package that generates it.
    ValueError: no such task or level, a folder that cannot be written, or a damaged dataset. One line, with the fix.

  Example:
    >>> make("aritmetic")
    Traceback (most recent call last):
    ...
    ValueError: task.name: found 'aritmetic', expected one of arithmetic, gsm_symbolic; did you mean 'arithmetic'?
  """
  if name not in TASKS:
    close = difflib.get_close_matches(str(name), TASKS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"task.name: found {name!r}, expected one of {', '.join(TASKS)}{hint}")
  return TASKS[name](levels=levels, data_dir=data_dir, tokenizer=tokenizer)
