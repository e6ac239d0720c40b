"""The problems of the run's own environment: the episodes that its seeds begin.

A prompt shows an episode's first observation. The verifier is the environment: the reward of a
conversation is the sum over its turns, and one of 1 or more counts as right.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.chat_messages import following_ids, opening_ids
from jaxrl_llm.tasks import prompt_template as prompt_template_lib
from jaxrl_llm.tasks.files.columns import BLANK
from jaxrl_llm.tasks.files.storage import IDS, LESSON, Row
from jaxrl_llm.tasks.problem_set import Setup
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.text_types import Completion, Tokenizer

REWARD = "environment"
"""Name of the reward that is the sum of the environment's own."""


def environment_reward(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns the sum of the environment's rewards over all turns."""
  del example
  return float(sum(turn.reward for turn in completion.turns))


def turn_steps(completion: Completion, example: Mapping[str, Any]) -> list[tuple[int, float]]:
  """Returns the environment's reward of each turn, at the turn's last token."""
  del example
  return [(turn.end, turn.reward) for turn in completion.turns]


def lesson_ids(lesson: Sequence[Sequence[Any]], tokenizer: Tokenizer) -> list[tuple[int, bool]]:
  """Encodes a teacher's conversation behind its prompt, each id with whether it is the teacher's.

  Args:
    lesson: The teacher's turns, pairs of a text and the messages that followed.
    tokenizer: Tokenizer of the task.
  """
  ids: list[tuple[int, bool]] = []
  for turn, (text, messages) in enumerate(lesson):
    ids += [(i, True) for i in (*tokenizer.encode(text), tokenizer.eos_id)]
    if turn + 1 < len(lesson):
      ids += [(i, False) for i in following_ids(messages, tokenizer, is_ended=True)]
  return ids


def environment_task(
  setup: Setup,
  *,
  size: int = 64,
  seed: int = 0,
  test_fraction: float = 0.25,
  prompt_template: str = "{question}",
) -> Task:
  """Loads the problems of the environment, `setup.problems`, which is asked for each of them.

  Args:
    setup: Settings common to all tasks.
    size: Number of problems, each an episode with a seed of its own.
    seed: First seed; the others follow.
    test_fraction: Fraction of the problems held out: the last ones.
    prompt_template: Prompt template, with columns in braces; `{question}` is the first observation.

  Raises:
    ValueError: If the environment has no problems or fails, or a setting is wrong. One line.
  """
  if setup.problems is None:
    raise ValueError("task.name: found 'environment', expected another one: there is no environment")
  if setup.levels is not None:
    raise ValueError(f"task.levels: found {tuple(setup.levels)}, expected None: an environment's problems have no levels")
  if not isinstance(size, int) or size < 2:
    raise ValueError(f"task.size: found {size!r}, expected a whole number of at least 2")
  rows: list[Row] = [BLANK | {"id": f"seed {row['seed']}"} | row for row in setup.problems(range(seed, seed + size))]
  tokenizer = setup.tokenizer or ByteTokenizer()
  prompt_template_lib.check_template(prompt_template, rows[0])
  rows = [row | {"prompt": prompt_template_lib.render(prompt_template, row)} for row in rows]
  for row in rows:
    if "messages" in row:
      row[IDS] = opening_ids(json.loads(row["messages"]), json.loads(row["tools"]), tokenizer)
  if empty := [row["seed"] for row in rows if not row["prompt"]]:
    raise ValueError(f"task environment: the first observation of seed {empty[0]} is empty, expected a text; set task.prompt_template")
  num_test = min(max(round(size * test_fraction), 1), size - 1)
  lessons = ((row, lesson_ids(lesson, tokenizer)) for row in rows[:-num_test] for lesson in json.loads(row.get("lessons", "[]")))
  digest = hashlib.blake2b("\0".join(row["prompt"] for row in rows).encode(), digest_size=8)
  return Task(
    name="environment",
    tokenizer=tokenizer,
    train=rows[:-num_test],
    test=rows[-num_test:],
    demonstrations=[row | {LESSON: ids} for row, ids in lessons if ids],
    rewards=(REWARD,),
    verifiers={REWARD: environment_reward},
    fingerprint=digest.hexdigest(),
  )
