"""The style and the files of figures, ready for a paper.

matplotlib is optional and imported here only.

Text has its final size and is never scaled. PDF files embed their fonts as TrueType (Type 42),
which every venue's checker accepts. SVG files hold text as outlines, so that they look the same on
a machine without the font. Lines differ in colour, dashes and marker, so that a figure can be read
in grey and by colour-blind readers.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.messages import MissingPackageError

# Okabe and Ito's colours, distinguishable in grey and for colour-blind readers.
BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, BLACK, GREY = (
  "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#1a1a1a", "#8a919c",
)  # fmt: skip

FULL_WIDTH = 7.0
"""Width of a figure over both columns of a paper, in inches."""

COLUMN_WIDTH = 3.3
"""Width of a figure in one column, in inches."""

FORMATS = ("pdf", "svg", "png")

_COLORS = (BLUE, ORANGE, GREEN, PINK, BLACK, YELLOW, SKY)
_DASHES = ((0, ()), (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.4, 1.2, 1.4)), (0, (8, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_STYLE = {
  "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7,
  "axes.titlelocation": "left", "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
  "axes.edgecolor": "#8a919c", "axes.linewidth": 0.7, "xtick.major.width": 0.7, "ytick.major.width": 0.7,
  "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e8eb", "grid.linewidth": 0.6,
  "lines.linewidth": 1.4, "lines.markersize": 3.5, "savefig.dpi": 150, "pdf.fonttype": 42, "ps.fonttype": 42,
  "svg.fonttype": "path", "svg.hashsalt": "jaxrl_llm",  # The same picture gives the same file.
}  # fmt: skip


@contextlib.contextmanager
def new_figure(height: float, width: float = FULL_WIDTH) -> Iterator[Any]:
  """Opens an empty figure, and sets the style while it is drawn and saved.

  Args:
    height: Height in inches.
    width: Width in inches.

  Raises:
    MissingPackageError: If matplotlib is not installed.
  """
  try:
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # Not pyplot: no global state, no display.
  except ImportError as error:
    raise MissingPackageError("the figures need matplotlib: pip install 'jaxrl-llm[logging]'") from error
  with rc_context(_STYLE):
    yield Figure(figsize=(width, height), layout="constrained")


def line_style(index: int) -> dict[str, Any]:
  """Returns the style of the k-th line of a figure.

  Its colour, dashes and marker differ from those of its neighbours.

  Example:
    >>> line_style(0)["color"], line_style(1)["marker"]
    ('#0072B2', 's')
  """
  # The lengths are coprime, so that hundreds of lines look different.
  return {"color": _COLORS[index % 7], "linestyle": _DASHES[index % 5], "marker": _MARKERS[index % 8]}


def save_as(figure: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure to a file in the format of its ending, and returns the path.

  The file holds no date, so that the same picture gives the same file.

  Raises:
    ValueError: If the ending is not one of `FORMATS`.
  """
  suffix = path.suffix[1:].lower()
  if suffix not in FORMATS:
    raise ValueError(f"{path}: found the ending {path.suffix!r}, expected one of {', '.join(f'.{x}' for x in FORMATS)}")
  path.parent.mkdir(parents=True, exist_ok=True)
  metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[suffix]
  options = {"pil_kwargs": {"optimize": True}} if suffix == "png" else {}
  figure.savefig(path, metadata=metadata, **options)
  return path
