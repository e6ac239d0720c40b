"""Self-play: the policy sets a problem, and then solves it."""

import json
import random
import re
from typing import Any, NamedTuple

from jaxrl_llm.rollouts.environments.protocol import Environment, Reply
from jaxrl_llm.text_types import Completion

MOST_STEPS = 3
"""Largest number of + and - in a problem."""
ERROR_RATE = 1 / 3
"""Probability that the teacher of the demonstrations gets a step wrong."""

_PROBLEM, _ANSWER = re.compile(rf"[0-9](?:[+-][0-9]){{1,{MOST_STEPS}}}"), re.compile(r"#(-?[0-9]{1,9})\Z")


class Game(NamedTuple):
  """A game in progress.

  Attributes:
    first: Digit that the problem must begin with.
    problem: The problem that the policy has set; None before.
  """

  first: str
  problem: str | None = None


def proposer(
  *, attempts: int = 4, invalid_reward: float = -1.0, lessons: int = 2, request: str = "Solve it, and end with # and the answer."
) -> Environment:
  """Makes the game: the first turn is a sum of one-digit numbers, and the second one solves it.

  Prompt and reply of a game, with the policy's turns to the right:

      Write a sum that begins with 7.             7+8-5
      Solve it, and end with # and the answer.    7+8=15
                                                  15-5=10
                                                  #10

  A problem has up to three steps of + and −. The environment pays 1 for a right answer. What a
  problem itself is worth shows in the attempts at it: the estimator `hierarchical` pays for
  problems that half of them solve.

  Args:
    attempts: Number of samples of a prompt that share their first turn, and thus try to solve the
      same problem.
    invalid_reward: Reward of a first turn that is no such sum, which ends the game.
    lessons: Number of games of each prompt that a teacher plays, to be imitated. The teacher gets
      one step of three wrong, and goes on from there.
    request: What the policy reads behind its problem.

  Example:
    >>> from jaxrl_llm.text_types import Completion
    >>> game = proposer()
    >>> state, reply = game.step(game.reset({"first": "7"}), Completion("7+8-5", (), 6, True))
    >>> reply.text, game.state_key(state)
    ('Solve it, and end with # and the answer.\\n', '7+8-5')
    >>> game.step(state, Completion("7+8=15\\n15-5=10\\n#10", (), 20, True))[1].reward
    1.0

  References:
    Absolute Zero: Reinforced Self-play Reasoning with Zero Data, arXiv:2505.03335, 2025 (one policy
    that proposes and solves); the form of the problems is that of the task `arithmetic`.
  """

  def step(game: Game, turn: Completion) -> tuple[Game, Reply]:
    text = turn.text.strip()
    if game.problem is not None:
      answer = _ANSWER.search(text)
      return game, Reply(reward=float(answer is not None and int(answer[1]) == _value(game.problem)), done=True)
    if not _PROBLEM.fullmatch(text) or text[0] != game.first:
      return game, Reply(reward=invalid_reward, done=True)
    return game._replace(problem=text), Reply(f"{request}\n")

  return Environment(
    reset=lambda row: Game(str(row["first"])),
    step=step,
    state_key=lambda game: game.problem or "",
    shares_opening=attempts,
    problems=lambda seeds: [_row(seed, lessons, request) for seed in seeds],
  )


def _value(problem: str) -> int:
  return sum(int(term) for term in re.findall(r"[+-]?[0-9]", problem))


def _row(seed: int, lessons: int, request: str) -> dict[str, Any]:
  """Returns the problem of a seed, with its lessons as a task row holds them."""
  from jaxrl_llm.tasks.sets.arithmetic import working

  draw, games = random.Random(seed), []
  first = draw.choice("0123456789")
  for number in range(lessons):
    terms = [draw.choice("+-") + draw.choice("0123456789") for _ in range(draw.randint(1, MOST_STEPS))]
    problem = first + "".join(terms)
    games.append([[problem, [{"role": "user", "content": request}]], [working(problem, error_rate=ERROR_RATE, seed=number), []]])
  return {"question": f"Write a sum that begins with {first}.\n", "first": first, "seed": seed, "lessons": json.dumps(games)}
