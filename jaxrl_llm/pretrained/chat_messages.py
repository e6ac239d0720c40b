"""Conversations with tools as the ids that a policy reads.

The messages are those of OpenAI's API, as foreign programs send them. With a chat template they are
rendered with it; without one they are plain texts, one after the other. A template that leaves out
the tools gets them in its system message, with the form of a call (see `tool_calls`):

  <tool_call>{"name": "lookup", "arguments": {"word": "gauss"}}</tool_call>
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.pretrained.chat_template import ChatTemplate, next_messages, render
from jaxrl_llm.pretrained.tokenizer import encode_foreign
from jaxrl_llm.pretrained.tool_calls import FORMS, HERMES, CallForm, ToolCall, find_calls, form_of, shows_tools
from jaxrl_llm.text_types import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": text or list of texts, ...}`."""

_HOW = 'Call a tool with <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'


def opening_ids(messages: Messages, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[int]:
  """Encodes the messages that a policy reads before its first turn.

  Args:
    messages: Messages of the conversation.
    tools: Descriptions of the tools that the policy may call, as in OpenAI's API.
    tokenizer: Tokenizer of the task.

  Raises:
    ValueError: If a message holds more than text, or the chat template fails. One line.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> ByteTokenizer().decode(opening_ids([{"role": "user", "content": "1+1?"}], [], ByteTokenizer()))
    '1+1?\\n'
  """
  template = getattr(tokenizer, "chat_template", None)
  if template is not None:
    return tokenizer.encode(opening_text(messages, tools, template))
  messages = [_plain(message) for message in messages]
  texts = [message["content"] for message in (_told(messages, tools) if tools else messages)]
  return tokenizer.encode_prompt("".join(f"{text}\n" for text in texts))


def opening_text(messages: Messages, tools: Sequence[Mapping[str, Any]], template: ChatTemplate) -> str:
  """Renders the messages that a policy reads before its first turn, for `Tokenizer.encode`.

  The arguments are those of `opening_ids`, with a template in the place of its tokenizer.
  """
  messages = [_plain(message) for message in messages]
  if not tools or not shows_tools(template):
    return render(template, _told(messages, tools) if tools else messages)
  with_tools = template._replace(variables={**template.variables, "tools": list(tools)})
  return render(with_tools, messages if form_of(template) else _told(messages, ()))


def following_ids(messages: Messages, tokenizer: Tokenizer, *, is_ended: bool) -> list[int]:
  """Encodes the messages between the end of a policy's turn and its next turn.

  Args:
    messages: Messages of tools and of the user.
    tokenizer: Tokenizer of the task.
    is_ended: Whether the policy has ended its message, with an end token.

  Raises:
    ValueError: If a message holds more than text, or the chat template does not write the messages
      one after the other. One line.
  """
  messages, template = [_plain(message) for message in messages], getattr(tokenizer, "chat_template", None)
  end = [] if is_ended else [tokenizer.eos_id]
  if template is None:
    return end + encode_foreign("".join(f"{message['content']}\n" for message in messages), tokenizer)
  turn_end = tokenizer.backend.id_to_token(tokenizer.eos_id)
  try:
    text = next_messages(template, messages, turn_end)
  except ValueError:
    # A template for users and assistants alone, which was told of the tools in its system message.
    as_user = [message | {"role": "user"} if message["role"] == "tool" else message for message in messages]
    if as_user == messages:
      raise
    text = next_messages(template, as_user, turn_end)
  return end + tokenizer.encode(text)


def split_calls(text: str, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None = None) -> tuple[str, list[ToolCall]]:
  """Splits what a policy has written into its text and its calls of tools that exist.

  Args:
    text: The policy's turn.
    tools: Descriptions of the tools, as in OpenAI's API.
    tokenizer: Tokenizer of the task, whose chat template has a form of calls; None reads any form
      of `tool_calls.FORMS`.

  Example:
    >>> tools = [{"type": "function", "function": {"name": "add"}}]
    >>> split_calls('Let us see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', tools)
    ('Let us see.', [ToolCall(name='add', arguments='{"a": 1}')])
    >>> split_calls('{"name": "add", "parameters": {"a": 1}}', tools)
    ('', [ToolCall(name='add', arguments='{"a": 1}')])
    >>> split_calls('<tool_call>{"name": "sub"}</tool_call>', tools)
    ('<tool_call>{"name": "sub"}</tool_call>', [])
  """
  for form in FORMS if tokenizer is None else (call_form(tokenizer),):
    if calls := find_calls(text, tools, form):
      return text[: calls[0][0]].strip(), [call for _, call in calls]
  return text, []


def call_form(tokenizer: Tokenizer) -> CallForm:
  """Returns the form in which a policy calls tools: its template's, or the one that it is told."""
  template = getattr(tokenizer, "chat_template", None)
  return (template and form_of(template)) or HERMES


def _told(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns the messages with the form of a call, and any tools, in the system message."""
  text = "\n".join([f"{_HOW} Tools:", *(json.dumps(tool["function"]) for tool in tools)]) if tools else _HOW
  if messages and messages[0]["role"] == "system":
    return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
  return [{"role": "system", "content": text}, *messages]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a message with its content as one text, and the arguments of tool calls as objects."""
  content = message.get("content") or ""
  if not isinstance(content, str):
    for part in content:
      if part.get("type") != "text":
        raise ValueError(f"messages: found a part of type {part.get('type')!r}, expected text alone")
    content = "\n".join(part["text"] for part in content)
  # Templates ask whether a message has the key, not whether it has calls.
  plain = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
  if message.get("tool_calls"):
    plain["tool_calls"] = [{**call, "function": _opened(call["function"])} for call in message["tool_calls"]]
  return plain


def _opened(function: Mapping[str, Any]) -> dict[str, Any]:
  try:
    return {**function, "arguments": json.loads(function["arguments"])}
  except (TypeError, ValueError):  # An object already, or no JSON.
    return dict(function)
