"""The file of an experiment's numbers, `results.json`: rounded, small, and readable as a diff."""

import json
import math
from typing import Any


def rounded(x: Any, digits: int = 4) -> Any:
  """Rounds floats to a few significant digits, so that the file stays small."""
  if isinstance(x, dict):
    return {key: rounded(value, digits) for key, value in x.items()}
  if isinstance(x, list | tuple):
    return [rounded(value, digits) for value in x]
  return float(f"{x:.{digits}g}") if isinstance(x, float) and math.isfinite(x) else x


def to_json(results: dict) -> str:
  """Formats results as JSON.

  A list of rows becomes a table: its columns once, then a line for each row, with null where it has
  no such column.
  """
  parts = []
  for key, value in results.items():
    if isinstance(value, list) and value and isinstance(value[0], dict):
      columns = list(dict.fromkeys(name for row in value for name in row))
      rows = ",\n  ".join(json.dumps([row.get(name) for name in columns], separators=(",", ":")) for row in value)
      text = f'{{"columns": {json.dumps(columns)}, "rows": [\n  {rows}\n ]}}'
    elif isinstance(value, dict):
      text = "{\n  " + ",\n  ".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in value.items()) + "\n }"
    else:
      text = json.dumps(value)
    parts.append(f" {json.dumps(key)}: {text}")
  return "{\n" + ",\n".join(parts) + "\n}\n"


def from_json(text: str) -> dict:
  """Inverts `to_json`.

  Example:
    >>> from_json(to_json({"runs": [{"seed": 0, "x": 1.5}]}))
    {'runs': [{'seed': 0, 'x': 1.5}]}
    >>> from_json(to_json({"runs": [{"seed": 0}, {"seed": 1, "change": 0.1}]}))
    {'runs': [{'seed': 0, 'change': None}, {'seed': 1, 'change': 0.1}]}
  """
  is_table = lambda value: isinstance(value, dict) and set(value) == {"columns", "rows"}
  rows = lambda table: [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
  return {key: rows(value) if is_table(value) else value for key, value in json.loads(text).items()}
