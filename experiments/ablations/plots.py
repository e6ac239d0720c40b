"""How every figure of the ablations looks, and how it is written. matplotlib is optional and imported here only."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

# Okabe and Ito's colours, told apart by colour-blind readers and in grey.
BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, BLACK, GREY = (
  "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#1a1a1a", "#8a919c",
)  # fmt: skip

PAPER_WIDTH = 7.0
"""Width of a figure over both columns, in inches. Text is set at its final size, never scaled."""

_STYLE = {
  "font.size": 8,
  "axes.titlesize": 8,
  "axes.titlelocation": "left",
  "axes.labelsize": 8,
  "xtick.labelsize": 7,
  "ytick.labelsize": 7,
  "legend.fontsize": 7,
  "legend.frameon": False,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": "#8a919c",
  "axes.linewidth": 0.7,
  "xtick.major.width": 0.7,
  "ytick.major.width": 0.7,
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": "#e6e8eb",
  "grid.linewidth": 0.6,
  "lines.linewidth": 1.4,
  "lines.markersize": 3.5,
  "savefig.dpi": 150,
  "svg.hashsalt": "jaxrl_llm",  # The same picture is the same file.
}


@contextlib.contextmanager
def new_figure(height: float, width: float = PAPER_WIDTH) -> Iterator[Any]:
  """An empty figure, and the style for as long as it is drawn on and saved.

  Args:
    height: in inches.
    width: in inches.

  Raises:
    ImportError: matplotlib is not installed.
  """
  try:
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # Not pyplot: no global state, no display.
  except ImportError as error:
    raise ImportError("the figures need matplotlib: pip install 'jaxrl-llm[logging]'") from error
  with rc_context(_STYLE):
    yield Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, folder: pathlib.Path, name: str, formats: Sequence[str]) -> None:
  """Writes a figure once in each format ("png", "pdf", "svg")."""
  folder.mkdir(parents=True, exist_ok=True)
  for suffix in formats:
    # Without a date in it, so that the same picture is the same file.
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[suffix]
    options = {"pil_kwargs": {"optimize": True}} if suffix == "png" else {}
    figure.savefig(folder / f"{name}.{suffix}", metadata=metadata, **options)


def letter(axes: Any, label: str, title: str) -> None:
  """A panel's letter and what it shows."""
  axes.set_title(rf"$\bf{{{label}}}$  {title}")


def two_sided(below: str, middle: str, above: str) -> Any:
  """A colour map that runs from one colour over another to a third."""
  from matplotlib.colors import LinearSegmentedColormap

  return LinearSegmentedColormap.from_list("two_sided", [below, middle, above])
