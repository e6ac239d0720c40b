"""Conversations with tools as the ids that a policy reads, and tool calls in what it writes.

The messages are those of OpenAI's API, as foreign programs send them. With a chat template they are
rendered with it; without one they are plain texts, one after the other. A template that leaves out
the tools gets them in its system message. A policy calls a tool with

  <tool_call>{"name": "lookup", "arguments": {"word": "gauss"}}</tool_call>
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.pretrained.chat_template import next_messages, render
from jaxrl_llm.text_types import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": text or list of texts, ...}`."""

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_HOW = 'Call a tool with <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. Tools:'


class ToolCall(NamedTuple):
  """A call of a tool: its name, and its arguments as a JSON object."""

  name: str
  arguments: str


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
  messages, template = [_plain(message) for message in messages], getattr(tokenizer, "chat_template", None)
  if template is None:
    texts = [message["content"] for message in (_told(messages, tools) if tools else messages)]
    return tokenizer.encode_prompt("".join(f"{text}\n" for text in texts))
  if tools:
    with_tools = template._replace(variables={**template.variables, "tools": list(tools)})
    text = render(with_tools, messages)
    text = text if all(tool["function"]["name"] in text for tool in tools) else render(template, _told(messages, tools))
  else:
    text = render(template, messages)
  return tokenizer.encode(text)


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
    return end + tokenizer.encode("".join(f"{message['content']}\n" for message in messages))
  return end + tokenizer.encode(next_messages(template, messages, tokenizer.backend.id_to_token(tokenizer.eos_id)))


def split_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
  """Splits what a policy has written into its text and its calls of tools that exist.

  Example:
    >>> tools = [{"type": "function", "function": {"name": "add"}}]
    >>> split_calls('Let us see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', tools)
    ('Let us see.', [ToolCall(name='add', arguments='{"a": 1}')])
    >>> split_calls('<tool_call>{"name": "sub"}</tool_call>', tools)
    ('<tool_call>{"name": "sub"}</tool_call>', [])
  """
  known, calls = {tool["function"]["name"] for tool in tools}, []
  for match in _CALL.finditer(text):
    try:
      call = json.loads(match[1])
    except ValueError:
      continue
    arguments = call.get("arguments", {})
    if call.get("name") in known and isinstance(arguments, dict):
      calls.append((match.start(), ToolCall(call["name"], json.dumps(arguments))))
  return (text[: calls[0][0]].strip(), [call for _, call in calls]) if calls else (text, [])


def _told(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns the messages with the tools in the system message."""
  text = "\n".join([_HOW, *(json.dumps(tool["function"]) for tool in tools)])
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
  plain = {**message, "content": content}
  if message.get("tool_calls"):
    plain["tool_calls"] = [call | {"function": _opened(call["function"])} for call in message["tool_calls"]]
  return plain


def _opened(function: Mapping[str, Any]) -> dict[str, Any]:
  try:
    return {**function, "arguments": json.loads(function["arguments"])}
  except ValueError:
    return dict(function)
