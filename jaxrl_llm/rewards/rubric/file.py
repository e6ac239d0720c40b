"""Rubric files: the criteria of a judge, their weights, and the endpoint that is asked."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from jaxrl_llm.messages import Problem, did_you_mean, one_line, shown

SUFFIXES = (".yaml", ".yml", ".json")

TEMPLATE = "{problem}\n\n{reference}\n\n{response}\n\nGrade the response by the criteria. Answer with the JSON object alone."
"""Default of the field `template`; each placeholder becomes a block between marks."""

PLACEHOLDERS = ("problem", "reference", "response")

BASE_URL = "OPENAI_BASE_URL"
"""Environment variable with the default of the field `url`."""

_MAX_BYTES = 1 << 20
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_CRITERION = re.compile(r"[a-z][a-z0-9_]{0,39}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_SCALE = re.compile(r"(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)")
# Others may be keys, and are not shown.
_VARIABLE, _SHOWN_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_OWN_FIELDS = ("messages", "model", "n", "stream")


class Criterion(NamedTuple):
  """One question that the judge answers about a response.

  Attributes:
    name: Name in the judge's answer and in metrics.
    description: What the judge is asked.
    weight: Weight in the reward; a negative one is a penalty, and 0 only logs the score.
    low, high: Bounds of the score.
    is_yes_no: Whether the answer is "yes" (1) or "no" (0).
  """

  name: str
  description: str
  weight: float = 1.0
  low: float = 0.0
  high: float = 1.0
  is_yes_no: bool = True


class Rubric(NamedTuple):
  """A rubric file whose fields have been checked. It holds no key.

  Attributes:
    path: Path of the file.
    name: Name in metrics; the default is the name of the file without its suffix.
    url: Base URL of the endpoint, such as "http://localhost:8000/v1". The default is the value of
      the environment variable OPENAI_BASE_URL.
    model: Name of the model, as the endpoint lists it.
    api_key_env: Name of the environment variable with the API key; None if the endpoint needs none.
    criteria: Criteria, in the order in which the judge is asked.
    instructions: Further text for the judge, before the criteria.
    template: Text of the user's message, with the placeholders {problem}, {reference}, {response}.
    temperature: Temperature of the judge.
    max_tokens: Maximum number of tokens of an answer.
    timeout_s: Limit on one request, in seconds.
    deadline_s: Limit on all requests about a batch of responses, in seconds.
    concurrency: Maximum number of requests at a time.
    tries: Maximum number of requests about one response.
    first_wait_s: Wait before the second request about a response, in seconds; it doubles from one
      request to the next.
    max_chars: Characters of the longest response that is judged.
    extra: Further fields of the request, such as `seed`; None leaves a field out.
  """

  path: str
  name: str
  url: str
  model: str
  api_key_env: str | None
  criteria: tuple[Criterion, ...]
  instructions: str
  template: str
  temperature: float
  max_tokens: int
  timeout_s: float
  deadline_s: float
  concurrency: int
  tries: int
  first_wait_s: float
  max_chars: int
  extra: Mapping[str, Any]


class _Field(NamedTuple):
  """A field of a rubric: its default, what it may hold, and the words for it."""

  default: Any
  holds: Callable[[Any], bool]
  words: str


_is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
_is_text = lambda x: isinstance(x, str) and bool(x.strip())
_counts = lambda least, most: lambda x: isinstance(x, int) and not isinstance(x, bool) and least <= x <= most
_seconds = lambda most: lambda x: _is_number(x) and 0 < x <= most
_MISSING = object()

# fmt: off
_FIELDS = {
  "name": _Field(None, lambda x: isinstance(x, str) and bool(_NAME.fullmatch(x)), "letters, digits, '_', '-' and '.'"),
  "url": _Field(None, _is_text, f"a URL such as 'http://localhost:8000/v1'; without one, {BASE_URL} is read"),
  "model": _Field(_MISSING, _is_text, "the name of a model of the endpoint"),
  "api_key_env": _Field(None, _is_text, "the name of an environment variable"),
  "criteria": _Field(_MISSING, lambda x: isinstance(x, list) and 0 < len(x) <= 50, "a list of 1 to 50 criteria"),
  "instructions": _Field("", lambda x: isinstance(x, str), "a text"),
  "template": _Field(TEMPLATE, _is_text, "a text with {response}, and perhaps {problem} and {reference}"),
  "temperature": _Field(0.0, lambda x: _is_number(x) and 0 <= x <= 2, "a number from 0 to 2"),
  "max_tokens": _Field(512, _counts(1, 10**6), "a whole number of at least 1"),
  "timeout_s": _Field(60.0, _seconds(86_400), "a number of seconds above 0"),
  "deadline_s": _Field(300.0, _seconds(86_400), "a number of seconds above 0"),
  "concurrency": _Field(16, _counts(1, 512), "a whole number from 1 to 512"),
  "tries": _Field(5, _counts(1, 20), "a whole number from 1 to 20"),
  "first_wait_s": _Field(0.5, _seconds(60), "a number of seconds above 0, at most 60"),
  "max_chars": _Field(20_000, _counts(1, 10**7), "a whole number of at least 1"),
  "extra": _Field({}, lambda x: isinstance(x, dict) and all(isinstance(key, str) for key in x), "a mapping of further fields"),
}
_CRITERION_FIELDS = {
  "name": _Field(_MISSING, lambda x: isinstance(x, str) and bool(_CRITERION.fullmatch(x)), "lower-case letters, digits and '_'"),
  "description": _Field(_MISSING, _is_text, "a text: what the judge is asked"),
  "weight": _Field(1.0, lambda x: _is_number(x) and abs(x) <= 1e6, "a number"),
  "scale": _Field("yes/no", lambda x: isinstance(x, str) and _scale(x) is not None, "'yes/no', or bounds such as '1..5'"),
}
# fmt: on


def read_rubric(path: str | os.PathLike) -> Rubric:
  """Reads a rubric file, YAML or JSON with the same keys.

  Raises:
    ValueError: If the file cannot be read or a field is wrong. One line for each problem.
  """
  rubric, problems = _read(Path(path))
  if rubric is None:
    raise ValueError("\n".join(problems))
  return rubric


def rubric_problems(path: str | os.PathLike) -> list[str]:
  """Returns the problems of a rubric file, one line each, without asking its endpoint."""
  return _read(Path(path))[1]


def api_key(rubric: Rubric) -> str | None:
  """Returns the API key of a rubric, which is nowhere kept but in the environment."""
  return None if rubric.api_key_env is None else os.environ.get(rubric.api_key_env)


def _read(path: Path) -> tuple[Rubric | None, list[str]]:
  """Returns a rubric and no problems, or None and its problems."""
  try:
    document = _load(path)
  except ValueError as error:
    return None, [f"{path}: {error}"]
  problems = list(_field_problems(document, _FIELDS))
  values = {name: document.get(name, field.default) for name, field in _FIELDS.items()}
  wrong = {problem.field for problem in problems}
  if "criteria" not in wrong:
    values["criteria"], own = _criteria(values["criteria"])
    problems += own
  if "url" not in wrong:
    origin = "url"
    if values["url"] is None:
      origin, values["url"] = f"url (of the environment variable {BASE_URL})", os.environ.get(BASE_URL)
    problems += _url_problems(values["url"], origin)
  for name, further in (("api_key_env", _key_problems), ("template", _template_problems), ("extra", _extra_problems)):
    if name not in wrong:
      problems += further(values[name])
  if not wrong & {"timeout_s", "deadline_s"} and values["timeout_s"] > values["deadline_s"]:
    problems.append(Problem("timeout_s", shown(values["timeout_s"]), f"at most deadline_s={values['deadline_s']:g}"))
  if problems:
    return None, [f"{path}: {problem}" for problem in problems]
  values["name"] = values["name"] or re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem)
  values["url"] = values["url"].rstrip("/")
  return Rubric(path=str(path), **values), []


def _load(path: Path) -> dict[str, Any]:
  """Reads the mapping of a file. Raises a ValueError of one line, without the path."""
  if path.suffix not in SUFFIXES:
    raise ValueError(f"found {path.suffix or 'no suffix'}, expected the path of a rubric, a file .yaml, .yml or .json")
  try:
    data = path.read_bytes()
  except OSError as error:
    raise ValueError(f"found no file that can be read ({error.strerror}), expected a rubric") from error
  if len(data) > _MAX_BYTES:
    raise ValueError(f"found {len(data):,} bytes, expected a rubric of at most {_MAX_BYTES:,}")
  try:
    document = _json(data) if path.suffix == ".json" else _yaml(data)
  except ImportError as error:
    raise ValueError("found YAML, expected JSON (a file .json with the same keys): PyYAML is missing (pip install pyyaml)") from error
  except RecursionError as error:
    raise ValueError("found a document that is nested too deeply, expected a rubric") from error
  if not isinstance(document, dict):
    raise ValueError(f"found {type(document).__name__}, expected a mapping with the keys {', '.join(_FIELDS)}")
  return document


def _json(data: bytes) -> Any:
  try:
    return json.loads(data, object_pairs_hook=unique_keys)
  except _Twice:
    raise
  except ValueError as error:
    raise ValueError(f"found no JSON ({one_line(error, typed=False)})") from error


def _yaml(data: bytes) -> Any:
  import yaml  # A dependency of ml-collections; imported late, since most runs have no rubric.

  def check(node: yaml.Node, seen: set[int]) -> None:
    if id(node) in seen:
      return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
      unique_keys([(str(key.value), None) for key, _ in node.value])
      for _, value in node.value:
        check(value, seen)
    elif isinstance(node, yaml.SequenceNode):
      for value in node.value:
        check(value, seen)

  try:
    if (tree := yaml.compose(data, Loader=yaml.SafeLoader)) is not None:
      check(tree, set())
    return yaml.safe_load(data)
  except yaml.YAMLError as error:
    raise ValueError(f"found no YAML ({one_line(error, typed=False)})") from error


class _Twice(ValueError):
  """A key that occurs twice in a mapping."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns pairs as a mapping, for `json.loads`. Raises ValueError if a key occurs twice."""
  keys = [key for key, _ in pairs]
  if twice := [key for key in keys if keys.count(key) > 1]:
    raise _Twice(f"found the key {shown(twice[0], limit=40)} twice, expected each key once")
  return dict(pairs)


def _field_problems(document: Mapping[str, Any], table: Mapping[str, _Field], prefix: str = "") -> Iterator[Problem]:
  """Yields the problems of each field by itself.

  Values of unknown fields are not shown, because they may be keys.
  """
  for name in document:
    if name not in table:
      is_key = str(name).lower().replace("-", "_") == "api_key"
      hint = "; did you mean 'api_key_env', the name of an environment variable?" if is_key else did_you_mean(name, table)
      yield Problem(f"{prefix}{shown(name, limit=40)}", "a field that does not exist", f"one of {', '.join(table)}{hint}")
  for name, field in table.items():
    if name not in document:
      if field.default is _MISSING:
        yield Problem(f"{prefix}{name}", "nothing", field.words)
    elif not (document[name] is None and field.default is None) and not field.holds(document[name]):
      hidden = name in ("url", "api_key_env", "extra")
      yield Problem(f"{prefix}{name}", f"a value of type {type(document[name]).__name__}" if hidden else shown(document[name]), field.words)


def _criteria(rows: list[Any]) -> tuple[tuple[Criterion, ...], list[Problem]]:
  problems, criteria = [], []
  for number, row in enumerate(rows):
    prefix = f"criteria[{number}]"
    if not isinstance(row, dict):
      problems.append(Problem(prefix, shown(row), "a mapping with the keys name, description, weight and scale"))
      continue
    own = list(_field_problems(row, _CRITERION_FIELDS, f"{prefix}."))
    problems += own
    if own:
      continue
    if row["name"] in [criterion.name for criterion in criteria]:
      problems.append(Problem(f"{prefix}.name", f"{row['name']!r} twice", "each criterion once"))
    scale = row.get("scale", "yes/no")
    criteria.append(
      Criterion(row["name"], row["description"].strip(), float(row.get("weight", 1.0)), *_scale(scale), scale == "yes/no")
    )
  if not problems and not any(criterion.weight > 0 for criterion in criteria):
    problems.append(Problem("criteria", f"weights {[x.weight for x in criteria]}", "at least one weight above 0"))
  return tuple(criteria), problems


def _scale(text: str) -> tuple[float, float] | None:
  if text == "yes/no":
    return 0.0, 1.0
  match = _SCALE.fullmatch(text)
  low, high = map(float, match.groups()) if match else (0.0, 0.0)
  return (low, high) if low < high else None


def _url_problems(url: str | None, field: str) -> Iterator[Problem]:
  """Yields the problem of a URL. It may hold a password, and is not shown as a whole."""
  if url is None:
    yield Problem("url", f"none, and no environment variable {BASE_URL}", "the base URL of the endpoint, such as 'http://localhost:8000/v1'")
    return
  try:
    parts = urlsplit(url.strip())
    port = parts.port
  except ValueError:
    yield Problem(field, "no URL", "a URL such as 'http://localhost:8000/v1'")
    return
  if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
    yield Problem(field, "a user, a password, a query or a fragment", "none of these: name the key's environment variable in api_key_env")
  elif parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not url.isascii() or re.search(r"\s", url):
    yield Problem(field, shown(url), "a URL such as 'http://localhost:8000/v1'")
  elif parts.path.rstrip("/").endswith("/chat/completions"):
    yield Problem(field, shown(url), "the base URL, without /chat/completions")


def _key_problems(variable: str | None) -> Iterator[Problem]:
  """Yields the problem of the variable of a key. Neither a key nor what may be one is shown."""
  if variable is None:
    return
  words = "the name of an environment variable such as 'OPENAI_API_KEY', never the key itself"
  name = variable if _SHOWN_VARIABLE.fullmatch(variable) else "of that name"
  if not _VARIABLE.fullmatch(variable):
    yield Problem("api_key_env", "no name of a variable", words)
  elif not os.environ.get(variable):
    yield Problem("api_key_env", f"no environment variable {name}", f"{words}; set it for this process")
  elif not all("!" <= x <= "~" for x in os.environ[variable]):
    yield Problem("api_key_env", f"a blank or a character beyond ASCII in the value of the variable {name}", "a key alone")


def _template_problems(template: str) -> Iterator[Problem]:
  names = _PLACEHOLDER.findall(template)
  if unknown := [name for name in names if name not in PLACEHOLDERS]:
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    yield Problem("template", f"{{{unknown[0]}}}", f"one of {known}{did_you_mean(unknown[0], PLACEHOLDERS)}")
  if names.count("response") != 1:
    yield Problem("template", f"{{response}} {names.count('response')} times", "{response} once")


def _extra_problems(extra: Mapping[str, Any]) -> Iterator[Problem]:
  """Yields the problems of further fields of the request. Their values may be keys: not shown."""
  if own := [name for name in extra if name in _OWN_FIELDS]:
    yield Problem(f"extra.{own[0]}", "a field of the request that is set here", f"none of {', '.join(_OWN_FIELDS)}")
  try:
    json.dumps(dict(extra), allow_nan=False)
  except (TypeError, ValueError, RecursionError):
    yield Problem("extra", "a value that JSON cannot hold", "numbers, texts, lists and mappings")
