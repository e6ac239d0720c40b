"""Shared wording of messages, and the exit statuses of commands.

Wrong settings, likely intended names, one-line errors. Every package may import this module; it
needs the standard library only.
"""

import difflib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

USAGE_ERROR = 2
"""Exit status after bad input."""

RESTART = 42
"""Exit status of a process that its launcher should start again, as the launchers of pods do."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


class UsageError(Exception):
  """Error for a request that cannot be fulfilled; its message is the lines to print."""


class MissingPackageError(ImportError):
  """A package that an optional feature needs is not installed. One line, with what to install."""


class Problem(NamedTuple):
  """A setting that is wrong; its text is "FIELD: found X, expected Y".

  A check that raises passes the problem on whole: `ValueError(problem)` has the problem's text, and
  the problem itself stays in `error.args`.

  Attributes:
    field: Dotted path of the setting.
    found: Value of the setting as text; see `shown`.
    expected: What to write instead, and why; "" if `found` already says it.

  Example:
    >>> problem = Problem("task.size", shown(1), "a whole number of at least 2")
    >>> str(problem)
    'task.size: found 1, expected a whole number of at least 2'
    >>> ValueError(problem).args[0].with_prefix("config").field
    'config.task.size'
  """

  field: str
  found: str
  expected: str = ""

  def __str__(self) -> str:
    return f"{self.field}: found {self.found}" + (f", expected {self.expected}" if self.expected else "")

  def with_prefix(self, prefix: str) -> "Problem":
    """Returns the problem of the same setting inside a section.

    A path that already begins with the section stays as it is.

    Args:
      prefix: Dotted path of the section.

    Example:
      >>> Problem("preset", "'tiny'", "None").with_prefix("model").with_prefix("config").with_prefix("config").field
      'config.model.preset'
    """
    inside = self.field == prefix or self.field.startswith(f"{prefix}.")
    return self if inside else self._replace(field=f"{prefix}.{self.field}")


def problem_of(error: Exception) -> Problem | str:
  """Returns the problem that an error was raised with, or else its text on one line.

  Example:
    >>> problem_of(ValueError(Problem("seed", "-1", "0 or more"))).field, problem_of(ValueError("a\\n text"))
    ('seed', 'a text')
  """
  return error.args[0] if error.args and isinstance(error.args[0], Problem) else " ".join(str(error).split())


def shown(value: Any, *, limit: int = 120) -> str:
  """Formats a value for a message: on one line, printable and short.

  Args:
    value: Value of any type.
    limit: Maximum number of characters.

  Example:
    >>> shown("x" * 8, limit=8), shown(10**5000)
    ("'xxx...x'", 'a whole number of more than 4,300 digits')
  """
  try:
    text = " ".join(repr(value).split())
  except ValueError:  # Python refuses to convert it.
    return "a whole number of more than 4,300 digits"
  return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-(limit // 4):]}"


def did_you_mean(word: Any, options: Iterable[str], hint: str = "; did you mean {!r}?", *, cutoff: float = 0.6) -> str:
  """Returns a hint at the option closest to a word, or "" if none is close.

  Args:
    word: Name that is not among the options, of whatever type the user gave it.
    options: Valid names.
    hint: Format string with a placeholder for the closest option.
    cutoff: Minimum similarity of the option, between 0 and 1.

  Example:
    >>> did_you_mean("ful", ["none", "full"]), did_you_mean("xyz", ["none", "full"])
    ("; did you mean 'full'?", '')
    >>> did_you_mean("sed", ["seed"], ", did you mean --{}?")
    ', did you mean --seed?'
  """
  close = difflib.get_close_matches(str(word), list(options), n=1, cutoff=cutoff)
  return hint.format(close[0]) if close else ""


def one_line(error: BaseException | str, *, typed: bool = True, limit: int = 200, tail: int = 0) -> str:
  """Formats an error on one short line, even if its own `__str__` raises.

  Args:
    error: Exception of any package, or a text.
    typed: Whether the exception's type precedes its message. An exception without a message is
      always shown by its type.
    limit: Maximum number of characters kept.
    tail: Number of those characters kept from the end of a longer text, for messages that end with
      the reason.

  Example:
    >>> one_line(ValueError("two\\n  lines")), one_line(KeyError(), typed=False)
    ('ValueError: two lines', 'KeyError')
    >>> one_line("a long text", limit=6), one_line("a long text", limit=6, tail=4)
    ('a long...', 'a  ... text')
  """
  name, message = type(error).__name__, error
  if isinstance(error, BaseException):
    try:
      message = str(error)
    except Exception as second:
      message = f"(its text cannot be made: {type(second).__name__})"
    message = name if not message.strip() else f"{name}: {message}" if typed else message
  # A lone surrogate, possible in a file name, would raise another error when the line is printed.
  text = " ".join(message.encode("utf-8", "backslashreplace").decode().split())
  if len(text) <= limit:
    return text
  return f"{text[: limit - tail]} ... {text[-tail:]}" if tail else f"{text[:limit]}..."


def refuse(error: Exception | str, status: int = USAGE_ERROR) -> int:
  """Prints each line of an error to stderr, and returns the exit status of the command."""
  for line in str(error).splitlines():
    print(f"error: {line}", file=sys.stderr)
  return status
