"""Held-out problems: sampled with the policy, graded by the task's verifier, and written down sample by sample."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from jaxrl_llm import hosts
from jaxrl_llm.evaluation import (
  MetricName,
  SampleRow,
  Summary,
  answer_reader,
  avg_at_n,
  bootstrap_interval,
  estimate,
  parse_metric,
  pass_at_k,
  short_name,
  summarise,
)
from jaxrl_llm.rewards import CallFn, Outcome, WeightedReward, answer_key, call_here, final_answer
from jaxrl_llm.types import Completion, Rollouts, Turn

Problems = Sequence[Mapping[str, Any]]
DrawFn = Callable[[Problems, PRNGKeyArray], tuple[Rollouts, list[Completion]]]
"""`(problems, key) -> (rollouts, responses)`: as many samples of each problem as the sampler draws, one problem's after another's."""

_FINAL_ANSWER = WeightedReward("final_answer", final_answer)


class NoRewardError(ValueError):
  """So many responses have no reward that to go on would mean little."""


def refuse_failures(who: str, causes: Sequence[str | None], detail: str, *, limit: float = 1.0, setting: str = "") -> None:
  """Stops where too many responses have no reward, or all of them.

  Args:
    who: gives the rewards.
    causes: of each response why it has none; None where it has one.
    detail: of the first that has none, in one line.
    limit: fraction of responses that may have none.
    setting: that the limit comes from.

  Raises:
    NoRewardError: one line with the causes and the detail.

  Example:
    >>> refuse_failures("rewards", ["timeout", None, "timeout", "raised"], "ZeroDivisionError: division by zero", limit=0.5, setting="half")
    Traceback (most recent call last):
    ...
    jaxrl_llm.held_out.NoRewardError: rewards: found none for 3 of 4 responses (timeout 2, raised 1), expected a number for most (half);
    the first: ZeroDivisionError: division by zero
  """
  counts = Counter(cause for cause in causes if cause)
  failed = sum(counts.values())
  if failed < len(causes) and failed <= limit * len(causes):
    return
  share = f"for {failed} of {len(causes)} responses" if failed < len(causes) else f"for any of {len(causes)} responses"
  shown = ", ".join(f"{cause} {count}" for cause, count in counts.most_common())
  raise NoRewardError(
    f"{who}: found none {share} ({shown}), expected a number for most{f' ({setting})' if failed < len(causes) else ''}; the first: {detail}"
  )


class Evaluated(NamedTuple):
  """What one evaluation drew, and what came of it: n problems, s samples of each.

  Attributes:
    problems: rows of the task.
    prompts: ids that the policy was given, of each problem.
    responses: those of the first problem, those of the second, ...
    outcomes: the verifier's, of each response.
    answers: what it read out of each, None where it found nothing; None altogether where it reads no answers.
  """

  problems: Problems
  prompts: list[tuple[int, ...]]
  responses: list[Completion]
  outcomes: list[Outcome]
  answers: list[str | None] | None

  @property
  def num_samples(self) -> int:
    """Of each problem."""
    return len(self.responses) // len(self.problems)

  @property
  def scores(self) -> Float[np.ndarray, "n s"]:
    """Of each sample; NaN where the verifier failed."""
    return self.table([np.nan if outcome.cause else outcome.value for outcome in self.outcomes], float)

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
    return [outcome.cause for outcome in self.outcomes if outcome.cause]

  @property
  def levels(self) -> list[Any]:
    """Difficulty of each problem; empty where there is none."""
    levels = [problem.get("level") for problem in self.problems]
    return [] if None in levels else levels

  @property
  def grouped_answers(self) -> list[list[str | None]] | None:
    """The answers, problem by problem."""
    size = self.num_samples
    return self.answers and [self.answers[i : i + size] for i in range(0, len(self.answers), size)]

  def table(self, values: Sequence[Any], dtype: type) -> np.ndarray:
    """One value a response, problem by problem."""
    return np.array(values, dtype).reshape(len(self.problems), -1)


def choose(num_problems: int, num_wanted: int, *, seed: int) -> list[int]:
  """The problems of a test set that are evaluated: the same at every evaluation of every run, so that curves can be compared.

  Args:
    num_problems: of the set.
    num_wanted: how many of them at most.
    seed: of the choice.
  """
  return np.random.default_rng(seed).permutation(num_problems)[:num_wanted].tolist()


def check_metrics(metrics: Sequence[str | MetricName], verifier: WeightedReward, *, setting: str = "config.eval.metrics") -> None:
  """Refuses metrics of answers where the verifier reads none.

  Args:
    metrics: by lighteval's names.
    verifier: the first of the task's rewards.
    setting: where they are named.

  Raises:
    ValueError: a majority of what is no answer. One line.
  """
  for metric in metrics:
    if str(metric).startswith("maj@") and answer_reader(verifier) is None:
      raise ValueError(
        f"{setting}: found {str(metric)!r}, expected no majority: the reward {verifier.name!r} reads no answers that could be counted"
      )


def evaluate_policy(
  draw: DrawFn,
  problems: Problems,
  key: PRNGKeyArray,
  *,
  batch_prompts: int,
  verifier: WeightedReward = _FINAL_ANSWER,
  call: CallFn = call_here,
  note: Callable[[str], None] | None = None,
) -> Evaluated:
  """Samples every problem and grades the answers.

  Args:
    draw: samples responses to each of `batch_prompts` problems with the policy.
    problems: held-out rows of the task.
    key: of this evaluation.
    batch_prompts: problems sampled at once; the last batch is filled up with problems that are not counted.
    verifier: 1 for a right response, else 0; the first of the task's rewards.
    call: who calls its function.
    note: told a line after each batch; None tells nobody.

  Raises:
    NoRewardError: the verifier failed on all responses.
  """
  prompts, responses, outcomes, begun = [], [], [], time.perf_counter()
  for start in range(0, len(problems), batch_prompts):
    batch = list(problems[start : start + batch_prompts])
    filled = batch + [batch[-1]] * (batch_prompts - len(batch))
    rollouts, drawn = draw(filled, jax.random.fold_in(key, start))
    size = len(drawn) // batch_prompts
    drawn = drawn[: len(batch) * size]
    prompts += [tuple(rollouts.prompts[row][rollouts.prompt_mask[row]].tolist()) for row in range(0, len(drawn), size)]
    responses += drawn
    outcomes += _shared_outcomes(verifier, drawn, [problem for problem in batch for _ in range(size)], call)
    if note is not None:
      known = [outcome.value for outcome in outcomes if not outcome.cause]
      so_far = f"{np.mean(known):.1%} right so far" if known else "no score so far"
      note(f"{len(prompts):,} of {len(problems):,} problems | {so_far} | {time.perf_counter() - begun:.1f} s")
  return _evaluated(problems, prompts, responses, outcomes, verifier)


def regrade(rows: Sequence[SampleRow], *, verifier: WeightedReward, call: CallFn) -> Evaluated:
  """Grades samples of a file again; needs no policy, and starts no device.

  Args:
    rows: from `evaluation.read_samples`, with as many samples of each problem.
    verifier: see `evaluate_policy`.
    call: who calls its function.

  Raises:
    ValueError: problems with unequal numbers of samples.
    NoRewardError: the verifier failed on all responses.
  """
  samples: dict[str, list[SampleRow]] = {}
  for row in rows:
    samples.setdefault(row.id, []).append(row)
  size = max(map(len, samples.values()), default=0)
  for name, own in samples.items():
    own.sort(key=lambda row: row.sample)
    if [row.sample for row in own] != list(range(size)):
      raise ValueError(f"problem {name!r}: found the samples {[row.sample for row in own][:20]}, expected 0 to {size - 1} as of the others")
  problems = [_problem(own[0]) for own in samples.values()]
  responses = [_completion(row) for own in samples.values() for row in own]
  outcomes = _outcomes(verifier, responses, [problem for problem in problems for _ in range(size)], call)
  return _evaluated(problems, [()] * len(problems), responses, outcomes, verifier)


def eval_metrics(found: Evaluated, metrics: Sequence[str] = ()) -> dict[str, float]:
  """A run's row of metrics of one evaluation.

  Args:
    found: of `evaluate_policy`.
    metrics: further ones by lighteval's names; each is logged with its interval.

  Raises:
    ValueError: a metric that the samples do not allow.
  """
  scores, known = found.scores, ~np.isnan(found.scores)
  accuracy, size = bootstrap_interval(avg_at_n(scores)), scores.shape[1]
  # Right is wholly right. Nobody knows of s samples that one is, or that none is, where a score is missing; such problems are left out.
  passed = pass_at_k(np.where(known, scores >= 1, np.nan), size)
  row = {
    "eval/accuracy": accuracy.mean,
    "eval/accuracy_low": accuracy.low,
    "eval/accuracy_high": accuracy.high,
    f"eval/pass@{size}": float(np.nanmean(passed)) if np.any(~np.isnan(passed)) else 0.0,
    "eval/response_length/mean": float(found.lengths.mean()),
    "eval/truncated": float(1 - found.stopped.mean()),
  }
  for metric in map(parse_metric, metrics):
    own = estimate(metric, scores, found.grouped_answers, key=answer_key)
    if own.problems:
      name = f"eval/{short_name(metric)}"
      row |= {name: own.value, f"{name}/low": own.low, f"{name}/high": own.high}
  if found.causes:
    row["eval/failed"] = float(len(found.causes))
    row |= {f"eval/failed/{cause}": float(found.causes.count(cause)) for cause in sorted(set(found.causes))}
  levels = np.array(found.levels)
  for level in np.unique(levels):
    here = scores[levels == level]
    row[f"eval/accuracy/level_{level}"] = float(np.nanmean(here)) if np.any(~np.isnan(here)) else 0.0
  return row


def summary(found: Evaluated, metrics: Sequence[str | MetricName], *, rated: bool = False) -> Summary:
  """Everything that an evaluation says.

  Args:
    found: of `evaluate_policy` or `regrade`.
    metrics: by lighteval's names.
    rated: whether the problems' levels are CodeForces' ratings, 0 for none.

  Raises:
    ValueError: a metric that the samples do not allow.
  """
  ratings = np.array([float(level) or np.nan for level in found.levels]) if rated else None
  return summarise(
    metrics, found.scores, lengths=found.lengths, stopped=found.stopped, answers=found.grouped_answers, key=answer_key,
    levels=found.levels, problem_ratings=ratings, causes=found.causes,
  )  # fmt: skip


def sample_rows(
  found: Evaluated, *, verifier: str, decode: Callable[[Sequence[int]], str], seed: int, model: str, step: int | None
) -> Iterator[SampleRow]:
  """One row for each sample; a problem's own row, of which a verifier may need all, is in that of its first sample.

  Args:
    found: of `evaluate_policy`.
    verifier: its name.
    decode: ids of a prompt to text.
    seed: of the evaluation.
    model: where the weights came from.
    step: RL steps that they have behind them; None where that is not known.
  """
  names = _names(found.problems)
  for i, (response, outcome) in enumerate(zip(found.responses, found.outcomes, strict=True)):
    which, sample = divmod(i, found.num_samples)
    problem = found.problems[which]
    yield SampleRow(
      id=names[which],
      sample=sample,
      prompt=decode(found.prompts[which]),
      response=response.text,
      answer=found.answers and found.answers[i],
      gold=str(problem.get("answer", "")),
      score=None if outcome.cause else outcome.value,
      parts={} if outcome.cause else {verifier: outcome.value},
      cause=outcome.cause,
      num_tokens=response.num_tokens,
      stopped=response.stopped,
      level=_plain(problem.get("level")),
      seed=seed,
      model=model,
      step=step,
      example={} if sample else _plain(problem),
      turns=[turn._asdict() for turn in response.turns],
      failed=response.failed,
    )


def regraded_rows(rows: Sequence[SampleRow], found: Evaluated, *, verifier: str) -> list[SampleRow]:
  """The rows of a file with what `regrade` found.

  Args:
    rows: that were graded again.
    found: of `regrade`.
    verifier: its name.
  """
  places = {name: number for number, name in enumerate(dict.fromkeys(row.id for row in rows))}
  result = []
  for row in rows:
    i = places[row.id] * found.num_samples + row.sample
    outcome = found.outcomes[i]
    score = None if outcome.cause else outcome.value
    parts = {} if outcome.cause else {verifier: outcome.value}
    result.append(row._replace(score=score, cause=outcome.cause, parts=parts, answer=found.answers and found.answers[i]))
  return result


def _evaluated(problems, prompts, responses, outcomes, verifier: WeightedReward) -> Evaluated:
  refuse_failures(f"reward {verifier.name!r}", [x.cause for x in outcomes], next((x.detail for x in outcomes if x.cause), ""))
  read, answers = answer_reader(verifier), None
  if read is not None:
    size = len(responses) // len(problems)
    answers = [read(response, problems[i // size]) for i, response in enumerate(responses)]
  return Evaluated(problems, prompts, responses, outcomes, answers)


def _outcomes(verifier: WeightedReward, responses: Sequence[Completion], problems: Problems, call: CallFn) -> list[Outcome]:
  """The verifier's word on each response, but for those whose environment failed: nothing is known of them."""
  outcomes = [None if response.failed is None else Outcome(None, *response.failed) for response in responses]
  asked = [i for i, outcome in enumerate(outcomes) if outcome is None]
  for i, outcome in zip(asked, call(verifier, [responses[i] for i in asked], [problems[i] for i in asked]), strict=True):
    # Through float32, as rewards are in training: a score is the same number wherever it is read.
    outcomes[i] = outcome if outcome.cause else outcome._replace(value=float(np.float32(outcome.value)))
  return outcomes


def _shared_outcomes(verifier: WeightedReward, responses: Sequence[Completion], problems: Problems, call: CallFn) -> list[Outcome]:
  """The same, each asked for in one process."""
  failures: dict[str, tuple[str, str]] = {}

  def values(own: Sequence[int]) -> Float[np.ndarray, "m 1"]:
    outcomes = _outcomes(verifier, [responses[i] for i in own], [problems[i] for i in own], call)
    failures.update({str(i): (x.cause, x.detail) for i, x in zip(own, outcomes, strict=True) if x.cause})
    return np.array([0.0 if x.cause else x.value for x in outcomes], np.float32).reshape(-1, 1)

  found = hosts.share(values, len(responses))[:, 0].tolist()
  for text in hosts.gather_text(json.dumps(failures)):
    failures |= json.loads(text)
  return [Outcome(None, *failures[str(i)]) if str(i) in failures else Outcome(value) for i, value in enumerate(found)]


def _names(problems: Problems) -> list[str]:
  """Their own ids where each has one, else their numbers."""
  names = [str(problem.get("id") or "") for problem in problems]
  return names if all(names) and len(set(names)) == len(names) else [str(i) for i in range(len(problems))]


def _problem(row: SampleRow) -> dict[str, Any]:
  example = dict(row.example) or {"prompt": row.prompt, "question": row.prompt}
  if str(example.get("answer")) != row.gold:  # Somebody has put it right.
    example["answer"] = row.gold
  return {"level": row.level} | example


def _completion(row: SampleRow) -> Completion:
  """A response as far as its row tells; its token ids are not kept."""
  turns = tuple(Turn(**turn) for turn in row.turns)
  turns = tuple(turn._replace(reply=tuple(turn.reply)) if isinstance(turn.reply, list) else turn for turn in turns)
  failed = None if row.failed is None else tuple(row.failed)
  return Completion(row.response, (), num_tokens=row.num_tokens, stopped=row.stopped, turns=turns, failed=failed)


def _plain(value: Any) -> Any:
  """A value as JSON has it."""
  if isinstance(value, Mapping):
    return {str(name): _plain(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(x) for x in value]
  value = value.item() if isinstance(value, np.generic) else value
  return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
