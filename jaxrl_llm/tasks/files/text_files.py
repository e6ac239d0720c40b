"""Streaming readers of records from JSONL, JSON, CSV and Parquet files.

No file is held in memory, and no bad line ends the reading. A fault of a whole file (absent, empty,
truncated so that nothing can be read, of another format) is a ValueError of one line. A fault of a
single record is a `FileFault` in its place, so that the caller decides whether to drop it.
"""

import codecs
import csv
import functools
import gzip
import io
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.messages import Problem, did_you_mean, one_line
from jaxrl_llm.tasks.files import parquet_files

# A longer record is a fault; otherwise a file without line ends would be read whole.
MAX_RECORD_BYTES = 64 * 2**20
_CHUNK = 2**16
_BLANKS = re.compile(r"[ \t\r\n]*")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_OTHER_DELIMITERS = b";\t|,"  # What spreadsheets write where the comma is a decimal point.
_LIST = re.compile(rb"\s*\[\s*[{\]]")
_START = 512
_GZIP = b"\x1f\x8b"
_FOREIGN = (
  (rb"version https://git-lfs", "the pointer of Git LFS to a file", "fetch the file itself: git lfs pull"),
  (rb"(?i)\s*<(!doctype|html|head|\?xml)", "a web page", "download the file itself, not the page about it"),
  (rb"PK\x03\x04", "a ZIP archive or an Excel workbook", "unpack it, or save the sheet as CSV in UTF-8"),
  (rb"\x28\xb5\x2f\xfd|BZh|\xfd7zXZ|" + _GZIP, "a packed file", "unpack it"),
  (rb"ARROW1|\xff\xff\xff\xff", "an Arrow file", "convert it to Parquet"),
  (rb"(?s).{0,3}\0|[^\n]*\0", "binary data, or UTF-16 without its mark", "convert it to UTF-8 text"),
)
"""Content that is no text of records: a pattern of its first bytes, what it is, and the fix."""
_SUFFIXES = (".jsonl", ".ndjson", ".json", *_DELIMITERS, ".parquet")
_reason = functools.partial(one_line, typed=False, limit=160)

Record = Mapping[str, Any]


class FileFault(NamedTuple):
  """The reason why a record cannot be read.

  Attributes:
    reason: Fixed text for each kind of fault.
    detail: Offending content of this record.
  """

  reason: str
  detail: str = ""


Records = Iterable[tuple[str, Record | FileFault]]
"""Records, each with its place, such as "data.jsonl:12"."""


def read_records(path: str | os.PathLike, *, columns: Iterable[str] | None = None) -> Records:
  """Yields the records of a file.

  Args:
    path: A `.jsonl`, `.ndjson`, `.json` (a list of objects, one object, or one object per line),
      `.csv`, `.tsv` (with a header line, separated by commas, semicolons, tabs or bars) or
      `.parquet` file. All but the last may be compressed with gzip. JSON, Parquet or gzip
      data under another of these suffixes is read as what it is.
    columns: Columns to read from a Parquet file, if they exist; None reads all. Other formats are
      always read whole.

  Yields:
    Records or their faults. Bytes that are not UTF-8 become lone surrogates, so that the reader of
    the field can reject them.

  Raises:
    ValueError: If the file as a whole cannot be read. One line, with the fix.
    MissingPackageError: If the file is Parquet and the package pyarrow is missing.
  """
  path = check_path(path)
  suffix = _suffix(path)
  try:
    with open(path, "rb") as file:
      start = file.read(_START)
    if start.startswith(parquet_files.MAGIC) or (suffix == ".parquet" and start.lstrip()[:1] not in (b"{", b"[")):
      _check_kind(path, start)
      for number, row in enumerate(parquet_files.read_rows(path, columns), 1):
        yield f"{path}:{number}", FileFault(*row) if isinstance(row, tuple) else row
      return
    with (gzip.open if path.suffix == ".gz" or start.startswith(_GZIP) else open)(path, "rb") as file:
      file = io.BufferedReader(file, _CHUNK)
      _check_encoding(path, file)
      start = file.peek(_START)[:_START]
      _check_kind(path, start)
      if suffix in _DELIMITERS:
        yield from _table(path, file, _DELIMITERS[suffix])
      elif _LIST.match(start) or (suffix == ".json" and start.lstrip().startswith(b"[")):
        yield from _list(path, file)
      else:
        yield from _lines(path, file)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise ValueError(f"{path}: found damaged gzip data ({_reason(error)}), expected a whole file; copy or download it again") from error
  except OSError as error:
    raise ValueError(f"{path}: found a file that cannot be read ({_reason(error)}); check its permissions and the disk") from error


def check_path(path: str | os.PathLike) -> pathlib.Path:
  """Checks that a file exists, is not empty and has a known suffix, without reading it.

  Returns:
    The path, with ~ expanded.

  Raises:
    ValueError: If one of the checks fails. One line, with the nearest name in that folder.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    raise ValueError(f"{path}: found a folder, expected a file such as {path / 'train.jsonl'}")
  if not path.is_file():
    names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    close = did_you_mean(path.name, names, "{}")
    hint = f"; did you mean {path.parent / close}?" if close else "" if names else f"; there is no folder {path.parent}"
    raise ValueError(f"{path}: found no such file{hint}")
  if _suffix(path) not in _SUFFIXES or path.name.endswith(".parquet.gz"):
    raise ValueError(f"{path}: found {path.suffix or 'no suffix'}, expected one of {', '.join(_SUFFIXES)}")
  if path.stat().st_size == 0:
    raise ValueError(f"{path}: found an empty file, expected problems; copy or download it again")
  return path


def check_splits(
  path: str | os.PathLike | None, test_path: str | os.PathLike | None, test_fraction: float | None, *, rows: str, example: str
) -> dict[str, pathlib.Path]:
  """Checks that a user's files exist and that the settings of their paths agree; opens no file.

  Args:
    path: Training file, `task.path`.
    test_path: Test file, `task.test_path`, or None.
    test_fraction: Held-out fraction of the training file, `task.test_fraction`, or None.
    rows: Word for the files' contents in messages, such as "problems".
    example: Example of a file name, for messages.

  Returns:
    Files by split, test first: reading them in this order holds out a row that is in both.

  Raises:
    ValueError: If a file is missing or the settings conflict. One line.
  """
  if path is None:
    raise ValueError(Problem("task.path", "None", f"a file of {rows}, such as {example}"))
  train = check_path(path)
  if test_path is None:
    return {"train": train}
  files = {"test": check_path(test_path), "train": train}
  if test_fraction is not None:
    raise ValueError(Problem("task.test_fraction", f"{test_fraction} with test {rows} of their own in task.test_path; set one of the two"))
  return files


def _suffix(path: pathlib.Path) -> str:
  return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _check_encoding(path: pathlib.Path, file: io.BufferedReader) -> None:
  start = file.peek(4)[:4]
  if start.startswith(codecs.BOM_UTF8):
    file.read(len(codecs.BOM_UTF8))
  elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    raise ValueError(f"{path}: found UTF-16 text, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
  elif not start:
    raise ValueError(f"{path}: found an empty file, expected problems; copy or download it again")


def _check_kind(path: pathlib.Path, start: bytes) -> None:
  """Refuses a file that is no table of records, by its first bytes."""
  for pattern, what, fix in _FOREIGN:
    if not start.startswith(parquet_files.MAGIC) and re.match(pattern, start):
      raise ValueError(f"{path}: found {what}, expected records; {fix}")


def _lines(path: pathlib.Path, file: io.BufferedReader) -> Records:
  number, records = 0, 0
  while line := file.readline(MAX_RECORD_BYTES + 1):
    number += 1
    # A single object over several lines.
    if number == 1 and _suffix(path) == ".json" and line.strip() == b"{":
      line += file.read(MAX_RECORD_BYTES)
    place = f"{path}:{number}"
    if len(line) > MAX_RECORD_BYTES:
      while line and not line.endswith(b"\n"):
        line = file.readline(MAX_RECORD_BYTES)
      yield place, FileFault("record too long", f"more than {MAX_RECORD_BYTES // 2**20} MiB in one line")
      records += 1
    elif not line.isspace():
      records += 1
      yield place, _record(line.decode("utf-8", "surrogateescape"), cut=not line.endswith(b"\n"))
  if not records:
    raise ValueError(f"{path}: found blank lines only, expected an object such as {{\"question\": ..., \"answer\": ...}} on each")


def _record(line: str, *, cut: bool) -> Record | FileFault:
  try:
    value = json.loads(line)
  except (ValueError, RecursionError) as error:
    return FileFault("last line cut short" if cut else "line is no JSON", _reason(error))
  return value if isinstance(value, dict) else FileFault("line is no JSON object", f"a JSON {_kind(value)}")


def _list(path: pathlib.Path, file: io.BufferedReader) -> Records:
  """Yields the items of a JSON list, parsed incrementally; a truncated list ends with a fault."""
  decode, decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode, json.JSONDecoder()
  # `expected` is "[", "item" or ",".
  buffer, at, line, size, ended, items, expected = "", 0, 1, _CHUNK, False, 0, "["
  while True:
    start = _BLANKS.match(buffer, at).end()
    line += buffer.count("\n", at, start)
    at, character = start, buffer[start : start + 1]
    if character == "]" and (expected == "," or (expected == "item" and not items)):
      if rest := (buffer[at + 1 :] + decode(file.read(_CHUNK))).strip():
        yield f"{path}:{line}", FileFault("text behind the JSON list", f"{rest[:40]!r}; nothing of it was read")
      break
    if character and expected != "item":
      if character != expected:
        yield f"{path}:{line}", FileFault(
          "file is no JSON list", f"{character!r} in place of {expected!r}; nothing after it was read"
        )
        return
      at, expected = at + 1, "item"
      continue
    try:
      value, end = decoder.raw_decode(buffer, at)
      whole = end < len(buffer) or ended  # A number at the end of the buffer may continue.
      problem = ""
    except (ValueError, RecursionError) as error:
      whole, problem = False, _reason(error)
      ended = ended or isinstance(error, RecursionError)
    if not whole:
      if ended or len(buffer) - at > MAX_RECORD_BYTES:
        yield f"{path}:{line}", FileFault("file cut short", f"{problem or 'an item too long'}; nothing after it was read")
        return
      more = file.read(size)
      # The read size doubles; otherwise a long item would be parsed again every 64 KiB.
      ended, size, buffer, at = len(more) < size, min(2 * size, MAX_RECORD_BYTES), buffer[at:] + decode(more), 0
      continue
    yield f"{path}:{line}", value if isinstance(value, dict) else FileFault("item is no JSON object", f"a JSON {_kind(value)}")
    line += buffer.count("\n", at, end)
    items, at, size, expected = items + 1, end, _CHUNK, ","
  if not items:
    raise ValueError(f"{path}: found an empty list, expected problems")


def _table(path: pathlib.Path, file: io.BufferedReader, delimiter: str) -> Records:
  csv.field_size_limit(MAX_RECORD_BYTES)
  header = file.peek(_CHUNK).partition(b"\n")[0].rstrip(b"\r")
  if re.fullmatch(b"(?i)sep=.", header):  # Excel's own first line.
    delimiter = chr(header[-1])
    file.readline()
  elif delimiter.encode() not in header:
    delimiter = next((chr(other) for other in _OTHER_DELIMITERS if other in header), delimiter)
  reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline=""), delimiter=delimiter, strict=True)
  names = next(reader, None)
  if not names or len(set(names)) != len(names):
    raise ValueError(f"{path}:1: found the column names {names}, expected distinct ones on the first line")
  while True:
    place = f"{path}:{reader.line_num + 1}"
    try:
      fields = next(reader)
    except StopIteration:
      return
    except csv.Error as error:
      yield place, FileFault("line is no CSV", _reason(error))
      continue
    if len(fields) == len(names):
      yield place, dict(zip(names, fields, strict=True))
    elif fields:
      yield place, FileFault("wrong number of columns", f"{len(fields)}, where the first line names {len(names)}")


def _kind(value: Any) -> str:
  return {list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
