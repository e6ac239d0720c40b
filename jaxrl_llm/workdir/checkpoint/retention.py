"""Which checkpoints stay on disk: the newest, the best, and one for each stretch of time."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Save(NamedTuple):
  """What is known of a checkpoint, from its manifest.

  Attributes:
    step: its number.
    time: when it was saved, in seconds since 1970.
    accuracy: held-out accuracy at that step; None where it was not measured then.
    temporary: made because time had passed; the next one that is not replaces it.
  """

  step: int
  time: float
  accuracy: float | None = None
  temporary: bool = False


def kept(saves: Sequence[Save], *, newest: int, best: int = 0, every_hours: float | None = None) -> set[int]:
  """Numbers of the checkpoints that stay. The newest of all does in any case.

  Nothing but the checkpoints that are there is looked at, so it may be asked again after every deletion: what stays now is not what a
  deletion has made different.

  Args:
    saves: all that are whole, in any order.
    newest: how many of the newest stay; temporary ones do not count.
    best: how many of those with the highest accuracy stay; of equal ones the newer.
    every_hours: one stays for good for each such stretch of time: the first, and each that is so much later than the last that stays
      for this reason. None keeps none.

  Example:
    >>> saves = [Save(10, 0, 0.5), Save(20, 3600, 0.9), Save(30, 7200, 0.7), Save(35, 9000, temporary=True), Save(40, 10800, 0.8)]
    >>> sorted(kept(saves, newest=1)), sorted(kept(saves, newest=1, best=2)), sorted(kept(saves, newest=1, every_hours=2.0))
    ([40], [20, 40], [10, 30, 40])
    >>> sorted(kept(saves[:4], newest=2))
    [20, 30, 35]
  """
  ordered = sorted(saves)
  regular = [save for save in ordered if not save.temporary]
  stay = ordered[-1:] + regular[len(regular) - min(newest, len(regular)) :]
  measured = [save for save in regular if save.accuracy is not None and math.isfinite(save.accuracy)]
  stay += sorted(measured, key=lambda save: (save.accuracy, save.step), reverse=True)[:best]
  if every_hours is not None:
    last = -math.inf
    for save in regular:
      if save.time - last >= 3600 * every_hours:
        stay.append(save)
        last = save.time
  return {save.step for save in stay}
