"""Fields of a `config.json`, with the type that each must have."""

from typing import Any

MISSING = object()

# Tests of a field's value, by the name of its type in messages. In Python a bool is an int, but in
# a config it is not.
_TYPES = {
  "a positive integer": lambda x: isinstance(x, int) and not isinstance(x, bool) and x > 0,
  "a positive number": lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < float("inf"),
  "true or false": lambda x: isinstance(x, bool),
  "a list of layers, counted from 0": lambda x: isinstance(x, list) and all(type(y) is int and y >= 0 for y in x),
  "an object": lambda x: isinstance(x, dict),
  "an integer from 0": lambda x: type(x) is int and x >= 0,
}
INT, NUMBER, BOOL, LAYERS, OBJECT, COUNT = _TYPES


def get(raw: dict[str, Any], field: str, kind: str, default: Any = MISSING, *, where: str) -> Any:
  """Returns a field after a check of its type; null counts as missing.

  Raises:
    ValueError: If a field without default is missing, or a value is not of its kind.

  Example:
    >>> get({"num_layers": "2"}, "num_layers", INT, where="config.json")
    Traceback (most recent call last):
    ...
    ValueError: config.json: num_layers: found '2', expected a positive integer
  """
  value = raw.get(field)
  if value is None:
    if default is MISSING:
      raise ValueError(f"{where}: {field} is missing, expected {kind}")
    return default
  if not _TYPES[kind](value):
    raise ValueError(f"{where}: {field}: found {value!r}, expected {kind}")
  return value
