"""Headings of Markdown with four hashes, told from answers behind four hashes."""

import re

_NUMBERING = re.compile(
  r"\**(?:(?:step|part|case|question|problem|method|phase|section|stage)\s*\#?(?:[0-9]|[ivx]+\b|[a-z]\b)"
  r"|\(?[0-9]{1,2}(?:\.[0-9]{1,2})?(?:(?:[.):]\**|\s+[-\u2013\u2014])\s+\**[a-z]|\s+\**(?-i:[A-Z][a-z]))"
  r"|\(?(?-i:[a-z])\)\s+\S)",
  re.IGNORECASE,
)
_VALUE = re.compile(
  r"[\s*$({\[\"'`]{0,8}+[-+\u2212\u00b1]?+(?:[$\u00a3\u20ac\u00a5]?[0-9.\\]"
  r"|[\u221a\u03c0\u221e\u00bc-\u00be\u2150-\u215e]"
  r"|[A-Za-z](?![A-Za-z']|\s+[a-z]{2}))"
)


def is_heading(body: str, *, followed: bool) -> bool | None:
  """Returns whether a line of four hashes is a heading; None for words, which may be either.

  Args:
    body: Text behind the hashes.
    followed: Whether any text follows the line.

  Example:
    >>> [is_heading(body, followed=True) for body in ("1. Add", "Step 2: 40 + 2", "42 apples", "Conclusion")]
    [True, True, False, None]
  """
  if followed and _NUMBERING.match(body):
    return True
  return False if _VALUE.match(body) else None
