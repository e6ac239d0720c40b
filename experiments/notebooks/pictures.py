"""Output of the notebooks' cells.

It consists of pictures and tables that any viewer of notebooks displays.
"""

import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.ablations.plots import new_figure

DPI = 110
"""Of the pictures in the notebooks: sharp enough to read, small enough to keep in a repository."""


class Picture(NamedTuple):
  """An image.

  Attributes:
    png: The file.
    says: What it shows, for who cannot see it.
  """

  png: bytes
  says: str

  def _repr_png_(self) -> bytes:
    return self.png

  def __repr__(self) -> str:
    return self.says


class Table(NamedTuple):
  """Rows of text under a header."""

  header: Sequence[str]
  rows: Sequence[Sequence[str]]

  def _repr_markdown_(self) -> str:
    lines = [self.header, ["---"] * len(self.header), *self.rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)

  def __repr__(self) -> str:
    lines = [[str(cell) for cell in line] for line in (self.header, *self.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def picture(draw: Callable[..., None], *args: Any, height: float, says: str, width: float = 7.0, **settings: Any) -> Picture:
  """Returns a figure as a picture.

  Args:
    draw: `(figure, *args, **settings)`, draws on an empty figure.
    *args: Args of `draw`.
    height: Height in inches.
    says: What the picture shows.
    width: Width in inches.
    **settings: Settings of `draw`.
  """
  with new_figure(height=height, width=width) as figure:
    draw(figure, *args, **settings)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
  return Picture(_small(file.getvalue()), says)


def _small(png: bytes) -> bytes:
  """Returns the same picture in at most 256 colours.

  A third of the bytes, and no date or version in it.
  """
  from PIL import Image  # Comes with matplotlib.

  file = io.BytesIO()
  image = Image.open(io.BytesIO(png)).convert("RGB")
  image.quantize(256, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
  return file.getvalue()


def from_file(path: pathlib.Path, says: str) -> Picture:
  """Returns a picture that has been drawn already."""
  return Picture(_small(path.read_bytes()), says)
