"""Environments of the package verifiers and of the Environments Hub, by id: `verifiers:ID`.

The environment is an installed package. Its data set, harness, tools and rewards run as they are:

  harness -- OpenAI's API --> verifiers' server on this machine --> the run's engine
  trace: prompt | turn | reply | turn, the ids that were read and drawn, and a reward

A conversation is learned from only if its trace holds exactly those ids. One whose history the
environment rewrites, by a summary or a second conversation, fails with the cause `rewritten`.

References:
  verifiers, github.com/PrimeIntellect-ai/verifiers: the package verifiers 0.4.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.messages import Problem
from jaxrl_llm.rollouts.environments.actions import json_object
from jaxrl_llm.rollouts.environments.hub.names import check_installed
from jaxrl_llm.rollouts.environments.protocol import Environment
from jaxrl_llm.settings.import_path import load


def verifiers(
  name: str,
  *,
  timeout_s: float = 60.0,
  harness: str | None = None,
  settings: str | None = None,
  sessions: int | None = None,
  teacher: str | None = None,
  lessons: int | None = None,
) -> Environment:
  """Prepares an environment of the package verifiers. It is loaded when it is first asked.

  Args:
    name: Id of the environment, `[owner/]name[@version]`.
    timeout_s: Limit on the time between two turns, in seconds, starts of programs included.
    harness: Id of a harness. None is that of the environment, and verifiers' chat program in this
      process for an environment without one.
    settings: Settings of the environment's config as a JSON object, such as
      `{"taskset": {"game": "Hangman-v0"}}`.
    sessions: Largest number of conversations at once; None for all of a batch.
    teacher: Import path MODULE:FUNCTION of a `TeachFn`, whose conversations a warm start imitates.
    lessons: Number of those for each problem; None for one.

  Raises:
    MissingPackageError: If the package verifiers is missing.
    ValueError: If the environment is not installed, or a setting is wrong. One line.
  """
  check_verifiers(name, settings=settings)
  text = json.dumps(json_object(settings or "{}"), sort_keys=True)

  def problems(seeds: Sequence[int]) -> list[dict[str, Any]]:
    from jaxrl_llm.rollouts.environments.hub.problems import openings

    teach = None if teacher is None else load(teacher, where=f"environment.teacher {teacher!r}")
    return openings(name, harness, text, seeds, timeout_s=timeout_s, teach=teach, num_lessons=lessons or 1)

  def player(rules: Any, tokenizer: Any) -> Callable[..., Any]:
    from jaxrl_llm.rollouts.environments.hub.episodes import play_episodes
    from jaxrl_llm.rollouts.environments.hub.hub import open_hub

    def play(engine: Any, job: Any) -> Any:
      options = dict(timeout_s=timeout_s, at_once=min(sessions or job.at_once, job.at_once) if job.at_once else sessions)
      return play_episodes(open_hub(name, harness, text), engine, job, rules=rules, tokenizer=tokenizer, **options)

    return play

  def foreign(*_: Any) -> Any:
    raise NotImplementedError("environments of verifiers hold their conversations by themselves; see `Environment.player`")

  return Environment(foreign, foreign, problems=problems, player=player)


def check_verifiers(
  name: str, *, settings: str | None = None, teacher: str | None = None, lessons: int | None = None, **others: Any
) -> None:
  """Checks an id and the settings, without importing the environment.

  Raises:
    MissingPackageError: If the package verifiers is missing.
    ValueError: If the environment is not installed, or a setting is wrong. One line, with the fix.
  """
  del others
  if settings is not None and json_object(settings) is None:
    raise ValueError(Problem("environment.settings", repr(settings), "an object in JSON"))
  if lessons is not None and teacher is None:
    raise ValueError(Problem("environment.lessons", repr(lessons), "None, because environment.teacher is None"))
  check_installed(name)

