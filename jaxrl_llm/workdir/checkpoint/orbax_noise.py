"""Filters for what Orbax and TensorStore print beside the error of a failed save.

The hundreds of lines come from the writes that were in flight with the failed one.
"""

import functools
import logging
import sys
import traceback
import warnings
from types import TracebackType


@functools.cache
def silence() -> None:
  """Keeps those lines off stderr in this process from now on.

  The error itself is raised, and reported in one line (see `failures`).

  The writes of a save run in parallel. The first failure ends their event loop. Each of the other
  writes then reports the ended loop when it finishes or is collected, through `logging`, `warnings`
  or `sys.unraisablehook`. Only reports that certainly have this cause are dropped.
  """
  logging.getLogger("absl").addFilter(lambda record: "_SignalingThread.run() raised" not in record.getMessage())
  logging.getLogger("asyncio").addFilter(_is_news)
  warnings.filterwarnings("ignore", r"coroutine 'async_serialize", RuntimeWarning)
  default_hook = sys.unraisablehook
  sys.unraisablehook = lambda report: (
    None if _is_closed_loop(report.exc_value, report.exc_traceback) else default_hook(report)
  )


def _is_news(record: logging.LogRecord) -> bool:
  """Returns whether a line of asyncio concerns anything but a write of Orbax.

  The line, or the traceback of its error, shows a write of Orbax.
  """
  line, trace = record.getMessage(), record.exc_info[2] if record.exc_info else None
  files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
  return "exception was never retrieved" not in line or not any("OCDBT" in text or "orbax" in text for text in (line, *files))


def _is_closed_loop(error: BaseException | None, trace: TracebackType | None) -> bool:
  """Returns whether a thread that is not Python's has tried to wake an ended event loop.

  In such a thread no frame is above that of asyncio.
  """
  first = trace.tb_frame.f_code.co_name if trace else None
  return isinstance(error, RuntimeError) and str(error) == "Event loop is closed" and first == "call_soon_threadsafe"
