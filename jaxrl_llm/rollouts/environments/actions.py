"""Conversion of the policy's text to an environment's action, and of an observation to text.

Actions and observations are JSON objects.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any


def json_object(text: str) -> dict[str, Any] | None:
  """Returns the JSON object that a text is; None if it is something else.

  Example:
    >>> json_object('{"move": 3}'), json_object("[3]"), json_object("{")
    ({'move': 3}, None, None)
  """
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def object_in(text: str) -> dict[str, Any] | None:
  """Returns the first JSON object in a text, whatever surrounds it; None if there is none.

  Example:
    >>> object_in('Let {x} be 3: {"move": 3} {"move": 4}'), object_in("move 3")
    ({'move': 3}, None)
  """
  decoder, start = json.JSONDecoder(), text.find("{")
  while start >= 0:
    try:
      return decoder.raw_decode(text, start)[0]
    except (ValueError, RecursionError):
      start = text.find("{", start + 1)
  return None


def action_reader(template: str | None, schema: Mapping[str, Any] | None) -> Callable[[str], dict[str, Any] | str]:
  """Returns the function from the policy's turn to an action, or to what is wrong with the turn.

  A turn is used without the white space around it.

  Args:
    template: Action as a JSON object, in whose texts `{text}` stands for the turn. None decides by
      the schema.
    schema: JSON schema of the actions; None if it is unknown.

  Example:
    >>> action_reader('{"tool": "echo", "arguments": {"message": "{text}"}}', None)("hi")
    {'tool': 'echo', 'arguments': {'message': 'hi'}}
    >>> action_reader(None, {"properties": {"move": {}, "metadata": {}}})("up")
    {'move': 'up'}
    >>> action_reader(None, {"properties": {"row": {}, "column": {}}})("up")
    'expected a JSON object with row, column'
  """
  if template is not None:
    whole = json_object(template)
    return lambda text: _filled(whole, text.strip())
  properties = (schema or {}).get("properties")
  fields = [name for name in properties if name != "metadata"] if isinstance(properties, Mapping) else []
  if len(fields) == 1:
    return lambda text: {fields[0]: text.strip()}
  expected = f"expected a JSON object{' with ' if fields else ''}{', '.join(fields)}"

  def read(text: str) -> dict[str, Any] | str:
    action = object_in(text)
    return expected if action is None else action

  return read


def _filled(value: Any, text: str) -> Any:
  if isinstance(value, dict):
    return {name: _filled(item, text) for name, item in value.items()}
  if isinstance(value, list):
    return [_filled(item, text) for item in value]
  return value.replace("{text}", text) if isinstance(value, str) else value


def observation_text(observation: Mapping[str, Any], field: str | None) -> str:
  """Returns what the policy reads of an observation.

  It is the field, or the text of a single field that says something, or all of them as JSON.

  Args:
    observation: Observation to show.
    field: Name of the field, with dots for nested ones; None is no choice. An observation without
      it, such as an error of a tool, is shown as if it were None.

  Example:
    >>> observation_text({"result": {"data": "hi"}, "error": None}, "result.data")
    'hi'
    >>> observation_text({"question": "2+2?", "score": None, "metadata": {}}, None)
    '2+2?'
    >>> observation_text({"message": "go on", "x": 1, "metadata": {}}, None)
    '{"message": "go on", "x": 1}'
  """
  value: Any = observation
  for name in field.split(".") if field is not None else ():
    value = value.get(name) if isinstance(value, Mapping) else None
  if field is None or value is None:
    value = {name: x for name, x in observation.items() if name != "metadata" and x not in (None, "", [], {})}
    if len(value) == 1 and isinstance(text := next(iter(value.values())), str):
      value = text
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
  # A lone surrogate, which JSON allows, cannot be encoded as tokens.
  return text.encode("utf-8", "replace").decode()
