"""The experts that the tokens of the cache visited, kept on the host. Starts no JAX."""

import numpy as np
from jaxtyping import Int16


class Routes:
  """The routes of every column of every row, -1 where none are known.

  Args:
    rows: Number of rows of the cache.
    columns: Number of columns of a row.
    shape: Number of layers and number of experts per token, (L, K).

  Example:
    >>> routes = Routes(rows=2, columns=4, shape=(1, 2))
    >>> routes.write(0, 0, np.array([[[5, 3]], [[1, 0]]], np.int16))
    >>> routes.copy(0, 1, 1)
    >>> routes.read(1, 2).tolist()
    [[[5, 3]], [[-1, -1]]]
  """

  def __init__(self, rows: int, columns: int, shape: tuple[int, int]):
    self._values = np.full((rows, columns, *shape), -1, np.int16)

  def write(self, row: int, start: int, routes: Int16[np.ndarray, "n L K"]) -> None:
    """Notes the routes of tokens from a column on."""
    self._values[row, start : start + len(routes)] = routes

  def copy(self, source: int, target: int, count: int) -> None:
    """Copies the routes of a row's first tokens to another row."""
    self._values[target, :count] = self._values[source, :count]

  def read(self, row: int, count: int) -> Int16[np.ndarray, "n L K"]:
    """Returns the routes of a row's first tokens."""
    return self._values[row, :count].copy()
