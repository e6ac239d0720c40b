"""Taps: what a model computes on its way, for those who compare two programs of it."""

import contextlib
from collections.abc import Callable, Iterator

from jaxtyping import Array

Take = Callable[[str, Array], None]
"""Function called with the name of a value and the value, while a program is traced."""

_takes: list[Take] = []


def tap(name: str, x: Array, features: int = 1) -> Array:
  """Returns a value of a model's tokens, and shows it to the function of `tapped`, if there is one.

  Without one this adds nothing to the program.

  Args:
    name: Name of the value.
    x: Value, with the tokens in its first axes.
    features: Number of its last axes that belong to one token.
  """
  for take in _takes:
    take(name, x.reshape(-1, *x.shape[x.ndim - features :]))
  return x


@contextlib.contextmanager
def tapped(take: Take) -> Iterator[None]:
  """Shows values of all models that are traced in the context to a function.

  Example:
    >>> import jax
    >>> names = []
    >>> with tapped(lambda name, x: names.append((name, x.shape))):
    ...   x = tap("norm", jax.numpy.ones((2, 3, 8)))
    >>> names
    [('norm', (6, 8))]
  """
  _takes.append(take)
  try:
    yield
  finally:
    _takes.remove(take)
