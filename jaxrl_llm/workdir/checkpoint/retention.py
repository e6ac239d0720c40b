"""The retention of checkpoints: the newest, the best, and one per interval of time."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Save(NamedTuple):
  """The facts about a checkpoint in its manifest.

  Attributes:
    step: Number of the checkpoint.
    time: Time of the save, in seconds since 1970.
    accuracy: Held-out accuracy at that step; None if it was not measured.
    temporary: Whether only the passing of time caused the save. The next regular checkpoint
      replaces it.
  """

  step: int
  time: float
  accuracy: float | None = None
  temporary: bool = False


def kept(saves: Sequence[Save], *, newest: int, best: int = 0, every_hours: float | None = None) -> set[int]:
  """Selects the checkpoints to keep. Returns their numbers.

  The newest checkpoint of all is always kept. The selection depends only on the present
  checkpoints, so that it can be repeated after every deletion: the deletion of a checkpoint that is
  not kept does not change the selection.

  Args:
    saves: Complete checkpoints, in any order.
    newest: Number of newest checkpoints to keep. Temporary ones do not count.
    best: Number of checkpoints with the highest accuracy to keep. The newer one wins a tie.
    every_hours: Interval of the checkpoints to keep for good: the first one, and each that is at
      least that much later than the last one kept for this reason. None keeps none.

  Example:
    >>> saves = [Save(10, 0, 0.5), Save(20, 3600, 0.9), Save(30, 7200, 0.7)]
    >>> saves += [Save(35, 9000, temporary=True), Save(40, 10800, 0.8)]
    >>> sorted(kept(saves, newest=1)), sorted(kept(saves, newest=1, best=2))
    ([40], [20, 40])
    >>> sorted(kept(saves, newest=1, every_hours=2.0))
    [10, 30, 40]
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
