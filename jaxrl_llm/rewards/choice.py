"""A reward for the letter of a multiple-choice answer."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.decoration import undecorated
from jaxrl_llm.rewards.exact_match import text_of
from jaxrl_llm.rewards.extraction import answer_part, question_of, stated
from jaxrl_llm.text_types import Completion, RewardFn

_COMMANDS = re.compile(
  r"\\(?:text\w*|math\w+|rm|bf|displaystyle|left|right|q?quad)(?![a-zA-Z])|\\[(),;: !\[\]]|\*\*|__|</?(?:b"
  r"|strong|i|em)>|[{}$`*~]"
)
_LEAD = re.compile(
  r"(?:(?:the|an?)\s+)?(?:(?:correct|right|best|final)\s+)?(?:option|choice|letter|answer)s?\s*(?:is\b"
  r"|[:=])?\s*",
  re.IGNORECASE,
)
# Words behind a letter that show that it is no choice, or behind "A" and "I" that it is no word.
_DENIAL = re.compile(r"\s*(?:is|are|was)\s+(?:not|n't|wrong|incorrect|false|a|an)\b", re.IGNORECASE)
_REASON = re.compile(
  r"\s+(?:because|since|as|is|was|which|due|given|with|by|for|so|in|from|if|and|or|but)\b"
  r"|\s+[0-9$\\=(\u2013\u2014-]"
)
_OTHERS = re.compile(r"\W*(?:both|all|none|neither|either|only)\b", re.IGNORECASE)
_TEXT = re.compile(r"\s*(?!(?:or|and|maybe|perhaps|possibly|also|even|option|choice)\b)[^\W\d_]{2}", re.IGNORECASE)
_JOINED = re.compile(r"\band\s+[A-Z](?![\w).:\]])")
_NEGATION = re.compile(
  r"\b(?:not|no|none|neither|nor|except|but|all|both|every|any|without|never|wrong|incorrect)\b",
  re.IGNORECASE,
)

EXAMPLES = (
  ("B", "B"), ("(B)", "B"), ("b", "B"), ("B. Four is even", "B"), ("B) Both A and C", "B"),
  ("B. Vitamins A and D", "B"), ("(B) vitamin A", "B"), ("B because 2 is even", "B"),
  ("B (4 cm)", "B"), ("B - four", "B"), ("option $B$", "B"), (r"\textbf{(B) }15", "B"),
  (r"\text{B: four}", "B"), ("(D) None of (A) and (B)", "D"),
  ("four (B)", "B"), ("A dog (B)", "B"), ("B or C", ""), ("(A) or (B)", ""), ("A, B", ""), ("B and C", ""),
  ("B) 4 or C) 5", ""), ("B) four and C) five", ""), ("B. four or C", ""), ("B-C-A", ""),
  ("All except E", ""), ("None of A and B", ""), ("not B", ""), ("a B-tree", ""), ("vitamin B", ""),
  ("ABCD", ""), ("B'", ""), ("B is wrong", ""),
  ("B = C", ""),
)  # fmt: skip
"""Pairs of what is stated and the letter that is chosen; empty if none is."""


def choice(*, letters: str = "ABCDEFGHIJ", field: str = "answer", require_stop: bool = True) -> RewardFn:
  """Makes a reward that is 1 if the response chooses the correct option, else 0.

  A choice is stated in one of the forms of `forms.FORMS`, such as `\\boxed{B}`, `#### B`, "Answer:
  (B) four" or "the answer is B because". The letter leads the statement; letters in the text of an
  option do not count. Without a statement, the last line counts if it is only `B`, `(B)`, `option
  B` or `**B) and the option's text**`. Options in words are not read. Two different letters are a
  hedge and earn 0.

  Args:
    letters: Upper-case letters of the options. A lower-case letter counts only in brackets or if
      nothing else is stated.
    field: Field of the example with the correct letter, such as "B" or "(B)", or the option's
      index, counted from 0.
    require_stop: Whether a response that was cut off by the token budget earns 0 even if it shows
      the answer.

  Returns:
    The reward function; 1.0 or 0.0. It raises ValueError if the row's answer is not one of the
    letters.

  Raises:
    ValueError: If there are fewer than two letters, or one occurs twice or is not upper-case.

  Example:
    >>> completion = Completion("Both are odd, so the answer is (B).", (), num_tokens=12, stopped=True)
    >>> choice(letters="ABCD")(completion, {"answer": "B"})
    1.0
  """
  if len(letters) < 2 or len(set(letters)) != len(letters) or not re.fullmatch("[A-Z]+", letters):
    raise ValueError(f"choice: found {letters=}, expected two or more different upper-case letters")

  def choice_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    gold = right_letter(text_of(example, field, "choice"), letters)
    if require_stop and not completion.stopped:
      return 0.0
    return float(chosen_letter(completion.text, letters, question_of(example)) == gold)

  return choice_reward


def chosen_letter(text: str, letters: str, question: str | None = None) -> str | None:
  """Returns the letter that a response chooses, or None if it chooses none or several.

  Args:
    text: Response.
    letters: Letters of the options.
    question: Question, whose boxes a response may quote; None if unknown.

  Example:
    >>> chosen_letter("Both are odd, so the answer is (B).", "ABCD")
    'B'
  """
  letters_of: dict[str, str | None] = {}

  def letter(body: str) -> str | None:
    if body not in letters_of:
      letters_of[body] = letter_in(body, letters)
    return letters_of[body]

  # A box may hold the option's value, and a sentence behind it the letter.
  if not (statements := stated(text, question, accepts=lambda body: letter(body) != "")):
    last_line = undecorated(_COMMANDS.sub(" ", answer_part(text).rstrip().rpartition("\n")[2]))
    lead = _LEAD.match(last_line)
    # "A dog barks." is no choice.
    line = re.fullmatch(
      r"[(\[]?(?:[A-Z]|[a-z](?=\)))(?:(?:[)\].:]|\s[-\u2013\u2014]\s).*)?",
      last_line[lead.end() if lead else 0 :],
    )
    return letter_in(line[0], letters) or None if line else None
  chosen = {letter(statement.text) for statement in statements} - {""}
  return chosen.pop() if len(chosen) == 1 and None not in chosen else None


def letter_in(statement: str, letters: str) -> str | None:
  """Returns the letter that a statement chooses.

  Returns:
    The letter, None if there are several, or an empty text if there is none.

  Example:
    >>> letter_in("B) Both A and C", "ABCD"), letter_in("B or C", "ABCD"), letter_in("four", "ABCD")
    ('B', None, '')
  """
  if len(statement) == 1 and statement in letters:
    return statement
  text = undecorated(_COMMANDS.sub(" ", statement))
  text = text[lead.end() :] if (lead := _LEAD.match(text)) else text
  if len(text) == 1 and text.upper() in letters:
    return text.upper()
  label, bracketed, several, hedge = _patterns(letters)
  match = label.match(text)
  if match and not (match[2] in ("A", "I") and not match[3] and _is_word(text[match.end() :])):
    which = 1 if match[1] else 2
    letter, rest, behind = match[which].upper(), text[match.end() :], text[match.end(which) :]
    if not rest:
      return letter
    if _DENIAL.match(rest):
      return ""
    # "B) Both A and C", "(B) A and C", "B (A and C)": the letters behind are the option's text.
    is_label = match[1] or match[3] in (")", ".", ":", "]") or rest[:2] == " ("
    if _OTHERS.match(rest) or (is_label and several.match(rest)):
      return letter
    # "B. Vitamin C and D": a letter after "and" is the option's text too, if it is no label itself.
    behind = _JOINED.sub(" ", behind) if is_label and _TEXT.match(rest) else behind
    others = {other.upper() for pair in hedge.findall(behind) for other in pair if other}
    return letter if others <= {letter} else None
  if _NEGATION.search(text):
    return ""
  others = {(one or other).upper() for one, other in bracketed.findall(text)}
  return others.pop() if len(others) == 1 else None if others else ""


def _is_word(rest: str) -> bool:
  """Returns whether what stands behind a bare "A" or "I" makes it the article or the pronoun."""
  return bool(rest.strip()) and not _REASON.match(rest)


@functools.cache
def _patterns(letters: str) -> tuple[re.Pattern, ...]:
  """Returns patterns: a leading label, one behind a text, several in a text, one in a hedge."""
  either = f"[{letters}{letters.lower()}]"
  label = (
    rf"[(\[]\s*({either})(?:\s*[)\]]|\s+\(|\s*$)|([{letters}]"
    rf"|{either}(?=\)))(?:\s*([)\].:,;\u3002\uff0c\u3001\uff1a]|=(?!\s*[A-Za-z])|\s[-\u2013\u2014](?=\s)"
    rf"|[\u2013\u2014])|(?=\s(?!\s*=)|\(|$))"
  )
  bracketed = rf"[(\[]\s*({either})\s*[)\]]|(?:[,:]|\b(?:option|choice|letter|answer|is))\s+([{letters}])\s*$"
  hedge = (
    rf"(?:\b(?:or|and)|[,/&+]|;(?!\s*{either}\s))\s*(?:maybe|perhaps|possibly|also|even|option"
    rf"|choice)?\s*(?:[(\[]({either})[)\]]|([{letters}])(?:[)\].:,;]|\s*$|\s+(?:or|and)\b))"
    rf"|\b[oO]r\s+(?:maybe\s+|perhaps\s+|possibly\s+|option\s+)?([{letters}])\b|^\s*(?:/|&"
    rf"|and)\s*([{letters}])\b|^[)\]]?\s*[(\[]({either})[)\]]"
  )
  several = rf"\s*\(?[{letters}](?:,\s*[{letters}])*,?\s*(?:and|or|&)\s*[{letters}]\b"
  return tuple(map(re.compile, (label, bracketed, several, hedge)))


def right_letter(text: str, letters: str = "ABCDEFGHIJ") -> str:
  """Returns the letter of the right option from a row's answer: a letter, or its number from 0.

  Raises:
    ValueError: If the answer is neither.

  Example:
    >>> right_letter("(b)"), right_letter("2")
    ('B', 'C')
  """
  answer = text.strip().strip("()[].: ").upper()
  if answer.isdecimal() and int(answer) < len(letters):
    return letters[int(answer)]
  if len(answer) != 1 or answer not in letters:
    raise ValueError(
      f"choice: found the answer {text[:60]!r}, expected one of {', '.join(letters)} or its number from 0"
    )
  return answer
