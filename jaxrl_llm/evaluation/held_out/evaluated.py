"""Results of an evaluation, with the metrics and the summary computed from them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.evaluation.answers import Answer, answer_reader
from jaxrl_llm.evaluation.intervals import bootstrap_interval
from jaxrl_llm.evaluation.metric_names import MetricName, parse_metric
from jaxrl_llm.evaluation.repeated import avg_at_n
from jaxrl_llm.evaluation.summary import Summary, estimate, per_problem, short_name, summarise
from jaxrl_llm.rewards import Graded, WeightedReward
from jaxrl_llm.rewards.outcome import refuse_failures
from jaxrl_llm.text_types import Completion

Problems = Sequence[Mapping[str, Any]]
"""Rows of a task."""


class Evaluated(NamedTuple):
  """Samples and rewards of one evaluation, with n problems and s samples of each.

  Attributes:
    problems: Rows of the task.
    prompts: Prompt ids given to the policy, for each problem.
    responses: Responses grouped by problem, in the order of the problems.
    graded: Verifier's rewards of the responses.
    answers: Answer that the verifier read in each response, or None if it found none. None as a
      whole if the verifier reads no answers.
  """

  problems: Problems
  prompts: list[tuple[int, ...]]
  responses: list[Completion]
  graded: Graded
  answers: list[Answer | None] | None

  @property
  def num_samples(self) -> int:
    """Number of samples per problem."""
    return len(self.responses) // len(self.problems)

  @property
  def rewards(self) -> Float[np.ndarray, "n s"]:
    """Reward of each sample; NaN if the verifier failed."""
    return self.table(np.where(self.graded.valid, self.graded.totals, np.nan), float)

  @property
  def lengths(self) -> Int[np.ndarray, "n s"]:
    """Number of tokens in each response."""
    return self.table([response.num_tokens for response in self.responses], int)

  @property
  def stopped(self) -> Bool[np.ndarray, "n s"]:
    """Whether each response ended on its own."""
    return self.table([response.stopped for response in self.responses], bool)

  @property
  def causes(self) -> list[str]:
    """Reasons why the verifier failed, one for each sample on which it did."""
    return [cause for cause in self.graded.failed if cause is not None]

  @property
  def levels(self) -> list[Any]:
    """Difficulty of each problem; empty if any problem has none."""
    levels = [problem.get("level") for problem in self.problems]
    return [] if None in levels else levels

  @property
  def votes(self) -> list[list[str | None]] | None:
    """Votes of each problem's answers; None if the verifier reads no answers."""
    if self.answers is None:
      return None
    votes, size = [answer and answer.vote for answer in self.answers], self.num_samples
    return [votes[i : i + size] for i in range(0, len(votes), size)]

  def table(self, values: Collection[Any], dtype: type) -> np.ndarray:
    """Arranges one value per response by problem and sample."""
    return np.array(values, dtype).reshape(len(self.problems), -1)


def evaluated(
  problems: Problems, prompts: list[tuple[int, ...]], responses: list[Completion], graded: Graded, verifier: WeightedReward
) -> Evaluated:
  """Builds an evaluation, with the answers that its verifier reads.

  Raises:
    NoRewardError: If the verifier failed on all responses.
  """
  refuse_failures(f"reward {verifier.name!r}", graded)
  read, answers = answer_reader(verifier), None
  if read is not None:
    size = len(responses) // len(problems)
    answers = [read(response, problems[i // size]) for i, response in enumerate(responses)]
  return Evaluated(problems, prompts, responses, graded, answers)


def check_metrics(metrics: Sequence[str | MetricName], verifier: WeightedReward, *, setting: str = "config.eval.metrics") -> None:
  """Refuses majority metrics if the verifier reads no answers.

  The verifier is the first of the task's rewards. `setting` is the setting that names the metrics.

  Raises:
    ValueError: If a majority metric is given and the verifier reads no answers. One line.
  """
  for metric in metrics:
    if str(metric).startswith("maj@") and answer_reader(verifier) is None:
      raise ValueError(
        f"{setting}: found {str(metric)!r}, expected no majority: the reward {verifier.name!r} reads no answers that could be counted"
      )


def eval_metrics(evaluation: Evaluated, metrics: Sequence[str] = ()) -> dict[str, float]:
  """Computes a run's row of metrics for one evaluation.

  `metrics` adds further metrics by their lighteval names, each with its interval.

  Raises:
    ValueError: If the samples do not allow one of the metrics.
  """
  rewards = evaluation.rewards
  accuracy, size = bootstrap_interval(avg_at_n(rewards)), rewards.shape[1]
  # It needs the rewards of all samples, so problems with a missing reward are left out.
  passed = per_problem(MetricName("pass@k", size, size), rewards)
  row = {
    "eval/accuracy": accuracy.mean,
    "eval/accuracy_low": accuracy.low,
    "eval/accuracy_high": accuracy.high,
    f"eval/pass@{size}": float(np.nanmean(passed)) if np.any(~np.isnan(passed)) else 0.0,
    "eval/response_length/mean": float(evaluation.lengths.mean()),
    "eval/truncated": float(1 - evaluation.stopped.mean()),
  }
  for metric in map(parse_metric, metrics):
    own = estimate(metric, rewards, evaluation.votes)
    if own.problems:
      name = f"eval/{short_name(metric)}"
      row |= {name: own.value, f"{name}/low": own.low, f"{name}/high": own.high}
  if evaluation.causes:
    row["eval/failed"] = float(len(evaluation.causes))
    row |= {f"eval/failed/{cause}": float(evaluation.causes.count(cause)) for cause in sorted(set(evaluation.causes))}
  levels = np.array(evaluation.levels)
  for level in np.unique(levels):
    here = rewards[levels == level]
    row[f"eval/accuracy/level_{level}"] = float(np.nanmean(here)) if np.any(~np.isnan(here)) else 0.0
  return row


def summary(evaluation: Evaluated, metrics: Sequence[str | MetricName]) -> Summary:
  """Summarises an evaluation with `summarise`."""
  return summarise(
    metrics, evaluation.rewards, lengths=evaluation.lengths, stopped=evaluation.stopped, answers=evaluation.votes,
    levels=evaluation.levels, causes=evaluation.causes,
  )  # fmt: skip
