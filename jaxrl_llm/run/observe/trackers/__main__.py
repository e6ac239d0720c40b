"""Sends the rows of a run to a tracker, all that it does not have yet.

`python -m jaxrl_llm.run.observe.trackers WORKDIR TRACKER`
"""

import argparse
import contextlib
import fcntl
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.config.trackers import PACKAGES, tracker_problems
from jaxrl_llm.messages import one_line, refuse
from jaxrl_llm.run.observe.trackers.entry import FOLDER, open_record
from jaxrl_llm.run.observe.trackers.sender import send_rows

POLL_SECONDS = 1.0
LAST_SECONDS = 120.0
"""Time to end after the run that is followed has ended, or has been killed."""

_CLASSES = {"wandb": "Wandb", "mlflow": "Mlflow", "trackio": "Trackio"}


def main(argv: list[str]) -> int:
  """Runs the command and returns its exit status: 1 if the tracker failed, 2 for bad input."""
  parser = argparse.ArgumentParser("python -m jaxrl_llm.run.observe.trackers", description=__doc__, allow_abbrev=False)
  parser.add_argument("workdir", type=Path, help="folder of the run")
  parser.add_argument("tracker", help=f"one of {', '.join(PACKAGES)}")
  parser.add_argument("--follow", action="store_true", help="follow the run until the standard input ends")
  args = parser.parse_args(argv)
  wrong = [str(problem) for problem in tracker_problems([args.tracker])]
  if not (args.workdir / "metrics.jsonl").exists() and not args.follow:
    wrong.append(f"{args.workdir}: found no metrics.jsonl, expected the workdir of a run")
  if wrong:
    return refuse("\n".join(wrong))
  ended = threading.Event()
  if args.follow:
    threading.Thread(target=listen, args=(ended,), daemon=True).start()
  else:
    ended.set()
  try:
    with alone(args.workdir, args.tracker):
      module = importlib.import_module(f"jaxrl_llm.run.observe.trackers.{args.tracker}")
      tracker = getattr(module, _CLASSES[args.tracker])(open_record(args.workdir, args.tracker))
      notes = send_rows(args.workdir, args.tracker, tracker, lambda: not ended.wait(POLL_SECONDS))
      tracker.close()
  except Exception as error:  # Whatever a tracker raises: the run only says it.
    return refuse(one_line(error, limit=300), 1)
  for note in notes:
    print(f"note: {note}", file=sys.stderr, flush=True)
  return 0


def listen(ended: threading.Event) -> None:
  """Waits for the end of the run, when the standard input ends, and then limits the time left.

  A run that is killed closes it as well. The timer ends the process even if the tracker hangs.
  """
  while os.read(0, 4096):
    continue
  signal.setitimer(signal.ITIMER_REAL, LAST_SECONDS)
  ended.set()


@contextlib.contextmanager
def alone(workdir: Path, tracker: str) -> Iterator[None]:
  """Waits until no other process sends this run to the tracker, such as one of a killed attempt.

  Raises:
    TimeoutError: If another process still does after its time to end.
  """
  folder = workdir / FOLDER
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / f"{tracker}.lock", "w", encoding="utf-8") as file:
    begun = time.monotonic()
    while True:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() - begun > LAST_SECONDS + 10:
          raise TimeoutError(f"another process sends {workdir} to {tracker}") from None
        time.sleep(0.2)
    yield


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
