"""Conversations of clients: their messages, and the options of a chat template."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.messages import one_line, problem_of, shown
from jaxrl_llm.pretrained import chat_options
from jaxrl_llm.pretrained.chat_messages import opening_text
from jaxrl_llm.pretrained.chat_template import INPUTS, ChatTemplate, left_out
from jaxrl_llm.serve import fields, tools
from jaxrl_llm.serve.refusals import Refusal, wrong

_MESSAGE = frozenset("content name reasoning_content role tool_call_id tool_calls".split())
_NO_MESSAGE = {"annotations": ([],), "audio": (), "function_call": (), "refusal": ()}
_IGNORED = ("id",)


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
  fields.check_names(value, _MESSAGE, inside=f"{field}.", neutral=_NO_MESSAGE, ignored=_IGNORED)
  role = fields.text(value, "role", "", most=32, inside=f"{field}.")
  if not role:
    raise wrong(f"{field}.role", value.get("role"), "system, user or assistant")
  calls = tools.read_calls(value["tool_calls"], f"{field}.tool_calls") if value.get("tool_calls") else []
  if calls and role != "assistant":
    raise wrong(f"{field}.tool_calls", calls, "none in a message of another role than assistant")
  content = value.get("content")
  content = "" if content is None and role == "assistant" else content
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


def opening(messages: list[dict[str, Any]], described: Sequence[Mapping[str, Any]], template: ChatTemplate) -> str:
  """Renders a conversation, with `developer` as `system` where the template has no such role.

  Args:
    messages: Messages of `read_messages`.
    described: Tools that the policy may call.
    template: Chat template of the checkpoint.

  Raises:
    Refusal: If the template refuses the conversation, or leaves out a message.

  Example:
    >>> template = ChatTemplate("{% for m in messages if m.role in ('system', 'user') %}[{{ m.content }}]{% endfor %}", "example", {})
    >>> opening([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}], (), template)
    '[Be brief.][Hi]'
  """
  as_system = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
  try:
    return _complete(messages, described, template)
  except Refusal:
    if as_system == messages:
      raise
  return _complete(as_system, described, template)


def _complete(messages: list[dict[str, Any]], described: Sequence[Mapping[str, Any]], template: ChatTemplate) -> str:
  write = lambda messages: opening_text(messages, described, template)
  try:
    text, missing = write(messages), left_out(template, messages, write=write)
  except ValueError as error:
    # The error's own text names the file of the template.
    reason = one_line(error.__cause__ or "it cannot be rendered", typed=False)
    raise Refusal(400, f"messages: the checkpoint's chat template refuses the conversation ({reason})", field="messages") from error
  if missing is None:
    return text
  place = next(i for i, message in enumerate(messages) if message is missing)
  expected = "a role that the checkpoint's chat template writes, such as user: it leaves out this message"
  raise wrong(f"messages[{place}].role", missing["role"], expected)


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
