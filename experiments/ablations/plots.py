"""Style of the ablations' figures: the style of `jaxrl_llm.report.figures`."""

from jaxrl_llm.report.figures import BLACK, BLUE, FULL_WIDTH, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, letter, new_figure, save, two_sided

PAPER_WIDTH = FULL_WIDTH

__all__ = [
  "BLACK", "BLUE", "GREEN", "GREY", "ORANGE", "PAPER_WIDTH", "PINK", "SKY", "YELLOW", "letter", "new_figure", "save", "two_sided",
]  # fmt: skip
