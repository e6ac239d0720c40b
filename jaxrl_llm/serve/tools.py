"""Tools that clients offer, and the calls of them in answers and in earlier messages."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.pretrained.chat_messages import split_calls
from jaxrl_llm.serve import fields
from jaxrl_llm.serve.refusals import hint, wrong
from jaxrl_llm.text_types import Tokenizer

MAX_TOOLS, LONGEST_NAME = 128, 128


def read_tools(values: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
  """Reads the tools that a call offers; none with `"tool_choice": "none"`.

  Raises:
    Refusal: If a tool is no function.
  """
  choice, tools = values.get("tool_choice"), values.get("tools") or []
  if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
    raise wrong("tools", tools, f"a list of at most {MAX_TOOLS} tools")
  for i, tool in enumerate(tools):
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
      raise wrong(f"tools[{i}]", tool, 'a function, {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}')
    _check_function(tool["function"], f"tools[{i}].function.")
    schema = tool["function"].get("parameters")
    if schema is not None and not isinstance(schema, dict):
      raise wrong(f"tools[{i}].function.parameters", schema, "a JSON schema")
  return () if choice == "none" else tuple(tools)


def read_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
  """Reads which tools the policy must call one of.

  Args:
    choice: JSON value of `tool_choice`.
    tools: Tools of `read_tools`.

  Returns:
    The tools by their fields; none if the policy is free.

  Raises:
    Refusal: If it is no choice, or of a tool that is not there.

  Example:
    >>> tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
    >>> list(read_choice({"type": "function", "function": {"name": "sub"}}, tools)), read_choice("auto", tools)
    (['tools[1]'], {})
  """
  if choice in (None, "auto", "none"):
    return {}
  function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
  if choice != "required" and not isinstance(function, dict):
    expected = '"auto", "none", "required" or {"type": "function", "function": {"name": NAME}}'
    raise wrong("tool_choice", choice, expected)
  names = [tool["function"]["name"] for tool in tools]
  if not names:
    raise wrong("tools", None, "one or more, because tool_choice asks for a call")
  chosen = names if function is None else [function.get("name")]
  if chosen[0] not in names:
    raise wrong("tool_choice.function.name", chosen[0], f"the name of a tool{hint(str(chosen[0]), names)}")
  return {f"tools[{i}]": tool for i, tool in enumerate(tools) if names[i] in chosen}


def read_calls(value: Any, field: str) -> list[dict[str, Any]]:
  """Reads the calls in an assistant's earlier message.

  Raises:
    Refusal: If they are no calls of functions.
  """
  if not isinstance(value, list):
    raise wrong(field, value, "a list of calls")
  for i, call in enumerate(value):
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
      raise wrong(f"{field}[{i}]", call, 'a call, {"id": ID, "type": "function", "function": {"name": NAME, "arguments": TEXT}}')
    _check_function(call["function"], f"{field}[{i}].function.")
    if not isinstance(arguments := call["function"].get("arguments"), str | dict):
      raise wrong(f"{field}[{i}].function.arguments", arguments, "a JSON object as text")
  return value


def _check_function(function: Mapping[str, Any], inside: str) -> None:
  if not fields.text(function, "name", "", most=LONGEST_NAME, inside=inside):
    raise wrong(f"{inside}name", function.get("name"), "a name")


def message(text: str, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, most: int | None = None) -> dict[str, Any]:
  """Returns the content of a completion that has ended by itself, with its calls of tools.

  Args:
    text: Completion.
    tools: Tools that it may call.
    tokenizer: Tokenizer of the checkpoint.
    most: Largest number of calls; None for no limit.
  """
  content, calls = split_calls(text, tools, tokenizer) if tools else (text, [])
  if not calls:
    return {"content": content}
  made = [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call._asdict()} for call in calls[:most]]
  return {"content": content or None, "tool_calls": made}
