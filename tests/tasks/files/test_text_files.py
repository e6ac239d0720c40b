"""Whatever a file contains, each record is read with its place, or one line says why not."""

import csv
import gzip
import io
import json
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.tasks.files import text_files
from jaxrl_llm.tasks.files.text_files import FileFault

ROWS = [{"question": f"größe {i}\n?", "answer": i, "list": [{"x": None}]} for i in range(200)]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def write(tmp_path, name, content):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return path


def records(path, **settings):
  return [record for _, record in text_files.read_records(path, **settings)]


FORMS = ["a.jsonl", "a.ndjson", "A.JSONL", "lines.json", "list.json", "pretty.json", "a.jsonl.gz", "list.json.gz", "bom.jsonl"]


@pytest.mark.parametrize("name", FORMS)
def test_json_in_every_form(tmp_path, name):
  content = JSONL
  if name.startswith(("list", "pretty")):
    content = json.dumps(ROWS, indent=2 if name.startswith("pretty") else None).encode()
  content = b"\xef\xbb\xbf" + content if name.startswith("bom") else content
  assert records(write(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)) == ROWS


def test_one_object_over_several_lines(tmp_path):
  assert records(write(tmp_path, "1.json", json.dumps(ROWS[0], indent=4) + "\n")) == ROWS[:1]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_tables_of_text(tmp_path, name):
  rows = [{"question": 'a, "b"\nc', "answer": "1"}, {"question": "größe", "answer": ""}]
  file = io.StringIO()
  writer = csv.DictWriter(file, rows[0], delimiter="\t" if ".tsv" in name else ",")
  writer.writeheader()
  writer.writerows(rows)
  content = file.getvalue().encode()
  assert records(write(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)) == rows


def test_parquet(tmp_path):
  import pyarrow
  from pyarrow import parquet

  path = tmp_path / "a.parquet"
  parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=70)
  assert records(path) == ROWS
  assert records(path, columns=("answer", "absent")) == [{"answer": row["answer"]} for row in ROWS]
  assert [place for place, _ in text_files.read_records(path)][150] == f"{path}:151"
  # Parquet does not check that this is UTF-8.
  bad = pyarrow.array([b"good", b"\xff", b"good"], pyarrow.binary()).view(pyarrow.string())
  parquet.write_table(pyarrow.table({"q": bad}), path)
  assert [record if isinstance(record, dict) else record.reason for record in records(path)] == [{"q": "good"}, "not UTF-8", {"q": "good"}]
  content = path.read_bytes()
  for size in (3, len(content) // 2, len(content) - 1):
    path.write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"a.parquet: found no Parquet file, or one cut short .*download it again$"):
      records(path)


def test_parquet_without_its_package(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
  with pytest.raises(ImportError, match=r"needs the package pyarrow: pip install 'jaxrl_llm\[tasks\]'"):
    records(write(tmp_path, "a.parquet", b"PAR1"))


WHOLE_FILES = {
  "empty.jsonl": (b"", "empty file"),
  "blank.jsonl": (b"\n \n", "blank lines only"),
  "empty.json": (b"[]", "empty list"),
  "empty.csv": (b"\n", "column names"),
  "twice.csv": (b"a,a\n1,2\n", "column names"),
  "empty.jsonl.gz": (gzip.compress(b""), "empty file"),
  "no.jsonl.gz": (b"{}", "damaged gzip"),
  "cut.jsonl.gz": (gzip.compress(JSONL)[:-20], "damaged gzip"),
  "wide.jsonl": (JSONL.decode().encode("utf-16"), "UTF-16"),
  "notes.txt": (b"hello", "expected one of .jsonl"),
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_file_that_cannot_be_read(tmp_path, name):
  content, words = WHOLE_FILES[name]
  path = write(tmp_path, name, content)
  with pytest.raises(ValueError) as caught:
    records(path)
  assert str(caught.value).startswith(str(path)) and words in str(caught.value) and "\n" not in str(caught.value)


def test_an_absent_file(tmp_path):
  write(tmp_path, "train.jsonl", JSONL)
  close = re.escape(str(tmp_path / "train.jsonl"))
  with pytest.raises(ValueError, match=rf"trian.jsonl: found no such file; did you mean {close}\?$"):
    records(tmp_path / "trian.jsonl")
  with pytest.raises(ValueError, match="there is no folder"):
    records(tmp_path / "nowhere" / "a.jsonl")
  with pytest.raises(ValueError, match="found a folder"):
    records(tmp_path)


BAD_LINES = {
  "a.jsonl": (b'{"a": 1}\n[1]\n\n{x}\n{"a": 2}\n{"a"', {2: "line is no JSON object", 4: "line is no JSON", 6: "last line cut short"}),
  "a.json": (b'[{"a": 1},\n3,\n{"a": 2},\n{"a', {2: "item is no JSON object", 4: "file cut short"}),
  "a.csv": (b'a,b\n1,2\n3\n"4', {3: "wrong number of columns", 4: "line is no CSV"}),
  "deep.jsonl": (b"[" * 100_000 + b'\n{"a": 1}', {1: "line is no JSON"}),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_and_the_others_are_kept(tmp_path, name):
  content, faults = BAD_LINES[name]
  path = write(tmp_path, name, content)
  pairs = list(text_files.read_records(path))
  assert {place: record.reason for place, record in pairs if isinstance(record, FileFault)} == {
    f"{path}:{n}": why for n, why in faults.items()
  }
  assert any(isinstance(record, dict) for _, record in pairs)


def test_a_file_is_never_held_in_memory(tmp_path, monkeypatch):
  rows = [{"question": "x" * 1000}] * 3000
  paths = [write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))), write(tmp_path, "a.json", json.dumps(rows))]
  for path in paths:
    tracemalloc.start()
    assert sum(1 for _ in text_files.read_records(path)) == len(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20, path  # Of 3 MB.
  monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 10_000)
  path = write(tmp_path, "b.jsonl", "y" * 10**6 + '\n{"a": 1}')
  tracemalloc.start()
  assert records(path) == [FileFault("record too long", "more than 0 MiB in one line"), {"a": 1}]
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 500_000
  assert records(write(tmp_path, "b.json", f'[{{"a": "{"y" * 10**6}"}}]'))[0].reason == "file cut short"


@pytest.mark.parametrize("name, content", [("a.jsonl", b'{"q": "a\xffb"}'), ("a.json", b'[{"q": "a\xffb"}]'), ("a.csv", b"q\na\xffb\n")])
def test_bytes_that_are_not_utf8_become_lone_surrogates(tmp_path, name, content):
  assert records(write(tmp_path, name, content)) == [{"q": "a\udcffb"}]


@settings(max_examples=60)
@given(
  data=st.binary(max_size=300),
  suffix=st.sampled_from(["jsonl", "json", "csv", "tsv", "jsonl.gz"]),
  start=st.sampled_from([b"", b"[", b"{"]),
)
def test_any_bytes(tmp_path_factory, data, suffix, start):
  path = tmp_path_factory.mktemp("any") / f"a.{suffix}"
  path.write_bytes(start + data)
  try:
    for place, record in text_files.read_records(path):
      assert place.startswith(str(path)) and isinstance(record, dict | FileFault)
  except ValueError as error:
    assert "\n" not in str(error)


@settings(max_examples=40)
@given(cut=st.integers(1, len(JSONL)), listed=st.booleans())
def test_a_file_cut_short_keeps_what_comes_before(tmp_path_factory, cut, listed):
  content = (json.dumps(ROWS).encode() if listed else JSONL)[:cut]
  path = tmp_path_factory.mktemp("cut") / ("a.json" if listed else "a.jsonl")
  path.write_bytes(content)
  items = records(path)
  whole = [record for record in items if isinstance(record, dict)]
  assert whole == ROWS[: len(whole)] and len(items) - len(whole) <= 1
  if not listed:
    assert len(whole) >= content.count(b"\n") - 1
