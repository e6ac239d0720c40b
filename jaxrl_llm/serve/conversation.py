"""Conversations of clients: their messages, and the options of a chat template."""

import re
from typing import Any

from jaxrl_llm.messages import problem_of, shown
from jaxrl_llm.pretrained import chat_options
from jaxrl_llm.pretrained.chat_template import INPUTS, ChatTemplate
from jaxrl_llm.serve import fields, tools
from jaxrl_llm.serve.refusals import Refusal, wrong

_MESSAGE = frozenset("content name reasoning_content role tool_call_id tool_calls".split())
_NO_MESSAGE = ("audio", "function_call", "refusal")


def read_messages(value: Any, *, most: int) -> list[dict[str, Any]]:
  """Reads the messages of a conversation.

  Args:
    value: JSON value.
    most: Largest number of messages, the context in tokens.

  Raises:
    Refusal: If a field is wrong, or holds more than text.
  """
  if not isinstance(value, list) or not value:
    raise wrong("messages", value, "a list of messages")
  if len(value) > most:
    message = f"messages: found {len(value):,} messages, expected at most {most:,}, the model's maximum context length in tokens"
    raise Refusal(400, message, field="messages", code="context_length_exceeded")
  return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, field: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise wrong(field, value, "an object with role and content")
  for name, x in value.items():
    if name in _NO_MESSAGE and x is not None:
      raise wrong(f"{field}.{name}", x, "none", code="unsupported_field")
    fields.check_names({name: x}, (*_MESSAGE, *_NO_MESSAGE), inside=f"{field}.")
  role = fields.text(value, "role", "", most=32, inside=f"{field}.")
  if not role:
    raise wrong(f"{field}.role", value.get("role"), "system, user or assistant")
  calls = tools.read_calls(value["tool_calls"], f"{field}.tool_calls") if value.get("tool_calls") else []
  if calls and role != "assistant":
    raise wrong(f"{field}.tool_calls", calls, "none in a message of another role than assistant")
  content = value.get("content")
  content = "" if content is None and calls else content
  if isinstance(content, list):
    content = "\n".join(_text_part(part, f"{field}.content[{i}]") for i, part in enumerate(content))
  if not isinstance(content, str):
    raise wrong(f"{field}.content", content, 'a text, or a list of {"type": "text", "text": text}')
  others = {name: value[name] for name in ("name", "reasoning_content", "tool_call_id") if value.get(name) is not None}
  for name in others:
    if not isinstance(others[name], str):
      raise wrong(f"{field}.{name}", others[name], "a text")
  return {"role": role, "content": content, **others, **({"tool_calls": calls} if calls else {})}


def _text_part(part: Any, field: str) -> str:
  kind = part.get("type") if isinstance(part, dict) else None
  if kind != "text":
    raise wrong(f"{field}.type", kind, "'text', because the service reads no pictures, sounds or files", code="unsupported_field")
  if not isinstance(part.get("text"), str):
    raise wrong(f"{field}.text", part.get("text"), "a text")
  return part["text"]


def with_options(template: ChatTemplate, options: Any) -> ChatTemplate:
  """Returns a template with a client's options in the place of its own.

  Options that the template does not read change nothing, because clients send theirs to any model.

  Raises:
    Refusal: If one is an input of the template, or no plain value.
  """
  if options is None:
    return template
  if not isinstance(options, dict):
    raise wrong("chat_template_kwargs", options, "an object")
  for name, value in options.items():
    if name in INPUTS or name.endswith("_token") or not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
      field = f"chat_template_kwargs.{name if name.isidentifier() else shown(name)}"[:100]
      raise wrong(field, value, "an option of the template, such as enable_thinking")
    if not isinstance(value, bool | int | str | None) or (isinstance(value, str) and len(value) > 1000):
      raise wrong(f"chat_template_kwargs.{name}", value, "true, false, a whole number or a short text")
  known = set(chat_options.option_names(template))
  try:
    return chat_options.with_options(template, {name: value for name, value in options.items() if name in known})
  except ValueError as error:
    problem = problem_of(error)
    raise Refusal(400, str(problem.with_prefix("chat_template_kwargs")), field=f"chat_template_kwargs.{problem.field}") from error
