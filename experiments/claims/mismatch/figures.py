"""Figure of the sampler's mismatch (E17), drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablations.plots import new_figure, save
from experiments.claims import drawing
from experiments.claims.mismatch import rules

LABELS = {way: way for way in rules.WAYS}


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws accuracy and entropy during training, one column for each sampler."""
  with new_figure(height=4.2) as figure:
    count = len(rules.SAMPLERS)
    panels = figure.subplots(2, count)
    for index, sampler in enumerate(rules.SAMPLERS):
      trials = [row for row in results["trials"] if row["sampler"] == sampler]
      updates = results["sizes"]["updates"]
      drawing.curves(panels[0, index], trials, "way", LABELS, updates=updates, legend=index == 0)
      drawing.curves(panels[1, index], trials, "way", LABELS, updates=updates, legend=False, name="entropy")
      panels[1, index].set_ylabel("entropy (nats a token)")
      panels[1, index].set_ylim(bottom=0)
      drawing.title(panels[0, index], "abcdefgh"[index], sampler)
      drawing.title(panels[1, index], "abcdefgh"[count + index], sampler)
    save(figure, folder, "mismatch", formats)
