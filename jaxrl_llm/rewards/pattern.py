"""A reward for matching a regular expression."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.extraction import MAX_CHARS
from jaxrl_llm.text_types import Completion, RewardFn

_WAYS = ("search", "fullmatch")


def pattern(regex: str, *, how: str = "search", ignore_case: bool = False, max_chars: int = MAX_CHARS) -> RewardFn:
  """Makes a reward that is 1 if a regular expression matches the response, else 0.

  Args:
    regex: Regular expression in Python's syntax. `{answer}` and other fields of the row in braces
      stand for their literal text.
    how: Kind of match: `search` anywhere in the response, or `fullmatch` for all of it. `.` also
      matches line breaks.
    ignore_case: Whether to ignore case.
    max_chars: Number of characters read, from the end of a response. With `fullmatch`, a longer
      response does not match.

  Returns:
    The reward function; 1.0 or 0.0. It raises ValueError if the row lacks a field that the
    expression names.

  Raises:
    ValueError: If the regular expression or `how` is invalid.

  Example:
    >>> completion = Completion(text="It is 3.5 (exactly).", token_ids=(), num_tokens=7, stopped=True)
    >>> pattern(r"\\b{answer}\\b")(completion, {"answer": "3.5"})
    1.0

  Note:
    Python's engine backtracks: `(a+)+$` takes years on thirty letters and cannot be interrupted
    from inside its process. Run this reward in a process that is killed after a timeout, and prefer
    possessive quantifiers (`a++`), which never retry.
  """
  if how not in _WAYS:
    raise ValueError(f"pattern: found how={how!r}, expected one of {', '.join(_WAYS)}")
  flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
  # `{name}` is a field; `{2,3}` and `\{name\}` are regular expressions.
  pieces = re.split(r"(?<!\\)\{([A-Za-z_]\w*)\}", regex)
  _compile("".join(piece if i % 2 == 0 else "x" for i, piece in enumerate(pieces)), flags, regex)

  def pattern_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    for name in pieces[1::2]:
      if name not in example:
        raise ValueError(f"pattern: found a row with {sorted(map(str, example))[:12]}, expected the field {name!r}, which {regex!r} names")
    filled = "".join(piece if i % 2 == 0 else re.escape(str(example[piece])) for i, piece in enumerate(pieces))
    if how == "fullmatch" and len(completion.text) > max_chars:
      return 0.0
    match = getattr(_compile(filled, flags, regex), how)
    return float(match(completion.text[-max_chars:]) is not None)

  return pattern_reward


def _compile(text: str, flags: int, regex: str) -> re.Pattern:
  try:
    return re.compile(text, flags)  # `re` caches compiled patterns.
  except re.error as error:
    raise ValueError(f"pattern: found the regular expression {regex[:80]!r}, expected a valid one: {error}") from None
