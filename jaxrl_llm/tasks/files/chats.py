"""Chats in a column: lists of messages, as published sets of RL and of preferences hold them.

A row keeps a chat as its last message, the user's, and the whole as JSON in `CONVERSATION`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.pretrained.image_prompts import MARK
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.text_files import Record
from jaxrl_llm.tasks.files.values import Unusable, find, short, text

CONVERSATION = "conversation"
"""Column of a prompt of several messages, as JSON; rows whose prompt is one text lack it."""

Message = dict[str, str]
"""`{"role": role, "content": text}`; a picture is the mark `<image>` in the text."""


class Asked(NamedTuple):
  """A question, from a text or a chat.

  Attributes:
    question: The user's last message.
    conversation: All messages up to it as JSON; "" if it is the only one.
    reply: Assistant's message behind it; "" if there is none.
  """

  question: str
  conversation: str = ""
  reply: str = ""


def read(record: Record, name: str) -> str | list[Message]:
  """Returns a column as messages if it holds a chat, and else as text.

  A chat is a message, a list of messages or the JSON text of one. A message's content is a text or
  a list of parts, `{"type": "text", "text": ...}` or pictures.

  Raises:
    Unusable: If there is no such column, or the value is neither a chat nor a single value.

  Example:
    >>> read({"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]}, "prompt")
    [{'role': 'user', 'content': '1+1?'}]
  """
  value = find(record, name, None)
  if isinstance(value, str):
    value = _parsed(value, name)
  if isinstance(value, Mapping) and "role" in value:
    value = [value]
  if not isinstance(value, list) or not any(isinstance(item, Mapping) for item in value):
    return text(record, name)
  return [_message(item, name) for item in value]


def asked(record: Record, name: str) -> Asked:
  """Returns the question in a column.

  Raises:
    Unusable: If a chat has no message of the user's where one is expected, or it is empty.

  Example:
    >>> user, assistant = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    >>> asked({"messages": [user, assistant]}, "messages")
    Asked(question='1+1?', conversation='', reply='2')
  """
  value = read(record, name)
  if isinstance(value, str):
    return Asked(value)
  reply = value.pop()["content"] if value[-1]["role"] == "assistant" else ""
  if not value or value[-1]["role"] in ("assistant", "system"):
    raise Unusable(f"{name} does not end with the user", "expected a message of the user's that the policy answers")
  if not value[-1]["content"].strip():
    raise Unusable(f"{name} is empty")
  return Asked(value[-1]["content"], as_json(value), reply)


def said(record: Record, name: str, *, empty: bool = False) -> str:
  """Returns the text in a column: a chat's is the assistant's last message.

  Args:
    record: Record of a file.
    name: Name of the column.
    empty: Whether null and "" are allowed, both as the empty text.

  Raises:
    Unusable: If a chat does not end with the assistant, or the text is empty.
  """
  if empty and find(record, name, None) in (None, "", []):
    return ""
  value = read(record, name)
  if isinstance(value, str):
    return value
  if value[-1]["role"] != "assistant":
    raise Unusable(f"{name} does not end with the assistant", f"role {value[-1]['role']!r}")
  if not value[-1]["content"].strip():
    raise Unusable(f"{name} is empty")
  return value[-1]["content"]


def as_json(messages: Sequence[Message]) -> str:
  """Returns messages as a row keeps them; "" for a single message of the user's."""
  return "" if [message["role"] for message in messages] == ["user"] else json.dumps(messages, ensure_ascii=False)


def messages_of(row: Row, *, system: str | None = None) -> list[Message]:
  """Returns the messages of a row with a conversation, its prompt in place of the last.

  Args:
    row: Problem or pair with a `conversation`.
    system: System message of conversations without one; None for none.
  """
  messages = json.loads(row[CONVERSATION])
  messages[-1]["content"] = row["prompt"]
  first = [{"role": "system", "content": system}] if system is not None and messages[0]["role"] != "system" else []
  return [*first, *messages]


def _parsed(value: str, name: str) -> Any:
  """Returns the chat that a text holds as JSON, and any other text as it is."""
  start = value.strip()[:2000]
  if not start.startswith(("[", "{")) or "role" not in start or "content" not in value:
    return value
  try:
    parsed = json.loads(value)
  except (ValueError, RecursionError):
    if start.replace(" ", "").startswith(("[{'role'", "[{'content'", "{'role'", "{'content'")):
      raise Unusable(f"{name} is a chat in Python's spelling", f"{short(value)}, expected JSON") from None
    return value
  items = parsed if isinstance(parsed, list) else [parsed]
  return parsed if items and all(isinstance(x, dict) and {"role", "content"} <= x.keys() for x in items) else value


def _message(value: Any, name: str) -> Message:
  role, content = (value.get(key) for key in ("role", "content")) if isinstance(value, Mapping) else (None, None)
  if isinstance(value, Mapping) and value.get("tool_calls"):
    raise Unusable(f"{name} has calls of tools", "expected messages of text")
  if isinstance(content, list | Mapping):
    content = "".join(_part(part, name) for part in ([content] if isinstance(content, Mapping) else content))
  if not isinstance(role, str) or not isinstance(content, str):
    there = f", found {', '.join(map(str, value)) or 'nothing'}" if isinstance(value, Mapping) else ""
    raise Unusable(f"{name} is no list of messages", f"each message needs a role and a content, both text{there}")
  return {"role": role, "content": content}


def _part(part: Any, name: str) -> str:
  if isinstance(part, str):
    return part
  kind = part.get("type") if isinstance(part, Mapping) else None
  if kind == "text" and isinstance(part.get("text"), str):
    return part["text"]
  if kind in ("image", "image_url"):
    if any(part.get(key) for key in ("image", "image_url", "url", "path", "bytes")):
      raise Unusable(f"{name} holds pictures", "expected {'type': 'image'} alone, and the pictures in a column: task.images_column")
    return MARK
  raise Unusable(f"{name} is no list of messages", f"found a part of type {kind!r}, expected text or image")
