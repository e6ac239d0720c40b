"""Style of the studies' figures: that of `jaxrl_llm.report.figures`, and what only they draw."""

import pathlib
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.report.figures import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, new_figure, save_as

__all__ = [
  "BLACK", "BLUE", "GREEN", "GREY", "ORANGE", "PINK", "SKY", "YELLOW", "letter", "new_figure", "save", "two_sided",
]  # fmt: skip


def save(figure: Any, folder: pathlib.Path, name: str, formats: Sequence[str]) -> None:
  """Writes a figure once in each format (`figures.FORMATS`)."""
  for suffix in formats:
    save_as(figure, folder / f"{name}.{suffix}")


def letter(axes: Any, label: str, title: str) -> None:
  """Writes the letter and the title of a panel."""
  axes.set_title(rf"$\bf{{{label}}}$  {title}")


def two_sided(below: str, middle: str, above: str) -> Any:
  """Makes a colour map that runs from one colour through a second to a third."""
  from matplotlib.colors import LinearSegmentedColormap

  return LinearSegmentedColormap.from_list("two_sided", [below, middle, above])
