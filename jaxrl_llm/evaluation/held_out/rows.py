"""Samples of an evaluation as rows of a file, and rows graded again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.evaluation import SampleRow
from jaxrl_llm.evaluation.held_out.evaluated import Evaluated, Problems, evaluated
from jaxrl_llm.rewards import CallFn, WeightedReward, grade
from jaxrl_llm.text_types import Completion, Turn


def sample_rows(
  found: Evaluated, *, verifier: str, decode: Callable[[Sequence[int]], str], seed: int, model: str, step: int | None
) -> Iterator[SampleRow]:
  """One row for each sample; a problem's own row, of which a verifier may need all, is in that of its first sample.

  Args:
    found: of `evaluate_policy`.
    verifier: its name.
    decode: ids of a prompt to text.
    seed, model, step: see `SampleRow`.
  """
  names = _names(found.problems)
  for i, response in enumerate(found.responses):
    which, sample = divmod(i, found.num_samples)
    problem = found.problems[which]
    yield SampleRow(
      id=names[which],
      sample=sample,
      prompt=decode(found.prompts[which]),
      response=response.text,
      gold=str(problem.get("answer", "")),
      **_graded_fields(found, i, verifier),
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
  """The rows of a file with what `regrade` found; `verifier` is the name of the one that it graded with."""
  first = {name: number * found.num_samples for number, name in enumerate(dict.fromkeys(row.id for row in rows))}
  return [row._replace(**_graded_fields(found, first[row.id] + row.sample, verifier)) for row in rows]


def _graded_fields(found: Evaluated, i: int, verifier: str) -> dict[str, Any]:
  """What the verifier made of a response, by the names of a row's fields."""
  cause, reward = found.graded.failed[i], float(found.graded.totals[i])
  known = {"score": reward, "parts": {verifier: reward}} if cause is None else {"score": None, "parts": {}}
  answer = found.answers and found.answers[i]
  return known | {"cause": cause, "answer": answer and answer.text}


def regrade(rows: Sequence[SampleRow], *, verifier: WeightedReward, call: CallFn) -> Evaluated:
  """Grades samples of a file again; needs no policy, and starts no device.

  Args:
    rows: from `evaluation.read_samples`, with as many samples of each problem.
    verifier, call: see `evaluate_policy`.

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
  graded = grade([verifier._replace(weight=1.0)], responses, [problem for problem in problems for _ in range(size)], call=call)
  return evaluated(problems, [()] * len(problems), responses, graded, verifier)


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
