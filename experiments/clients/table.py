"""The table of clients and features of docs/serving.md, read from the stored results."""

import json
import pathlib
from collections.abc import Iterator

PATH = pathlib.Path(__file__).with_name("results.json")
FEATURES = ("chat", "stream", "tools", "schemas", "log-probabilities", "completions", "token ids")
HEAD = ("client", *FEATURES, "date")
NAMES = {"lm_eval": "lm-evaluation-harness", "skyrl": "SkyRL's `RemoteInferenceClient`, the body alone"}
"""Names of clients that are not those of their packages."""


def rows() -> Iterator[list[str]]:
  """Yields a client's row: what it did with each feature, if it was tried, and when."""
  for client, row in json.loads(PATH.read_text())["clients"].items():
    package, _, version = row["version"].partition(" ")
    name = f"{NAMES.get(client, package)} {version}".strip()
    date = row["date"] if row["failed"] is None else f"{row['date']}; then **failed**: {row['failed']}"
    yield [name, *(row["features"].get(feature, "–") for feature in FEATURES), date]


def in_words() -> str:
  """Tells how many answers have obeyed a JSON schema."""
  row = json.loads(PATH.read_text())["schema"]
  return f"{row['obeyed']:,} of {row['answers']:,} answers obeyed a JSON schema ({row['tokens']:,} tokens, {row['date']})"
