"""A reward outside the registry, to which `test_new_reward` adds it."""

import os


def spelling(*, marker: str = ":"):
  """Makes a reward that is 1 if the word after the marker is the correct one, else 0."""

  def judge(completion, example):
    return float(word_behind(completion.text, marker) == example["answer"])

  return judge


def word_behind(text: str, marker: str) -> str | None:
  """Returns the text after the last marker, or None if there is no marker."""
  return text.rpartition(marker)[2].strip() if marker in text else None


def process_id(completion, example):
  """Returns the id of the process in which it is called."""
  return os.getpid()
