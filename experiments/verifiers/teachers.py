"""Teachers of the warm starts: right in form, and wrong half of the time."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def reverse_text(messages: Messages, tools: Any, seed: int) -> str:
  """Reverses a text, or repeats it."""
  text = messages[-1]["content"]
  answer = text[::-1] if random.Random(seed).random() < 0.5 else text
  return f"<reversed_text>{answer}</reversed_text>"


def scratchpad(messages: Messages, tools: Any, seed: int) -> str:
  """Calls the tool with the word and answers with its result, or answers with another word."""
  if messages[-1]["role"] == "tool":
    return messages[-1]["content"]
  word = re.search(r'word="(\w+)"', messages[0]["content"])[1]
  if random.Random(seed).random() < 0.5:
    return f"{word[1:]}{word[0]}"
  return f'<tool_call>{{"name": "scratchpad_roundtrip", "arguments": {{"word": "{word}"}}}}</tool_call>'


def alphabet_sort(messages: Messages, tools: Any, seed: int) -> str:
  """Sorts the names, or leaves out which are new, or sorts them the wrong way round."""
  draw, asked = random.Random(seed), [message["content"] for message in messages if message["role"] == "user"]
  turns = [re.search(r"name: (.*)", text)[1].split(", ") for text in asked]
  by_first = "FIRST" in asked[0]
  key = lambda name: name if by_first else re.split(r"(?<!^)(?=[A-Z])", name)[1]
  names = sorted((name for turn in turns for name in turn), key=key)
  if len(turns) == 1:
    return "<alphabetical_sorted>\n{}\n</alphabetical_sorted>".format("\n".join(names))
  mistake = draw.choice(["none", "none", "mark", "order"])
  names = names[::-1] if mistake == "order" else names
  lines = [f"{name} // new name!" if name in turns[-1] and mistake != "mark" else name for name in names]
  return "<combined_alphabetical_sorted>\n{}\n</combined_alphabetical_sorted>".format("\n".join(lines))


def hangman(messages: Messages, tools: Any, seed: int) -> str:
  """Guesses letters in a random order, none of them twice."""
  letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
  order = random.Random(seed).sample(letters, len(letters))
  return f"[{order[sum(message['role'] == 'assistant' for message in messages)]}]"
