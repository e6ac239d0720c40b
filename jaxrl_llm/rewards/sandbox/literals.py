"""Plain values as one line of text, and back.

Only values cross the boundary of a sandbox: no class, no code and no `__eq__`. This module is
copied into sandboxes, so it imports nothing from the package.
"""

import json

MAX_CHARS = 1 << 26  # Length limit of one line. The output limit of a sandbox is usually lower.
# Larger integers are sent as hexadecimal digits, which Python parses in linear time.
_BIG = 1 << 256
_KINDS = {"t": tuple, "s": set, "f": frozenset}


class Unsendable(TypeError):
  """Error for a value that is not made of numbers, texts, bytes and containers of these."""


def _pack(value):
  if value is None or isinstance(value, bool | str):
    return value
  if isinstance(value, int):
    return int(value) if -_BIG < value < _BIG else {"i": hex(value)}
  if isinstance(value, float):
    return float(value)
  if isinstance(value, complex):
    return {"c": [value.real, value.imag]}
  if isinstance(value, bytes | bytearray):
    return {"b": value.hex()}
  if isinstance(value, list):
    return [_pack(item) for item in value]
  for mark, kind in _KINDS.items():
    if isinstance(value, kind):
      return {mark: [_pack(item) for item in value]}
  if isinstance(value, dict):
    return {"d": [[_pack(key), _pack(item)] for key, item in value.items()]}
  if hasattr(value, "tolist"):  # A scalar or an array of NumPy.
    return _pack(value.tolist())
  raise Unsendable(f"found a value of type {type(value).__name__}, expected numbers, texts, bytes and containers of these")


def _unpack(value):
  if isinstance(value, list):
    return [_unpack(item) for item in value]
  if not isinstance(value, dict):
    return value
  ((mark, item),) = value.items()
  if mark == "i":
    return int(item, 16)
  if mark == "c":
    return complex(*item)
  if mark == "b":
    return bytes.fromhex(item)
  if mark == "d":
    return {_unpack(key): _unpack(each) for key, each in item}
  return _KINDS[mark](_unpack(each) for each in item)


def encode(value) -> str:
  """Encodes a value as one line of ASCII, without the line break.

  Args:
    value: Value made of numbers, strings, bytes, lists, tuples, sets and dicts. Instances of
      subclasses become instances of the built-in types; NumPy's scalars and arrays become numbers
      and lists.

  Raises:
    Unsendable: If the value is made of anything else, or is too large.

  Example:
    >>> encode((1, {2: "a"}))
    '{"t": [1, {"d": [[2, "a"]]}]}'
  """
  try:
    line = json.dumps(_pack(value))
  except RecursionError:
    raise Unsendable("found a value that contains itself or is nested too deeply, expected a plain one") from None
  if len(line) >= MAX_CHARS:
    raise Unsendable(f"found a value of {len(line)} characters, expected fewer than {MAX_CHARS}")
  return line


def decode(line: str):
  """Decodes a line of `encode` to a value of built-in types. The line may be hostile.

  Raises:
    ValueError: If the line does not hold a value.

  Example:
    >>> decode(encode((1, {2: b"a"}, {3.5})))
    (1, {2: b'a'}, {3.5})
  """
  if len(line) > MAX_CHARS:
    raise ValueError(f"found {len(line)} characters, expected at most {MAX_CHARS}")
  try:
    return _unpack(json.loads(line))
  except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
    raise ValueError(f"not a plain value: {type(error).__name__}") from None
