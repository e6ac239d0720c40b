"""Garbage collection during the steps of a run, which stops all of its threads."""

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def exemption() -> Iterator[Callable[[], None]]:
  """Yields a function that exempts all objects that exist by then, until the context ends.

  Modules and programs are hundreds of thousands of objects that stay for the whole run. Every few
  steps, a full collection would look at all of them.

  Example:
    >>> with exemption() as exempt:
    ...   exempt()
    ...   gc.get_freeze_count() > 0
    True
    >>> gc.get_freeze_count()
    0
  """

  def exempt() -> None:
    gc.collect()
    gc.freeze()

  try:
    yield exempt
  finally:
    gc.unfreeze()
