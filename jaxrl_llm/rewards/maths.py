"""A reward for mathematically correct answers: 0.5 for 1/2, (x+1)^2 for x^2+2x+1."""

import contextlib
import functools
import itertools
import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.rewards.decoration import undecorated
from jaxrl_llm.rewards.exact_match import text_of
from jaxrl_llm.rewards.expression_limits import MAX_CHARS, too_large
from jaxrl_llm.rewards.extraction import question_of, stated_answers
from jaxrl_llm.rewards.notation import is_formula, terms_around_dots, unified
from jaxrl_llm.rewards.plain_numbers import plain_verdict
from jaxrl_llm.text_types import Completion, RewardFn

_NUMBER = re.compile(r"[0-9]++(?:[.,][0-9]++)*+")
_MAX_ANSWERS = 8  # Distinct final answers of one response; each may cost a parse.


def maths(*, field: str = "answer", require_stop: bool = True, seconds: float = 3.0) -> RewardFn:
  """Makes a reward that is 1 if the final answer is mathematically correct, else 0.

  The reasoning does not count. The answer is read from `\\boxed{}`, after `####`, from a line
  "Answer: ...", or after "the answer is" (`extraction.stated_answers`). Text before `</think>` is
  not read. A response that states several different answers earns 0 unless all are correct:
  "1/2, i.e. 0.5" can earn 1 and "5 or 6" cannot. `equivalent` decides whether two answers are equal.

  Args:
    field: Field of the example with the correct answer: LaTeX or plain text, a number, or a
      solution that states it.
    require_stop: Whether a response that was cut off by the token budget earns 0 even if it shows
      the answer.
    seconds: Time limit of one call in seconds, enforced only on the main thread of a process (see
      the note).

  Returns:
    The reward function; 1.0 or 0.0. It raises ValueError if the row has no answer or cannot be
    judged (its correct answer is beyond `expression_limits`), and TimeoutError after `seconds`.

  Raises:
    ValueError: If `seconds` is not positive.

  Example:
    >>> completion = Completion(text=r"So it is $\\boxed{\\frac{2}{4}}$.", token_ids=(), num_tokens=9, stopped=True)
    >>> maths()(completion, {"answer": "0.5"})
    1.0

  Note:
    Run it in a process that can be killed. An answer beyond `expression_limits` is wrong unless it
    is spelt like the correct one, and never reaches the algebra system. Any other slow call is
    interrupted by a timer signal. Python delivers signals only on the main thread and only between
    two operations. Off the main thread, or within one huge integer operation, only killing the
    process ends a call. math-verify's own timeouts are off, because they raise off the main thread
    and count as wrong on it.

  References:
    Math-Verify, github.com/huggingface/Math-Verify. It treats products of letters as commutative:
    "AB" equals "BA".
  """
  if not seconds > 0:
    raise ValueError(f"maths: found {seconds=}, expected a positive number of seconds")

  def maths_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    gold = gold_answer(example, field)
    if require_stop and not completion.stopped:
      return 0.0
    answers = stated_answers(completion.text, question_of(example))
    if not 1 <= len(answers) <= _MAX_ANSWERS:
      return 0.0
    with deadline(seconds):
      if all(equivalent(gold, answer) for answer in answers):
        return 1.0
      # "\boxed{1} and \boxed{2}" for the correct answer {1, 2}.
      return float(len(answers) > 1 and _is_several(gold) and equivalent(gold, ", ".join(answers)))

  return maths_reward


def maths_answer(text: str, question: str | None = None) -> str:
  """Returns the final answers that a response states, as one text; empty if it states none.

  Example:
    >>> maths_answer(r"\\boxed{1} and \\boxed{2}")
    '1, 2'
  """
  return ", ".join(stated_answers(text, question))


def gold_answer(example: Mapping[str, Any], field: str) -> str:
  """Returns the correct answer of a row: the field itself, or the answer of a full solution in it.

  Raises:
    ValueError: If the field is missing or empty, or has `####` but not exactly one answer.

  Example:
    >>> gold_answer({"answer": "7 + 8 = 15\\n#### 15"}, "answer")
    '15'
  """
  text = text_of(example, field, "maths")
  if "####" not in text and "boxed" not in text:
    return undecorated(text)
  stated = stated_answers(text)
  if "####" not in text:
    return ", ".join(stated) or undecorated(text)
  if len(stated) != 1:
    raise ValueError(f"maths: found {len(stated)} answers in the field {field!r} ({text[-80:]!r}), expected one")
  return stated[0]


@functools.lru_cache(maxsize=16_384)
def equivalent(gold: str, answer: str) -> bool:
  """Returns whether an answer is mathematically equal to the correct one. Verdicts are cached.

  Both are brought to one notation (`notation.unified`). Plain numbers are compared as fractions;
  otherwise math-verify must take both for equal, and `confirmation.confirmed` must find no
  difference: numbers and the values of formulas are equal exactly, or to 50 digits if they are
  irrational. No tolerance is absolute.

  - A decimal stands for an exact value if it is that value, correctly rounded, with at least 6
    decimal places and 6 significant digits: 0.333333 is 1/3, and 0.33 is not.
  - A list or sum with dots needs the same terms around the dots.
  - An interval equals the inequality that it solves: (0, 1) is 0 < x < 1. A point is not told from
    an open interval, as in math-verify.
  - Units are ignored ("5 cm" is 5), and words for scales are not ("5 million" is not 5).

  Args:
    gold: Correct answer, in LaTeX or plain text without dollar signs.
    answer: Answer to judge, in the same form.

  Raises:
    ValueError: If both are beyond `expression_limits` and spelt differently, so that they cannot be
      compared, math-verify cannot read the correct one, or it is not installed.

  Example:
    >>> equivalent("1200", "1,200.0"), equivalent("1/3", "0.33")
    (True, False)
  """
  gold, answer = unified(gold), unified(answer)
  verdict = plain_verdict(gold, answer)
  if verdict is not None:
    return verdict
  if (verdict := _verdict_of_dots(gold, answer)) is not None:
    return verdict
  answer_is_large, gold_is_large = too_large(answer), too_large(gold)
  if answer_is_large and gold_is_large:
    raise ValueError(f"maths: found the right answer {gold[:60]!r}, expected at most {MAX_CHARS} characters and no huge numbers")
  if answer_is_large or gold_is_large:
    return False
  if not is_formula(gold) or not is_formula(answer):
    return False
  if not (right := _parsed_gold(gold)):
    raise ValueError(f"maths: found the right answer {gold[:60]!r}, expected mathematics that math-verify can read")
  return any(_equal(*pair) for pair in itertools.product(right, _parsed(answer)))


def _verdict_of_dots(gold: str, answer: str) -> bool | None:
  """Compares "1, 2, \\ldots, n" with another list term by term; None if neither has dots."""
  left, right = terms_around_dots(gold), terms_around_dots(answer)
  if left is None and right is None:
    return None
  if left is None or right is None or list(map(len, left)) != list(map(len, right)):
    return False
  pairs = zip(itertools.chain(*left), itertools.chain(*right), strict=True)
  return all(a == b or (any(map(str.isalnum, a)) and equivalent(a, b)) for a, b in pairs)


def _equal(gold: Any, answer: Any) -> bool:
  """Returns whether two parsed expressions are equal: math-verify's verdict, confirmed exactly."""
  math_verify, confirmation, _ = _algebra()
  gold, answer = confirmation.aligned(gold, answer)
  return math_verify.verify(gold, answer, timeout_seconds=None) and confirmation.confirmed(gold, answer)


def _parsed(answer: str) -> list:
  math_verify, _, targets = _algebra()
  # In a text that is no formula, the last target takes the last number: "5, 6]" would be 6.
  several = len(_NUMBER.findall(answer)) > 1
  return math_verify.parse(f"\\boxed{{{answer}}}", targets[:-1] if several else targets, parsing_timeout=None)


# The samples of a group share their correct answer.
_parsed_gold = functools.lru_cache(maxsize=1024)(_parsed)


@functools.cache
def _algebra() -> tuple[Any, Any, list]:
  try:
    import math_verify

    from jaxrl_llm.rewards import confirmation  # Imports sympy, which comes with math-verify.
  except ImportError as error:
    raise ValueError("the reward 'maths' needs the package math-verify: pip install 'jaxrl-llm[tasks]'") from error
  # math-verify logs whole answers, and warns that its timeouts are off.
  logging.getLogger("math_verify").setLevel(logging.CRITICAL)
  return math_verify, confirmation, [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]


def _is_several(gold: str) -> bool:
  return re.search(r",|;|\\pm|\b(?:and|or)\b", gold) is not None


class _Expired(BaseException):
  """Timeout that no `except Exception` of an algebra system swallows."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
  """Interrupts the body after this many seconds on the main thread; has no effect on other threads.

  Raises:
    TimeoutError: If the time is over.

  Example:
    >>> with deadline(60):
    ...   1 + 1
    2
  """
  if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
    yield
    return

  def expire(number, frame):
    raise _Expired

  before = signal.signal(signal.SIGALRM, expire)
  try:
    # Repeated, in case a bare `except` caught the first.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    yield
  except _Expired:
    raise TimeoutError(f"it took longer than {seconds} s") from None
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
