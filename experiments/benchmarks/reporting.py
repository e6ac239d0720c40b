"""Common parts of the benchmarks' reports: medians with ranges, peak memory, text lines, JSON."""

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

from experiments.benchmarks.engines import worker


def spread(values: list[float]) -> dict[str, float]:
  """Computes the median and the range.

  Example:
    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0}
  """
  return dict(median=statistics.median(values), min=min(values), max=max(values))


def between(x: dict[str, float], form: str, scale: float = 1.0) -> str:
  """Formats a spread.

  Example:
    >>> between(dict(median=0.002, min=0.001, max=0.004), ".1f", 1e3)
    '2.0 (1.0 to 4.0)'
  """
  return f"{scale * x['median']:{form}} ({scale * x['min']:{form}} to {scale * x['max']:{form}})"


def megabytes(size: float | None) -> str:
  """Formats a size in megabytes; `unknown` for None."""
  return "unknown" if size is None else f"{size / 1e6:,.0f} MB"


def peak_memory(device, *, loaded_bytes: int | None, weight_bytes: int, temp_bytes: int | None) -> dict[str, Any]:
  """Reads the peak memory since `worker.reset_peak`.

  It is the peak of the process on a CPU, and of the device elsewhere.

  Args:
    device: Device of JAX.
    loaded_bytes: Memory of the process after loading the weights, in bytes.
    weight_bytes: Size of the weights, in bytes.
    temp_bytes: Temporaries of the program according to the compiler, in bytes.
  """
  if device.platform == "cpu":
    peak, source = worker.peak_bytes(), "peak resident memory of the process"
  else:
    peak, source = (
      (device.memory_stats() or {}).get("peak_bytes_in_use"),
      "peak_bytes_in_use of the device since the start",
    )
    loaded_bytes = weight_bytes
  increase = None if peak is None or loaded_bytes is None else peak - loaded_bytes
  return dict(
    source=source,
    peak_bytes=peak,
    loaded_bytes=loaded_bytes,
    increase_bytes=increase,
    program_temp_bytes=temp_bytes,
  )


def lines(rows: dict[str, str]) -> str:
  """Formats rows of text, with their names in a column."""
  return "\n".join(f"{name:<13}{value}" for name, value in rows.items())


def report(measure: Callable[[], dict[str, Any]], describe: Callable[[dict[str, Any]], str], path: pathlib.Path | None) -> int:
  """Runs a benchmark and shows its results; the end of every command here.

  Args:
    measure: Function that runs the benchmark; bad input raises.
    describe: Function from the results to lines of text.
    path: File for the results; None for none.

  Returns:
    The exit status: 0, or 2 for bad input, which is told in one line.
  """
  try:
    result = measure()
  except (ValueError, OSError, ImportError) as error:
    print(error, file=sys.stderr)
    return 2
  print(describe(result))
  write_json(path, result)
  return 0


def at_least_one(args: argparse.Namespace, *names: str) -> None:
  """Refuses arguments below 1.

  Raises:
    ValueError: If one is. One line, which names it.
  """
  for name in names:
    if getattr(args, name) < 1:
      raise ValueError(f"--{name}: found {getattr(args, name)}, expected 1 or more")


def write_json(path: pathlib.Path | None, result: dict[str, Any]) -> None:
  """Writes the results if a file is given."""
  if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
