"""Random damage to files: each gives a dataset whose rows are all counted, or one clear line."""

import gzip
import json
import random

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.tasks import preference_pairs

# Replacements for a value: texts of JSON, some of which only Python's parser accepts.
VALUES = (
  "null", "true", "0", "-1", "1e999", "NaN", "-Infinity", "1" * 5000, "1" * 400, "-0.0",
  '""', '" "', '"\\n"', '"\\ud800"', '"\\u0000"', "[]", "{}",
  "[null]", '[{"role": "user"}]', '[{"role": "user", "content": 3}]',
  '[{"role": "assistant", "content": "x"}]', '{"a": {"b": []}}', "[" * 3000,
  "[" * 3000 + "]" * 3000,
  '{"a":' * 3000, '"' + "long " * 20_000 + '"', '"größe 数"', '"\\u202e\\u0000"', '"{question}"', '"<|im_end|>"', "",
)  # fmt: skip

ROWS = {
  "problems": lambda i: {"question": f"What is {i} + 1?", "answer": str(i + 1), "level": i % 3, "work": f"#### {i + 1}"},
  "pairs": lambda i: {"prompt": f"{i}+1?", "chosen": f"{i + 1}", "rejected": "0", "margin": 0.5},
}


def spoiled_row(row: dict, draw: random.Random) -> str:
  """Returns a row as one line of JSON with a mistake in it."""
  column, value = draw.choice(list(row)), draw.choice(VALUES)
  texts = {name: json.dumps(x) for name, x in row.items()}
  match draw.randrange(6):
    case 0:
      del texts[column]
    case 1:
      return value  # Not an object.
    case 2:
      return json.dumps(row)[: draw.randrange(len(json.dumps(row)))]
    case _:
      texts[column] = value
  return "{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}"


def spoiled_bytes(content: bytes, draw: random.Random) -> bytes:
  """Returns the content of a file with a mistake in it."""
  at, byte = draw.randrange(len(content) + 1), draw.randbytes(draw.randint(1, 4))
  damage = (
    lambda: content[:at] + byte + content[at + len(byte) :],
    lambda: content[:at] + byte + content[at:],
    lambda: content[:at],
    lambda: content[at:],
    lambda: content.replace(b"\n", draw.choice((b"\r\n", b"\r", b"\n\n", b"\x00", b" "))),
    lambda: b"\xef\xbb\xbf" + content,
    lambda: content.decode("utf-8", "replace").encode("utf-16"),
    lambda: b"",
    lambda: content * 2,
  )
  return draw.choice(damage)()


def spoiled_file(folder, kind: str, seed: str):
  """Writes a file with some mistakes and returns its path."""
  draw = random.Random(seed)
  count = draw.choice((1, 2, 3, 12, 12, 12))
  lines = [json.dumps(ROWS[kind](i)) for i in range(count)]
  for _ in range(draw.randint(0, 3)):
    lines[draw.randrange(count)] = spoiled_row(ROWS[kind](draw.randrange(count)), draw)
  as_list = draw.random() < 0.2
  content = ("[" + ",\n".join(lines) + "]" if as_list else "\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
  name = "a.json" if as_list else "a.jsonl"
  damages, packed = draw.random() < 0.5, draw.random() < 0.2
  if damages and not packed:
    content = spoiled_bytes(content, draw)
  if packed:
    name, content = f"{name}.gz", gzip.compress(content, mtime=0)
    content = spoiled_bytes(content, draw) if damages else content
  path = folder / name
  path.write_bytes(content)
  return path


def problems(path, folder, policy):
  columns = {"level_column": "level", "response_column": "work"}
  task = tasks.make("file", path=path, data_dir=folder, bad_rows=policy, max_prompt_tokens=64, max_tokens=128, **columns)
  rows = [*task.train, *task.test, *task.demonstrations]  # Reads all of them back.
  assert all(ByteTokenizer().encode_prompt(row["prompt"]) for row in rows)
  assert len(task.train) and len(task.test)
  return task.report


def pairs(path, folder, policy):
  source = preference_pairs.from_files(
    ByteTokenizer(), path=path, max_tokens=64, data_dir=folder, bad_rows=policy, test_fraction=0.4
  )
  assert all(preference_pairs.encode_pair(row, ByteTokenizer()) for row in (*source.train, *source.test))
  return source.report


READERS = {"problems": problems, "pairs": pairs}


def attempt(folder, kind: str, seed: str) -> bool:
  """Returns whether a spoiled file became a dataset."""
  folder.mkdir(parents=True)
  path, policy = spoiled_file(folder, kind, seed), "error" if seed.endswith("7") else "drop"
  try:
    report = READERS[kind](path, folder / "data", policy)
  except ValueError as error:
    line = str(error)
    assert line and len(line.splitlines()) == 1 and len(line) < 900, (seed, line)
    assert "a.json" in line or "found" in line, (seed, line)
    line.encode()  # Fails for a lone surrogate, which a terminal cannot show.
    return False
  except Exception as error:
    raise AssertionError(f"mistakes of seed {seed!r}: a {type(error).__name__}, expected a dataset or a ValueError") from error
  left_out = sum(count for reason, count in report.dropped.items() if not reason.startswith("not imitated"))
  assert report.kept + left_out == report.read, (seed, report)
  assert policy == "drop" or not report.dropped, (seed, report)
  return True


@pytest.mark.parametrize(("count", "least", "most"), [(25, 6, 22), pytest.param(150, 46, 134, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", READERS)
def test_spoiled_files(kind, count, least, most, tmp_path):
  assert least <= sum(attempt(tmp_path / str(i), kind, f"{kind}-{i}") for i in range(count)) <= most


@pytest.mark.parametrize("kind", READERS)
def test_a_folder_or_a_missing_file_is_refused(kind, tmp_path):
  for path in (tmp_path, tmp_path / "absent.jsonl", tmp_path / "absent" / "a.jsonl"):
    with pytest.raises(ValueError, match="found") as caught:
      READERS[kind](path, tmp_path, "drop")
    assert len(str(caught.value).splitlines()) == 1
