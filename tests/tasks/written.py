"""Records as tests write them into files."""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any


def write_lines(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> pathlib.Path:
  """Writes a file of JSON lines, and returns its path."""
  path.write_text("\n".join(map(json.dumps, rows)))
  return path


def parquet_bytes(rows: list[Mapping[str, Any]]) -> bytes:
  """Returns the content of a Parquet file."""
  import pyarrow
  from pyarrow import parquet as files

  sink = pyarrow.BufferOutputStream()
  files.write_table(pyarrow.Table.from_pylist(rows), sink)
  return sink.getvalue().to_pybytes()
