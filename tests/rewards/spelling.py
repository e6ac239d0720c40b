"""A reward that no registry names: `test_new_reward` adds it to one."""

import os


def spelling(*, marker: str = ":"):
  """1 where the word behind the marker is the right one."""

  def judge(completion, example):
    return float(word_behind(completion.text, marker) == example["answer"])

  return judge


def word_behind(text: str, marker: str) -> str | None:
  """The word behind the last marker."""
  return text.rpartition(marker)[2].strip() if marker in text else None


def process_id(completion, example):
  """Where it was called."""
  return os.getpid()
