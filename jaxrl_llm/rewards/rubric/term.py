"""The terms of a judge: its reward, and a score for each criterion that is only logged."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxrl_llm.rewards.outcome import WeightedReward
from jaxrl_llm.rewards.rubric.file import read_rubric
from jaxrl_llm.rewards.rubric.judge import Judge
from jaxrl_llm.text_types import Completion

PREFIX = "judge:"
"""Beginning of the name of a judge in a config; the rest is the path of its rubric."""


def path_of(name: str) -> str | None:
  """Returns the path of the rubric in a reward's name; None if the reward is no judge.

  Example:
    >>> path_of("judge:configs/rubrics/explanation.yaml"), path_of("my_rewards:brevity")
    ('configs/rubrics/explanation.yaml', None)
  """
  return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None


def judge_terms(path: str, *, weight: float = 1.0) -> list[WeightedReward]:
  """Makes the terms of a judge: `judge/NAME` with the weight, then `judge/NAME/CRITERION`.

  The endpoint is first asked when responses are graded, or when a `Grader` opens the judge.

  Args:
    path: Path of the rubric.
    weight: Factor of the reward in the total.

  Raises:
    ValueError: If the rubric is missing or wrong. One line for each problem.
  """
  rubric = read_rubric(path)
  judge, name = Judge(rubric), f"judge/{rubric.name}"

  def alone(completion: Completion, example: Mapping[str, Any]) -> float:
    outcome = judge.begin([completion], [example])()[0]
    return float("nan") if outcome.value is None else outcome.value

  whole = lambda completions, examples: judge.begin(completions, examples)()
  terms = [WeightedReward(name, alone, weight, batch_fn=whole, service=judge, monitors=weight == 0)]
  for index, criterion in enumerate(rubric.criteria):
    of_criterion = partial(judge.scores, index)
    one = lambda completion, example, read=of_criterion: read([completion], [example])[0].value
    terms.append(WeightedReward(f"{name}/{criterion.name}", one, 0.0, batch_fn=of_criterion, monitors=True))
  return terms
