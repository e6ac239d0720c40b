"""Samples of an evaluation as rows of a file, and regrading of stored rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.evaluation import SampleRow
from jaxrl_llm.evaluation.held_out.evaluated import Evaluated, Problems, evaluated
from jaxrl_llm.pretrained.thumbnails import thumbnails
from jaxrl_llm.rewards import CallFn, WeightedReward, grade
from jaxrl_llm.text_types import Completion, Turn


def sample_rows(
  evaluation: Evaluated,
  *,
  verifier: str,
  decode: Callable[[Sequence[int]], str],
  seed: int,
  model: str,
  step: int | None,
) -> Iterator[SampleRow]:
  """Yields one row per sample.

  The full row of a problem, which a verifier may need, is stored only with its first sample. Its
  pictures are stored as small copies.

  Args:
    evaluation: Evaluation returned by `evaluate_policy`.
    verifier: Name of the verifier.
    decode: Function that decodes the ids of a prompt to text.
    seed, model, step: Values of the fields of `SampleRow` with these names.
  """
  names = _names(evaluation.problems)
  for i, response in enumerate(evaluation.responses):
    which, sample = divmod(i, evaluation.num_samples)
    problem = evaluation.problems[which]
    yield SampleRow(
      id=names[which],
      sample=sample,
      prompt=decode(evaluation.prompts[which]),
      response=response.text,
      gold=str(problem.get("answer", "")),
      **_graded_fields(evaluation, i, verifier),
      num_tokens=response.num_tokens,
      stopped=response.stopped,
      level=_plain(problem.get("level")),
      seed=seed,
      model=model,
      step=step,
      example={} if sample else _plain(problem | ({"images": thumbnails(problem["images"])} if problem.get("images") else {})),
      turns=[turn._asdict() for turn in response.turns],
      failed=response.failed,
    )


def regraded_rows(rows: Sequence[SampleRow], evaluation: Evaluated, *, verifier: str) -> list[SampleRow]:
  """Returns the rows of a file with the results of `regrade`.

  `verifier` is the name of the verifier used for regrading.
  """
  first = {name: number * evaluation.num_samples for number, name in enumerate(dict.fromkeys(row.id for row in rows))}
  return [row._replace(**_graded_fields(evaluation, first[row.id] + row.sample, verifier)) for row in rows]


def _graded_fields(evaluation: Evaluated, i: int, verifier: str) -> dict[str, Any]:
  """Returns the verifier's results for a response, by the names of a row's fields."""
  cause, reward = evaluation.graded.failed[i], float(evaluation.graded.totals[i])
  known = {"score": reward, "parts": {verifier: reward}} if cause is None else {"score": None, "parts": {}}
  answer = evaluation.answers and evaluation.answers[i]
  return known | {"cause": cause, "answer": answer and answer.text}


def regrade(rows: Sequence[SampleRow], *, verifier: WeightedReward, call: CallFn) -> Evaluated:
  """Grades the samples of a file again, without a policy and without starting a device.

  Args:
    rows: Rows from `evaluation.read_samples`, with the same number of samples per problem.
    verifier: Reward that gives 1 for a right response, else 0.
    call: Function that calls the verifier for a batch of responses.

  Raises:
    ValueError: If the problems have unequal numbers of samples.
    NoRewardError: If the verifier failed on all responses.
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
  """Returns the problems' own ids if all have distinct ones, else their indices."""
  names = [str(problem.get("id") or "") for problem in problems]
  return names if all(names) and len(set(names)) == len(names) else [str(i) for i in range(len(problems))]


def _problem(row: SampleRow) -> dict[str, Any]:
  example = dict(row.example) or {"prompt": row.prompt, "question": row.prompt}
  if str(example.get("answer")) != row.gold:  # The answer in the file was corrected.
    example["answer"] = row.gold
  return {"level": row.level} | example


def _completion(row: SampleRow) -> Completion:
  """Rebuilds a response from its row, which does not store token ids."""
  turns = tuple(Turn(**turn) for turn in row.turns)
  turns = tuple(turn._replace(reply=tuple(turn.reply)) if isinstance(turn.reply, list) else turn for turn in turns)
  failed = None if row.failed is None else tuple(row.failed)
  return Completion(row.response, (), num_tokens=row.num_tokens, stopped=row.stopped, turns=turns, failed=failed)


def _plain(value: Any) -> Any:
  """Converts a value to JSON types."""
  if isinstance(value, Mapping):
    return {str(name): _plain(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(x) for x in value]
  value = value.item() if isinstance(value, np.generic) else value
  return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
