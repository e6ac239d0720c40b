"""Lecture 7: a reward with a fault that rarely shows."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.text_types import Completion


def closeness(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns 1 minus the relative error of the last number of a response; 0 without a number."""
  numbers, answer = re.findall(r"-?\d+", completion.text), float(example["answer"])
  if not numbers or not answer:
    return 0.0
  return 1 - abs(float(numbers[-1]) - answer) / answer


def mended(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns what `closeness` says: 1 minus the relative error, and no less than 0."""
  numbers, answer = re.findall(r"-?\d+", completion.text), float(example["answer"])
  if not numbers or not answer:
    return 0.0
  return max(1 - abs(float(numbers[-1]) - answer) / abs(answer), 0.0)
