"""Summary of one evaluation: metrics with intervals, results by difficulty, and failures."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.evaluation.intervals import bootstrap_interval
from jaxrl_llm.evaluation.metric_names import MetricName, parse_metric
from jaxrl_llm.evaluation.repeated import avg_at_n, by_level, maj_at_n, pass_at_k


class Estimate(NamedTuple):
  """A metric with its 95 % bootstrap interval over problems.

  Attributes:
    name: Metric name in lighteval's notation, such as `avg@n:n=8`.
    value: Mean over the problems; None if no problem has a known value.
    low: Lower end of the interval.
    high: Upper end of the interval.
    problems: Number of problems with a known value.
  """

  name: str
  value: float | None
  low: float | None
  high: float | None
  problems: int


class Summary(NamedTuple):
  """Results of one evaluation.

  Attributes:
    metrics: Estimates of the metrics, in the order requested.
    levels: Mean reward of all samples, and number of problems, at each difficulty.
    problems: Number of problems.
    samples: Number of samples per problem.
    failed: Number of samples that received no reward from the verifier, by cause.
    truncation_rate: Fraction of samples that did not end on their own.
    mean_tokens: Mean number of tokens in a response.
  """

  metrics: tuple[Estimate, ...]
  levels: dict[Hashable, tuple[float, int]]
  problems: int
  samples: int
  failed: dict[str, int]
  truncation_rate: float
  mean_tokens: float


def per_problem(
  metric: str | MetricName, rewards: Float[np.ndarray, "n s"], answers: Sequence[Sequence[str | None]] | None = None
) -> Float[np.ndarray, " n"]:
  """Computes a metric for each problem.

  Args:
    metric: Metric or its name, such as `pass@k:k=1&n=16`.
    rewards: 1 if a sample is right, else 0. Numbers in between give partial credit, which does not
      count as a pass. Unknown rewards are NaN.
    answers: Extracted answers, needed for `maj@n`. Answers that differ only in surrounding spaces
      are equal.

  Raises:
    ValueError: If the samples do not allow the metric.

  Example:
    >>> per_problem("pass@k:k=2&n=4", np.array([[1., 0., 0.5, 0.]])).tolist()
    [0.5]
  """
  metric = parse_metric(metric) if isinstance(metric, str) else metric
  if metric.kind == "avg@n":
    return avg_at_n(rewards, metric.n)
  if metric.kind == "pass@k":
    return pass_at_k(np.where(np.isnan(rewards), np.nan, rewards >= 1), metric.k, metric.n)
  if answers is None:
    raise ValueError(f"{metric}: found no extracted answers, expected them: a majority is one of answers")
  return maj_at_n(answers, rewards, metric.n)


def estimate(
  metric: str | MetricName, rewards: Float[np.ndarray, "n s"], answers: Sequence[Sequence[str | None]] | None = None
) -> Estimate:
  """Computes a metric over all problems, with its interval.

  The arguments are those of `per_problem`.
  """
  values = per_problem(metric, rewards, answers)
  known = int(np.sum(~np.isnan(values)))
  interval = bootstrap_interval(values) if known else (None, None, None)
  return Estimate(str(metric), *interval, problems=known)


def summarise(
  metrics: Sequence[str | MetricName],
  rewards: Float[np.ndarray, "n s"],
  *,
  lengths: Int[np.ndarray, "n s"],
  stopped: Bool[np.ndarray, "n s"],
  answers: Sequence[Sequence[str | None]] | None = None,
  levels: Sequence[Hashable] | Int[np.ndarray, " n"] = (),
  causes: Sequence[str] = (),
) -> Summary:
  """Summarises one evaluation.

  Args:
    metrics: Names of the metrics, such as `avg@n:n=8`.
    rewards: Reward of each sample, as in `per_problem`.
    lengths: Number of tokens in each response.
    stopped: Whether each response ended on its own.
    answers: Extracted answers, needed for `maj@n`.
    levels: Difficulty of each problem; empty if there is none.
    causes: Failure cause of each sample that failed.

  Raises:
    ValueError: If there are no metrics, or the samples do not allow one of them.

  Example:
    >>> rewards, ones = np.array([[1., 0.], [1., 1.]]), np.ones((2, 2), int)
    >>> results = summarise(["avg@n:n=2", "pass@k:k=2&n=2"], rewards, lengths=ones, stopped=ones > 0, levels=[1, 3])
    >>> [x.value for x in results.metrics], results.levels
    ([0.75, 1.0], {1: (0.5, 1), 3: (1.0, 1)})
  """
  if not metrics:
    raise ValueError("metrics: found none, expected names such as 'avg@n:n=8'")
  solved = avg_at_n(rewards)
  return Summary(
    metrics=tuple(estimate(metric, rewards, answers) for metric in metrics),
    levels=by_level(solved, levels) if len(levels) else {},
    problems=rewards.shape[0],
    samples=rewards.shape[1],
    failed=dict(Counter(causes).most_common()),
    truncation_rate=float((1 - stopped.mean(axis=1)).mean()),
    mean_tokens=float(lengths.mean()),
  )


def short_name(metric: MetricName) -> str:
  """Returns a metric's name for a log, such as `maj@8`, `pass@4` or `pass@1:n=16`.

  For `pass@k`, n is left out if it equals k.

  Example:
    >>> short_name(parse_metric("maj@n:n=8")), short_name(parse_metric("pass@k:k=4&n=4")), short_name(parse_metric("pass@k:k=1&n=16"))
    ('maj@8', 'pass@4', 'pass@1:n=16')
  """
  kind = metric.kind.partition("@")[0]
  if metric.k is None or metric.k == metric.n:
    return f"{kind}@{metric.n}"
  return f"{kind}@{metric.k}:n={metric.n}"


def to_json(summary: Summary) -> dict[str, Any]:
  """Converts a summary to JSON values.

  NaN and infinities become None, because JSON has neither.
  """
  finite = lambda x: float(x) if x is not None and np.isfinite(x) else None
  return {
    "metrics": {x.name: {"value": x.value, "low": x.low, "high": x.high, "problems": x.problems} for x in summary.metrics},
    "levels": {str(level): {"value": finite(mean), "problems": count} for level, (mean, count) in summary.levels.items()},
    "truncation_rate": summary.truncation_rate,
    "mean_tokens": summary.mean_tokens,
    "problems": summary.problems,
    "samples": summary.samples,
    "failed": summary.failed,
  }


def table(summary: Summary) -> str:
  """Formats a summary as lines for a terminal.

  Example:
    >>> rewards, ones = np.array([[1., 0.], [1., 1.]]), np.ones((2, 2), int)
    >>> print(table(summarise(["avg@n:n=2"], rewards, lengths=ones, stopped=ones > 0)))
    metric      value  95 % interval      problems
    avg@n:n=2   75.0%  50.0% to 100.0%           2
    truncated    0.0%
    tokens        1.0  per response
  """
  percent = lambda x: "-" if x is None or np.isnan(x) else f"{x:.1%}"
  interval = lambda x: "" if x.value is None else f"{percent(x.low)} to {percent(x.high)}"
  rows = [("metric", "value", "95 % interval", "problems")]
  rows += [(x.name, percent(x.value), interval(x), str(x.problems)) for x in summary.metrics]
  if len(summary.levels) > 1:
    rows += [(f"  level {level}", percent(mean), "", str(count)) for level, (mean, count) in summary.levels.items()]
  rows.append(("truncated", percent(summary.truncation_rate), "", ""))
  rows.append(("tokens", f"{summary.mean_tokens:.1f}", "per response", ""))
  rows += [(f"failed: {cause}", f"{count:,}", f"of {summary.problems * summary.samples:,} samples", "") for cause, count in
           summary.failed.items()]
  widths = [max(len(row[column]) for row in rows) for column in range(4)]
  lines = (f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in rows)
  return "\n".join(lines)
