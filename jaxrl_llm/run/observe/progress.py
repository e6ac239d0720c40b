"""The screen of a run: a live line on a terminal, plain lines in a log, and tables of rollouts.

Model output is untrusted text. It reaches a terminal only through `visible`, which leaves no
control character in it.
"""

import contextlib
import io
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_NAMES = {"warm_start": "warm start", "rl": "RL", "eval": "eval", "reward_model": "reward model"}


class Progress(contextlib.AbstractContextManager):
  """Live progress of a run.

  On a terminal the last line is redrawn in place. Elsewhere (a log file, a notebook, a pod) whole
  lines are written, one every `every_seconds`, without carriage returns or colour codes. An
  evaluation always prints a line.

  Args:
    every_seconds: Minimum time between two plain lines, in seconds.
    stream: Stream to write to; None means standard output.
    clock: Function that returns the time in seconds; a test may pass its own.
    quiet: Whether to show nothing, for processes other than the main one.
    log: Function called with the text of every line that stays, even if `quiet`.

  Example:
    >>> progress = Progress(every_seconds=0)
    >>> progress.start("rl", total=80)
    >>> progress.update(1, {"critic/rewards/mean": 0.25, "perf/throughput": 5120.0})
    RL 1/80 | reward 0.250 | 5,120 tokens/s | elapsed 0:00
    >>> progress.evaluation(1, {"eval/accuracy": 0.412, "eval/accuracy_low": 0.37, "eval/accuracy_high": 0.455})
    eval at RL step 1 | accuracy 41.2% (37.0% to 45.5%)
    >>> progress.close()
  """

  def __init__(
    self,
    *,
    every_seconds: float = 10.0,
    stream: io.TextIOBase | None = None,
    clock: Callable[[], float] = time.monotonic,
    quiet: bool = False,
    log: Callable[[str], None] = lambda line: None,
  ):
    stream = stream or sys.stdout
    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    # Explicit, so that FORCE_COLOR in the environment cannot put escape codes into a log file.
    colors, width = ("auto", None) if is_terminal else (None, 120)
    self._console = Console(file=stream, force_terminal=is_terminal, force_jupyter=False, color_system=colors, width=width, quiet=quiet)
    self._encoding = self._console.encoding
    self._live_wanted = is_terminal and not quiet and not self._console.is_dumb_terminal
    self._live: Live | None = None
    self._every_seconds, self._clock, self._log = every_seconds, clock, log
    self._begun = clock()
    self._last_line, self._line_step = float("-inf"), 0  # Time and step of the last plain line.
    self._last_logged = float("-inf")
    self._accuracy: float | None = None
    self._phase, self._total, self._step, self._scalars = "", 0, 0, {}
    self._pace: deque[tuple[float, int]] = deque(maxlen=32)

  def start(self, phase: str, total: int, *, done: int = 0) -> None:
    """Begins a phase of `total` steps, such as "warm_start".

    `done` of them were done before this process resumed it.
    """
    self._finish_phase()
    self._phase, self._total, self._step, self._scalars = phase, total, done, {}
    self._pace.clear()
    self._last_line, self._line_step = float("-inf"), 0  # Shows a phase's first step at once.
    if self._live_wanted and self._live is None:
      # Two frames a second keep the clock moving through a long step; `transient` leaves no
      # half-drawn line behind.
      self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2, transient=True)
      self._live.start()

  def update(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Shows a step of the phase, from 1, with some numbers of its metrics row."""
    self._step, self._scalars = step, scalars
    self._pace.append((self._clock(), step))
    if self._live:
      self._live.refresh()
      if self._clock() - self._last_logged >= self._every_seconds:
        self._last_logged = self._clock()
        self._log(visible(self._line()))
    elif self._clock() - self._last_line >= self._every_seconds:
      self._leave_line()

  def evaluation(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Prints a line about an evaluation, from the "eval" row of an RL step."""
    self._accuracy = scalars.get("eval/accuracy", self._accuracy)
    parts = [f"eval at RL step {step:,}"]
    if (accuracy := scalars.get("eval/accuracy")) is not None:
      low, high = scalars.get("eval/accuracy_low"), scalars.get("eval/accuracy_high")
      parts.append(f"accuracy {accuracy:.1%}" + (f" ({low:.1%} to {high:.1%})" if low is not None and high is not None else ""))
    parts += [f"{name.removeprefix('eval/')} {value:.1%}" for name, value in scalars.items() if name.startswith("eval/pass@")]
    if (length := scalars.get("eval/response_length/mean")) is not None:
      parts.append(f"{length:.1f} tokens per response")
    self.note(" | ".join(parts))

  def samples(self, rows: Iterable[Mapping[str, Any]], *, title: str = "sample rollouts", max_chars: int = 240) -> None:
    """Prints a table of rollouts, with rows as in `samples.jsonl`.

    The middle of a cell beyond `max_chars` is left out.
    """
    table = Table(title=self._cell(title, 200), title_justify="left", show_lines=True)
    for name, ratio in (("prompt", 3), ("response", 4), ("answer", 1)):
      table.add_column(name, ratio=ratio, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    for row in rows:
      cells = [self._cell(row.get(name), max_chars) for name in ("prompt", "response", "answer")]
      reward = row.get("reward")
      style = "" if reward is None else "green" if reward > 0.5 else "red"
      table.add_row(*cells, Text("" if reward is None else f"{reward:.3g}", style=style))
    self._console.print(table)

  def note(self, text: str) -> None:
    """Prints one line, above the live one on a terminal."""
    self._log(visible(text))
    self._console.print(self._cell(text, 4000), soft_wrap=True)

  def close(self) -> None:
    """Removes the live line; the last step stays as a plain line."""
    if self._live:
      self._live.stop()
      self._live = None
    self._finish_phase()

  def __exit__(self, *exc_info) -> None:
    self.close()

  def _finish_phase(self) -> None:
    if self._scalars and self._step != self._line_step:
      self._leave_line()
    self._scalars = {}

  def _leave_line(self) -> None:
    self._last_line, self._line_step = self._clock(), self._step
    self.note(self._line())

  def _line(self) -> str:
    scalars = self._scalars
    parts = [f"{_NAMES.get(self._phase, self._phase)} {self._step:,}/{self._total:,}"]
    if self._accuracy is not None:
      parts.append(f"accuracy {self._accuracy:.1%}")
    for label, name in (("reward", "critic/rewards/mean"), ("loss", "actor/loss"), ("loss", "reward_model/loss")):
      # The policy loss says little about learning, so it shows only without a reward: in the warm
      # start.
      if scalars.get(name) is not None:
        parts.append(f"{label} {scalars[name]:.3f}")
        break
    if scalars.get("perf/throughput") is not None:
      parts.append(f"{scalars['perf/throughput']:,.0f} tokens/s")
    parts.append(f"elapsed {duration(self._clock() - self._begun)}")
    if (left := self._seconds_left()) is not None:
      parts.append(f"ETA {duration(left)}")
    return " | ".join(parts)

  def _seconds_left(self) -> float | None:
    """Returns the remaining seconds at the pace of the last steps.

    The first step, which compiles, is the window's edge and so does not count.
    """
    if len(self._pace) < 2 or self._step >= self._total:
      return None
    (begun, first), (now, last) = self._pace[0], self._pace[-1]
    return (self._total - last) * (now - begun) / (last - first) if last > first else None

  def _render(self) -> Text:
    done = self._step / self._total if self._total else 0
    filled = round(20 * done)
    full, empty = ("━", "━") if self._encoding.startswith("utf") else ("=", "-")
    bar = Text.assemble((full * filled, "green"), (empty * (20 - filled), "bright_black"), "  ")
    # The line is cut and never wrapped: a live line of two rows cannot be redrawn after a terminal
    # becomes narrower.
    text = bar + self._cell(self._line(), 400)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text

  def _cell(self, value: Any, max_chars: int) -> Text:
    text = "" if value is None else str(value)
    if len(text) > max_chars:
      text = f"{text[: max_chars * 2 // 3]} … {text[len(text) - max_chars // 3 :]}"
    # A `Text`, never a string: rich reads markup such as [bold] only in strings.
    return Text(visible(text).encode(self._encoding, "backslashreplace").decode(self._encoding))


def visible(text: str) -> str:
  r"""Escapes control and invisible formatting characters; line breaks become "↵".

  Escape sequences, bidirectional overrides, zero-width characters and lone surrogates could
  otherwise rewrite a terminal or a log.

  Example:
    >>> visible("2 + 2\n= \x1b[31m4")
    '2 + 2↵= \\x1b[31m4'
  """
  shown = lambda char: char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN else char
  return "".join("↵" if char == "\n" else shown(char) for char in text)


# Control, format, surrogate, private use, line separator, paragraph separator.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))


def duration(seconds: float) -> str:
  """Formats seconds as hours, minutes and seconds.

  Example:
    >>> duration(75), duration(3 * 3600 + 62)
    ('1:15', '3:01:02')
  """
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
