"""Tool calls in what a policy writes, in the form that its chat template gives them.

A template tells the policy how to call a tool, and writes earlier calls in the same way. So a call
of a tool that does not exist is rendered, and its parts show the form: Llama 3.1 has a bare JSON
object with `parameters`, Qwen3 `<tool_call>` around one with `arguments`, Qwen3-Coder a tag for
each parameter. A form is used only if calls with quotes, line breaks and nested values come back
whole.
"""

import ast
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.pretrained.chat_template import ChatTemplate, render


class ToolCall(NamedTuple):
  """A call of a tool: its name, and its arguments as a JSON object."""

  name: str
  arguments: str


class CallForm(NamedTuple):
  """The texts around the parts of a call; white space in them may differ.

  Attributes:
    opening: Text in front of the JSON object or, with `after_name`, of the tool's name.
    closing: Text behind the object or the last value.
    after_name: Text between the name and the arguments or the first parameter; None if the name is
      a part of the object.
    after_key: Text between a parameter's name and its value; None if the arguments are one object.
    between: Text between a value and the next parameter's name.
    empty: Text behind the name of a call without arguments.
    keys: Keys of the name and the arguments in the object.
  """

  opening: str
  closing: str
  after_name: str | None = None
  after_key: str | None = None
  between: str = ""
  empty: str = ""
  keys: tuple[str, str] = ("name", "arguments")


HERMES = CallForm("<tool_call>", "</tool_call>")
"""The form that a policy is told of if its template does not show one."""
FORMS = (
  HERMES,
  CallForm("<tool_call>\n<function=", "\n</parameter>\n</function>\n</tool_call>", ">\n<parameter=", ">\n",
           "\n</parameter>\n<parameter=", ">\n</function>\n</tool_call>"),
  CallForm("", "", keys=("name", "parameters")),
)  # fmt: skip
"""Forms that are read if no template is known: Hermes and Qwen3, Qwen3-Coder, Llama 3."""

CALL_ID = "call00001"
"""Text that stands for the id of any call in the texts of a form."""

_NAME = "probe_tool"
_TYPES = {"text": "string", "number": "integer", "several": "array", "flag": "boolean"}
_PROBE = {
  "type": "function",
  "function": {
    "name": _NAME,
    "description": "Probes.",
    "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}, "required": ["text"]},
  },
}
_HARD = {"text": 'a "b"\n  {c} <d> & é', "number": 7, "several": [1, {"x": ["y"]}], "flag": True}
_QUESTION, _ANSWER = "How many?", "Twelve."


def find_calls(text: str, tools: Sequence[Mapping[str, Any]], form: CallForm) -> list[tuple[int, ToolCall]]:
  """Returns the calls of tools that exist, in one form, with their places in the text.

  What stands within a thought, in front of `</think>`, is no call. Arguments are an object, or the
  text of one. The types of values that are written as text are those of the tool's schema.

  Example:
    >>> tools = [{"type": "function", "function": {"name": "add"}}]
    >>> find_calls('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', tools, HERMES)
    [(4, ToolCall(name='add', arguments='{"a": 1}'))]
  """
  schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
  thought, end, _ = text.partition("</think>")
  return [call for call in _calls(form, text, len(thought + end) if end else 0, schemas) if call[1].name in schemas]


def shows_tools(template: ChatTemplate) -> bool:
  """Returns whether a template describes the tools of a conversation."""
  return _read(*_key(template))[0]


def form_of(template: ChatTemplate) -> CallForm | None:
  """Returns the form in which a template writes calls; None if it shows no tools or no such form.

  Example:
    >>> source = "{% for m in messages %}{{ tools | tojson }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    >>> source += "<call {{ c.function.name }}>{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    >>> form_of(ChatTemplate(source, "example", {}))[:3]
    ('<call', '</call>', '>')
  """
  return _read(*_key(template))[1]


def _key(template: ChatTemplate) -> tuple[str, str, str]:
  """Returns what the form depends on, as texts."""
  return template.source, template.path, json.dumps(dict(template.variables), sort_keys=True, default=str)


@functools.lru_cache(maxsize=16)
def _read(source: str, path: str, variables: str) -> tuple[bool, CallForm | None]:
  template = ChatTemplate(source, path, {**json.loads(variables), "tools": [_PROBE]})
  try:
    if _NAME not in render(template, [{"role": "user", "content": _QUESTION}]):
      return False, None
  except ValueError:
    return False, None
  written = {name: _written(template, arguments) for name, arguments in
             (("hard", _HARD), ("none", {}), ("texts", {"key_one": "value_one", "key_two": "value_two"}))}  # fmt: skip
  if None in written.values():
    return True, None
  form = _of_object(written["hard"]) or _of_parameters(written["texts"], written["none"])
  schemas = {_NAME: _PROBE["function"]["parameters"]}
  came_back = form and all(
    [call for _, call in _calls(form, written[name], 0, schemas)] == [ToolCall(_NAME, json.dumps(arguments))]
    for name, arguments in (("hard", _HARD), ("none", {}))
  )
  return True, form if came_back else None


def _written(template: ChatTemplate, arguments: Mapping[str, Any]) -> str | None:
  """Returns a call as the template writes it, without its message; None if it does not."""
  asked = {"role": "user", "content": _QUESTION}
  call = {"id": CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
  try:
    plain = render(template, [asked, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    text = render(template, [asked, {"role": "assistant", "content": "", "tool_calls": [call]}], add_generation_prompt=False)
  except ValueError:
    return None
  head, _, tail = plain.rpartition(_ANSWER)
  text = text[len(os.path.commonprefix([head, text])) :]
  text = text[: len(text) - len(os.path.commonprefix([tail[::-1], text[::-1]]))]
  return text.strip() if _NAME in text else None


def _of_object(text: str) -> CallForm | None:
  """Returns the form of a call whose arguments are one JSON object."""
  for start, value, end in _objects(text):
    keys = {key for key, item in value.items() if item == _NAME}, {key for key, item in value.items() if _object(item) == _HARD}
    if all(keys):
      return CallForm(text[:start].strip(), text[end:].strip(), keys=(keys[0].pop(), keys[1].pop()))
    if value == _HARD and _NAME in text[:start]:
      opening, _, after_name = text[:start].rpartition(_NAME)
      return CallForm(opening.strip(), text[end:].strip(), after_name.strip())
  return None


def _of_parameters(text: str, empty: str) -> CallForm | None:
  """Returns the form of a call that writes each parameter by itself."""
  parts = re.fullmatch(rf"(.*?){_NAME}(.*?)key_one(.*?)value_one(.*?)key_two(.*?)value_two(.*)", text, re.DOTALL)
  if parts is None:
    return None
  opening, after_name, after_key, between, _, closing = parts.groups()
  return CallForm(opening.strip(), closing, after_name.strip(), after_key, between, empty.partition(_NAME)[2].strip())


def _calls(form: CallForm, text: str, start: int, schemas: Mapping[str, Any]) -> Iterator[tuple[int, ToolCall]]:
  """Yields the calls in a text, with their places."""
  opening, closing = _pattern(form)
  while match := opening.search(text, start):
    start = match.end()
    if form.after_key is not None:
      body = re.split(_flexible(form.between, inner=True), match["body"]) if match["body"] is not None else []
      pairs = [re.split(rf"\s*{_flexible(form.after_key, inner=True)}", piece, maxsplit=1) for piece in body]
      if all(len(pair) == 2 for pair in pairs):
        types = _mapping(_mapping(schemas.get(match["name"])).get("properties"))
        arguments = {key.strip(): _typed(value, types.get(key.strip())) for key, value in pairs}
        yield match.start(), ToolCall(match["name"], json.dumps(arguments))
      continue
    object_at, start = start, start + 1
    try:
      value, end = json.JSONDecoder().raw_decode(text, object_at)
    except (ValueError, RecursionError):
      continue
    if not (close := closing.match(text, end)):
      continue
    start = close.end()
    name, arguments = (match["name"], value) if form.after_name is not None else _of_keys(value, form)
    if isinstance(name, str) and (arguments := _object(arguments)) is not None:
      try:
        yield match.start(), ToolCall(name, json.dumps(arguments))
      except RecursionError:  # Deeper than JSON is written, though not than it is read.
        continue


@functools.lru_cache(maxsize=32)
def _pattern(form: CallForm) -> tuple[re.Pattern, re.Pattern]:
  """Makes the patterns of a call up to its object, or of all of it, and of what follows."""
  # Llama 3 may write <|python_tag|> in front of a call.
  opening = rf"{_flexible(form.opening)}\s*" if form.opening else r"(?:<\|python_tag\|>\s*)?"
  if form.after_name is not None:
    opening += r"(?P<name>[^\s<>\"'(){}\[\],=]+?)\s*"
  if form.after_key is None:
    opening += rf"{_flexible(form.after_name or '')}\s*(?={{)"
  else:
    body = rf"{_flexible(form.after_name)}\s*(?P<body>.*?){_flexible(form.closing, inner=True)}"
    opening += rf"(?:{body}|{_flexible(form.empty)})"
  return re.compile(opening, re.DOTALL), re.compile(rf"\s*{_flexible(form.closing)}")


def _flexible(text: str, *, inner: bool = False) -> str:
  """Returns the pattern of a text whose white space may differ.

  If `inner`, the white space at its ends touches a value, and is no part of one if it is the same.
  """
  pattern = r"\s*".join(map(re.escape, text.split())).replace(CALL_ID, '[^"]*')
  ends = (text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]) if inner and text.strip() else ("", "")
  return f"(?:{re.escape(ends[0])})?" * bool(ends[0]) + pattern + f"(?:{re.escape(ends[1])})?" * bool(ends[1])


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any], int]]:
  """Yields the JSON objects in a text, also those within others, with their places."""
  for match in re.finditer(r"\{", text):
    try:
      value, end = json.JSONDecoder().raw_decode(text, match.start())
    except (ValueError, RecursionError):
      continue
    yield match.start(), value, end


def _of_keys(value: Mapping[str, Any], form: CallForm) -> tuple[Any, Any]:
  """Returns the name and the arguments in a call's object; {} if it has no arguments.

  Without anything around it, an object with other fields, such as a tool's description, is no call.
  """
  known = (form.keys[1], "arguments", "parameters")
  own = next((key for key in known if key in value), None)
  if not form.opening and (own is None or set(value).difference({*form.keys, own, "type", "id"})):
    return None, None
  return value.get(form.keys[0]), {} if own is None or value[own] is None else value[own]


def _object(value: Any) -> dict[str, Any] | None:
  """Returns an object, or that which a text spells; None if it is something else."""
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError):
      return None
  return value if isinstance(value, dict) else None


def _typed(text: str, schema: Any) -> Any:
  """Returns the value of a parameter's text by its JSON schema; the text if that is unclear."""
  schema = _mapping(schema)
  options = [schema, *(schema.get("anyOf") or schema.get("oneOf") or ())]
  kinds = {kind for option in options if isinstance(option, Mapping) for kind in _list(option.get("type"))}
  if "null" in kinds and text.strip() in ("null", "None"):
    return None
  if "string" in kinds or not schema:
    return text
  value = _literal(text.strip())
  # Without a type, as with a reference, a text may be meant; an object or a list cannot be one.
  return value if kinds or isinstance(value, dict | list) else text


def _mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
  return value if isinstance(value, list) else [value] * (value is not None)


def _literal(text: str) -> Any:
  """Returns the value of JSON, or of Python, in which some templates write true and false."""
  for read in (json.loads, ast.literal_eval):
    try:
      value = read(text)
      json.dumps(value, allow_nan=False)
      return value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
      continue
  return {"true": True, "false": False}.get(text.lower(), text)
