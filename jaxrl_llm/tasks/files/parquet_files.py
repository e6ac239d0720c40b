"""Streaming reader of Parquet files, whose values become those of Python."""

import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxrl_llm.messages import MissingPackageError, one_line

MAGIC = b"PAR1"
"""First bytes of a Parquet file."""

_ROWS = 64  # Rows per batch. Rows of programming problems contain megabytes of tests.
_reason = functools.partial(one_line, typed=False, limit=160)


def read_rows(path: pathlib.Path, columns: Iterable[str] | None) -> Iterator[dict[str, Any] | tuple[str, str]]:
  """Yields the rows of a file, or the reason and detail of a row that cannot be read.

  Args:
    path: Parquet file.
    columns: Columns to read if they exist, `a.b` with all of `a`; None reads all.

  Raises:
    ValueError: If the file as a whole cannot be read. One line.
    MissingPackageError: If the package pyarrow is missing.
  """
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError as error:
    raise MissingPackageError(
      f"{path}: Parquet needs the package pyarrow: pip install 'jaxrl_llm[tasks]'; or convert it to .jsonl"
    ) from error
  number = 0
  try:
    with parquet.ParquetFile(path) as file:
      schema, wanted = file.schema_arrow, None
      if columns is not None:
        roots = {root for name in columns for root in (name, name.partition(".")[0])}
        wanted = [name for name in schema.names if name in roots] or schema.names[:1]
      plain = {field.name: convert for field in schema if (convert := _converter(field.type)) is not None}
      for batch in file.iter_batches(batch_size=_ROWS, columns=wanted, use_threads=False):
        for row in _plain_rows(batch):
          number += 1
          yield row if isinstance(row, tuple) else row | {name: plain[name](row[name]) for name in plain if name in row}
  except (pyarrow.ArrowException, OSError) as error:
    damage = f"row {number + 1} cannot be read" if number else "no Parquet file, or one cut short"
    raise ValueError(f"{path}: found {damage} ({_reason(error)}); copy or download it again") from error
  if not number:
    raise ValueError(f"{path}: found a table without rows, expected problems")


def _plain_rows(batch) -> Iterator[dict[str, Any] | tuple[str, str]]:
  """Yields the rows of a batch.

  Parquet does not check that texts are UTF-8, and its dates go beyond Python's. If a value cannot
  be read, the batch is converted row by row, so that the other rows are kept.
  """
  for number, field in enumerate(batch.schema):
    if getattr(field.type, "unit", "") == "ns":
      batch = batch.set_column(number, field.name, batch.column(number).cast(_microseconds(field.type), safe=False))
  try:
    yield from batch.to_pylist()
    return
  except (ValueError, OverflowError):
    rows = [batch.slice(i, 1) for i in range(batch.num_rows)]
  for row in rows:
    try:
      yield row.to_pylist()[0]
    except UnicodeDecodeError as error:
      yield "not UTF-8", _reason(error)
    except (ValueError, OverflowError) as error:
      yield "value out of range", _reason(error)


def _microseconds(kind):
  """Returns an Arrow type of nanoseconds with the microseconds that Python's own types hold."""
  import pyarrow

  if pyarrow.types.is_timestamp(kind):
    return pyarrow.timestamp("us", kind.tz)
  return pyarrow.duration("us") if pyarrow.types.is_duration(kind) else pyarrow.time64("us")


def _converter(kind) -> Callable[[Any], Any] | None:
  """Returns what makes values of an Arrow type plain; None if they are.

  A float of 16 or 32 bits becomes the float whose shortest decimal is its own: 0.1, and not
  0.10000000149011612. A map becomes an object.
  """
  import pyarrow.types as types

  if types.is_float16(kind) or types.is_float32(kind):
    narrow = np.float16 if types.is_float16(kind) else np.float32
    convert = lambda value: float(str(narrow(value)))
  elif types.is_dictionary(kind) or types.is_run_end_encoded(kind):
    return _converter(kind.value_type)
  elif types.is_map(kind):
    inner = _converter(kind.item_type) or (lambda value: value)
    convert = lambda value: {str(key): inner(x) for key, x in (value.items() if isinstance(value, dict) else value)}
  elif types.is_struct(kind):
    fields = {field.name: inner for field in kind if (inner := _converter(field.type)) is not None}
    convert = fields and (lambda value: value | {name: fields[name](value[name]) for name in fields})
  elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
    inner = _converter(kind.value_type)
    convert = inner and (lambda value: [inner(x) for x in value])
  else:
    return None
  return convert and (lambda value: None if value is None else convert(value)) or None
