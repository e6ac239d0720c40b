"""A player whose conversations are given."""


class Handing:
  """A `Playing` that hands over parts of a batch."""

  def __init__(self, *parts):
    self._parts = parts

  def __iter__(self):
    return iter(self._parts)

  def wait(self):
    """Has nothing to wait for."""

  def close(self):
    """Has nothing to give up."""
