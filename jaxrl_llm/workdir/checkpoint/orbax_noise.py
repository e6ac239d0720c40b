"""What Orbax and TensorStore print beside the error of a save that failed: hundreds of lines, of the writes that were under way with it."""

import functools
import logging
import sys
import traceback
import warnings
from types import TracebackType


@functools.cache
def silence() -> None:
  """Keeps those lines off stderr, in this process, from now on: the error itself is raised, and told in one line (see `failures`).

  The writes of one save run side by side. The first that fails ends their event loop; each of the others then tells of that, whenever it
  comes to its end or is collected, through whatever channel is at hand there. Only what can be known for such an echo is kept back.
  """
  logging.getLogger("absl").addFilter(lambda record: "_SignalingThread.run() raised" not in record.getMessage())
  logging.getLogger("asyncio").addFilter(_is_news)
  warnings.filterwarnings("ignore", r"coroutine 'async_serialize", RuntimeWarning)
  told = sys.unraisablehook
  sys.unraisablehook = lambda found: None if _is_closed_loop(found.exc_value, found.exc_traceback) else told(found)


def _is_news(record: logging.LogRecord) -> bool:
  """Whether asyncio's line is of anything but a write of Orbax's, which shows in the line or in where the error passed through."""
  line, trace = record.getMessage(), record.exc_info[2] if record.exc_info else None
  files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
  return "exception was never retrieved" not in line or not any("OCDBT" in text or "orbax" in text for text in (line, *files))


def _is_closed_loop(error: BaseException | None, trace: TracebackType | None) -> bool:
  """Whether a thread that is not Python's, so that nothing is above asyncio, wanted to wake a loop that has ended."""
  first = trace.tb_frame.f_code.co_name if trace else None
  return isinstance(error, RuntimeError) and str(error) == "Event loop is closed" and first == "call_soon_threadsafe"
