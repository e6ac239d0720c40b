"""Outputs of the notebooks' cells: pictures and tables that any viewer of notebooks displays."""

import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.ablations.plots import new_figure

DPI = 110
"""Resolution of the pictures: sharp enough to read, small enough to keep in a repository."""


class Picture(NamedTuple):
  """An image.

  Attributes:
    png: Content of the PNG file.
    alt: Description for readers who cannot see the image.
  """

  png: bytes
  alt: str

  def _repr_png_(self) -> bytes:
    return self.png

  def __repr__(self) -> str:
    return self.alt


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


def picture(draw: Callable[..., None], *args: Any, height: float, alt: str, width: float = 7.0, **settings: Any) -> Picture:
  """Draws a figure and returns it as a picture.

  Args:
    draw: Function `(figure, *args, **settings)` that draws on an empty figure.
    *args: Positional arguments of `draw`.
    height: Height in inches.
    alt: Description of the picture.
    width: Width in inches.
    **settings: Keyword arguments of `draw`.
  """
  with new_figure(height=height, width=width) as figure:
    draw(figure, *args, **settings)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
  return Picture(_small(file.getvalue()), alt)


def _small(png: bytes) -> bytes:
  """Reduces a picture to at most 256 colours.

  The result has a third of the bytes and contains no date or version.
  """
  from PIL import Image  # Comes with matplotlib.

  file = io.BytesIO()
  image = Image.open(io.BytesIO(png)).convert("RGB")
  image.quantize(256, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
  return file.getvalue()


def from_file(path: pathlib.Path, alt: str) -> Picture:
  """Reads a picture from a file."""
  return Picture(_small(path.read_bytes()), alt)
