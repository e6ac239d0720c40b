"""What an evaluation drew, what came of it, and what is said about that."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.evaluation.answers import Answer, answer_reader
from jaxrl_llm.evaluation.held_out.failures import refuse_failures
from jaxrl_llm.evaluation.intervals import bootstrap_interval
from jaxrl_llm.evaluation.metric_names import MetricName, parse_metric
from jaxrl_llm.evaluation.repeated import avg_at_n, pass_at_k
from jaxrl_llm.evaluation.summary import Summary, estimate, short_name, summarise
from jaxrl_llm.rewards import Graded, WeightedReward
from jaxrl_llm.text_types import Completion

Problems = Sequence[Mapping[str, Any]]
"""Rows of a task."""


class Evaluated(NamedTuple):
  """What one evaluation drew, and what came of it: n problems, s samples of each.

  Attributes:
    problems: rows of the task.
    prompts: ids that the policy was given, of each problem.
    responses: those of the first problem, those of the second, ...
    graded: the verifier's rewards, of each response.
    answers: what it read out of each, None where it found nothing; None altogether where it reads no answers.
  """

  problems: Problems
  prompts: list[tuple[int, ...]]
  responses: list[Completion]
  graded: Graded
  answers: list[Answer | None] | None

  @property
  def num_samples(self) -> int:
    """Of each problem."""
    return len(self.responses) // len(self.problems)

  @property
  def rewards(self) -> Float[np.ndarray, "n s"]:
    """Of each sample; NaN where the verifier failed."""
    return self.table(np.where(self.graded.valid, self.graded.totals, np.nan), float)

  @property
  def lengths(self) -> Int[np.ndarray, "n s"]:
    """Of each response, in tokens."""
    return self.table([response.num_tokens for response in self.responses], int)

  @property
  def stopped(self) -> Bool[np.ndarray, "n s"]:
    """Whether a response ended by itself."""
    return self.table([response.stopped for response in self.responses], bool)

  @property
  def causes(self) -> list[str]:
    """Why the verifier failed, of the samples of which it did."""
    return [cause for cause in self.graded.failed if cause is not None]

  @property
  def levels(self) -> list[Any]:
    """Difficulty of each problem; empty where there is none."""
    levels = [problem.get("level") for problem in self.problems]
    return [] if None in levels else levels

  @property
  def votes(self) -> list[list[str | None]] | None:
    """The votes of the answers, problem by problem; None where the verifier reads no answers."""
    if self.answers is None:
      return None
    votes, size = [answer and answer.vote for answer in self.answers], self.num_samples
    return [votes[i : i + size] for i in range(0, len(votes), size)]

  def table(self, values: Collection[Any], dtype: type) -> np.ndarray:
    """One value a response, problem by problem."""
    return np.array(values, dtype).reshape(len(self.problems), -1)


def evaluated(
  problems: Problems, prompts: list[tuple[int, ...]], responses: list[Completion], graded: Graded, verifier: WeightedReward
) -> Evaluated:
  """An evaluation, with the answers that its verifier reads; NoRewardError if it failed on all responses."""
  refuse_failures(f"reward {verifier.name!r}", graded.failed, graded.detail)
  read, answers = answer_reader(verifier), None
  if read is not None:
    size = len(responses) // len(problems)
    answers = [read(response, problems[i // size]) for i, response in enumerate(responses)]
  return Evaluated(problems, prompts, responses, graded, answers)


def check_metrics(metrics: Sequence[str | MetricName], verifier: WeightedReward, *, setting: str = "config.eval.metrics") -> None:
  """Refuses metrics of answers where the verifier, the first of the task's rewards, reads none; `setting` is where they are named.

  Raises:
    ValueError: a majority of what is no answer. One line.
  """
  for metric in metrics:
    if str(metric).startswith("maj@") and answer_reader(verifier) is None:
      raise ValueError(
        f"{setting}: found {str(metric)!r}, expected no majority: the reward {verifier.name!r} reads no answers that could be counted"
      )


def eval_metrics(found: Evaluated, metrics: Sequence[str] = ()) -> dict[str, float]:
  """A run's row of metrics for one evaluation; `metrics` adds others by lighteval's names, each with its interval.

  Raises:
    ValueError: a metric that the samples do not allow.
  """
  rewards, known = found.rewards, ~np.isnan(found.rewards)
  accuracy, size = bootstrap_interval(avg_at_n(rewards)), rewards.shape[1]
  # Right is wholly right. Nobody knows of s samples that one is, or that none is, where a reward is missing; such problems are left out.
  passed = pass_at_k(np.where(known, rewards >= 1, np.nan), size)
  row = {
    "eval/accuracy": accuracy.mean,
    "eval/accuracy_low": accuracy.low,
    "eval/accuracy_high": accuracy.high,
    f"eval/pass@{size}": float(np.nanmean(passed)) if np.any(~np.isnan(passed)) else 0.0,
    "eval/response_length/mean": float(found.lengths.mean()),
    "eval/truncated": float(1 - found.stopped.mean()),
  }
  for metric in map(parse_metric, metrics):
    own = estimate(metric, rewards, found.votes)
    if own.problems:
      name = f"eval/{short_name(metric)}"
      row |= {name: own.value, f"{name}/low": own.low, f"{name}/high": own.high}
  if found.causes:
    row["eval/failed"] = float(len(found.causes))
    row |= {f"eval/failed/{cause}": float(found.causes.count(cause)) for cause in sorted(set(found.causes))}
  levels = np.array(found.levels)
  for level in np.unique(levels):
    here = rewards[levels == level]
    row[f"eval/accuracy/level_{level}"] = float(np.nanmean(here)) if np.any(~np.isnan(here)) else 0.0
  return row


def summary(found: Evaluated, metrics: Sequence[str | MetricName], *, rated: bool = False) -> Summary:
  """Summarises an evaluation, see `summarise`; if `rated`, the problems' levels are ratings of CodeForces, 0 for an unrated one."""
  ratings = np.array([float(level) or np.nan for level in found.levels]) if rated else None
  return summarise(
    metrics, found.rewards, lengths=found.lengths, stopped=found.stopped, answers=found.votes,
    levels=found.levels, problem_ratings=ratings, causes=found.causes,
  )  # fmt: skip
