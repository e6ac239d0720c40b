"""Refusals of a client's request, in the format of OpenAI's errors."""

from collections.abc import Iterable
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean, shown

_LONGEST_NAME = 64
"""Longest name for which the closest one is looked for: the search takes quadratic time."""


class Refusal(Exception):
  """An answer other than the one that the client asked for.

  Args:
    status: HTTP status.
    message: One line that says what is wrong and what to send instead.
    field: Dotted path of the field that is wrong; None for no single field.
    code: Machine-readable reason.
    kind: Type of the error in OpenAI's format.
    headers: Further headers of the answer.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    field: str | None = None,
    code: str | None = None,
    kind: str = "invalid_request_error",
    headers: tuple[tuple[str, str], ...] = (),
  ):
    super().__init__(message)
    self.status, self.message, self.field, self.code, self.kind, self.headers = status, message, field, code, kind, headers

  @property
  def body(self) -> dict[str, Any]:
    """JSON value of the answer."""
    return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}


def wrong(field: str, value: Any, expected: str, *, code: str | None = None) -> Refusal:
  """Returns the refusal of one field's value.

  Example:
    >>> wrong("temperature", "hot", "a number").message
    "temperature: found 'hot', expected a number"
  """
  return Refusal(400, str(Problem(field, shown(value), expected)), field=field, code=code)


def hint(name: str, options: Iterable[str]) -> str:
  """Returns a hint at the closest option, or "" if none is close or the name is very long.

  Example:
    >>> hint("temprature", ["temperature", "top_p"]), hint("x" * 10**6, ["temperature"])
    ("; did you mean 'temperature'?", '')
  """
  return did_you_mean(name, options) if len(name) <= _LONGEST_NAME else ""


def busy(message: str) -> Refusal:
  """Returns the refusal of a request that may be sent again in a second."""
  return Refusal(429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=(("retry-after", "1"),))


def broken(message: str = "the engine cannot decode; the service's log says why") -> Refusal:
  """Returns the refusal of every request to an engine that has failed."""
  return Refusal(503, message, code="engine_broken", kind="server_error")


def ending() -> Refusal:
  """Returns the refusal of a request that the end of the service cuts short."""
  return Refusal(503, "the service is ending", code="service_ending", kind="server_error")
