"""reasoning-gym's own verifiers, without their unsafe parts."""

import ast
import functools
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.rewards.expression_limits import too_large
from jaxrl_llm.rewards.extraction import MAX_CHARS, place
from jaxrl_llm.text_types import Completion, RewardFn

REFUSED = {
  "coin_flip": "its verifier accepts 0 wherever the probability is below 1, as the beginning of 0.3125",
  "composite": "it is a mixture: name its datasets",
  "game_of_life_halting": "its verifier accepts any answer (bool('False') is True)",
  "puzzle24": "its verifier accepts any four numbers that make 24, not only the puzzle's",
}
"""Datasets whose verifier is not usable as a reward, with the reason."""

# These verifiers pass the answer to `eval` but expect a list. They get `ast.literal_eval` under
# that name, which computes nothing.
_EVALUATING = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
# These pass it to sympy's parser, which also evaluates it, with Python's built-in functions in
# scope. Only arithmetic passes, with one-letter variables and the functions of a calculus book: no
# strings, no attributes, no brackets but round ones, ASCII only.
_PARSING = ("countdown", "intermediate_integration", "polynomial_multiplication", "simple_integration")
_CHARACTERS = re.compile(r"[A-Za-z0-9_ \t\n.,+\-*/^()]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KNOWN_NAME = re.compile(r"[A-Za-z][0-9]*|pi|exp|log|ln|sqrt|Abs|a?(?:sin|cos|tan|sec|csc|cot)h?")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
# The verifier of complex_arithmetic accepts any distance not above a limit, including NaN.
_COMPLEX = re.compile(r"[0-9.eEij+\-*() ]*")
# These verifiers compare with a tuple of tuples, which JSON turns into lists.
_GRIDS = ("arc_agi", "rearc")


def gym(dataset: str | None = None, *, answer_in: str = "tag", settings: Mapping[str, Any] | None = None, field: str = "entry") -> RewardFn:
  """Makes a reward with the score of reasoning-gym's verifier: 1 for a correct answer.

  For some datasets, an answer that is close earns a little.

  Args:
    dataset: Dataset whose verifier judges every row. None uses the dataset that each row's entry
      names.
    answer_in: Location of the answer; see `extraction.place`. `tag` is `<answer>...</answer>`,
      reasoning-gym's own convention.
    settings: Settings that the dataset was made with, which a few verifiers read. Only valid with
      `dataset`.
    field: Field of the example with reasoning-gym's entry (question, answer, metadata), as a
      mapping or as JSON.

  Returns:
    The reward function. It gives 0 if the answer makes the verifier raise. It raises ValueError if
    the row holds no valid entry.

  Raises:
    ValueError: If the dataset is unknown or one of `REFUSED`, reasoning-gym is not installed, or it
      rejects the settings.

  Example:
    >>> completion = Completion(text="<answer>15</answer>", token_ids=(), num_tokens=5, stopped=True)
    >>> entry = {"question": "7 + 8 =", "answer": "15", "metadata": {"source_dataset": "chain_sum"}}
    >>> gym()(completion, {"entry": entry})
    1.0

  References:
    Reasoning Gym, arXiv:2505.24760, 2025.
  """
  if dataset is None and settings:
    raise ValueError("gym: found settings without a dataset, expected both: settings belong to one dataset")
  find = place(answer_in)
  if dataset is not None:
    verifier(dataset, json.dumps(dict(settings or {}), sort_keys=True))

  def gym_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    entry = read_entry(example, field)
    name = dataset or (entry.get("metadata") or {}).get("source_dataset")
    verify = verifier(str(name), json.dumps(dict(settings or {}), sort_keys=True))
    answer = find(completion.text)
    if answer is None or not completion.stopped or len(answer) > MAX_CHARS:
      return 0.0
    return verify(answer, entry)

  return gym_reward


@functools.cache
def verifier(dataset: str, settings: str = "{}") -> Callable[[str, Mapping[str, Any]], float]:
  """Returns the verifier of one dataset: `(answer, entry) -> reward`.

  Args:
    dataset: Name of the dataset.
    settings: Settings of the dataset, as JSON.

  Returns:
    The verifier. It raises ValueError if it cannot read the entry.

  Raises:
    ValueError: As in `gym`.
  """
  try:
    from reasoning_gym.factory import DATASETS
  except ImportError as error:
    raise ValueError("the reward 'gym' needs the package reasoning-gym: pip install 'jaxrl-llm[tasks]'") from error
  if dataset in REFUSED:
    raise ValueError(f"gym: found the dataset {dataset!r}, expected another: {REFUSED[dataset]}")
  if dataset not in DATASETS:
    hint = did_you_mean(dataset, DATASETS)
    raise ValueError(f"gym: found the dataset {dataset!r}, expected one of reasoning-gym's{hint}")
  make_dataset, make_settings = DATASETS[dataset]
  try:
    made = make_dataset(config=make_settings(**json.loads(settings)))
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(f"gym: found settings {settings} for {dataset!r}, expected those it takes: {error}") from None
  return functools.partial(contained_reward, dataset, made)


def contained_reward(dataset: str, made: Any, answer: str, entry: Mapping[str, Any]) -> float:
  """Returns the score of a dataset's verifier for an answer.

  The answer is never run as a program. An answer that makes the verifier raise is wrong.

  Raises:
    ValueError: If the verifier cannot read the entry.
  """
  if dataset in _EVALUATING:
    sys.modules[type(made).__module__].eval = ast.literal_eval
  if (dataset in _PARSING and not _is_arithmetic(answer)) or (dataset == "complex_arithmetic" and not _COMPLEX.fullmatch(answer)):
    return 0.0
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # NumPy warns about what it cannot read.
    try:
      return _reward(made, answer, entry, dataset in _GRIDS)
    except (ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, SyntaxError, TypeError, ValueError):
      # Some verifiers assume that an answer has the expected form. The correct answer has it, so if
      # that raises too, the fault is in the row.
      if entry["answer"] is None:
        return 0.0
      try:
        _reward(made, entry["answer"], entry, dataset in _GRIDS)
      except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"gym: found an entry that {dataset!r} cannot read ({error!r}), expected its own with all metadata") from None
      return 0.0


def _reward(made: Any, answer: str, entry: Mapping[str, Any], is_grid: bool) -> float:
  if is_grid:
    entry = {**entry, "metadata": {**entry["metadata"], "output": tuple(map(tuple, entry["metadata"]["output"]))}}
  return float(made.score_answer(answer, entry))


def _is_arithmetic(answer: str) -> bool:
  """Returns whether an expression is safe and quick to evaluate."""
  if too_large(answer) or _CHARACTERS.fullmatch(answer) is None or _ATTRIBUTE.search(answer):
    return False
  return all(_KNOWN_NAME.fullmatch(name) for name in _NAME.findall(answer))


def read_entry(example: Mapping[str, Any], field: str) -> Mapping[str, Any]:
  """Returns reasoning-gym's entry of a row, from a mapping or JSON.

  Raises:
    ValueError: If the field holds no entry.
  """
  entry = text = example.get(field)
  if isinstance(entry, str | bytes):
    try:
      entry = json.loads(entry)
      if isinstance(entry, dict) and set(entry) == {"items"}:  # The form stored by `tasks`.
        entry = json.loads(text, object_hook=_unpacked)
    except ValueError as error:
      raise ValueError(f"gym: found no JSON in the field {field!r} ({error}), expected reasoning-gym's entry") from None
  if not isinstance(entry, Mapping) or "answer" not in entry:
    raise ValueError(f"gym: found {type(entry).__name__} in the field {field!r}, expected an entry of question, answer and metadata")
  return entry


def _unpacked(value: dict[str, Any]) -> Any:
  """Decodes JSON that marks tuples, fractions, and mappings with keys that are not text."""
  ((kind, items),) = value.items()
  return {"tuple": tuple, "items": dict, "fraction": lambda parts: Fraction(*parts)}[kind](items)
