"""A reward as plain data, so that another process can build it."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class RewardSpec(NamedTuple):
  """What `build` makes a reward function of: it can be pickled, written as JSON and compared, which a function cannot.

  Attributes:
    name: a key of `REWARDS`.
    settings: what that reward takes; plain numbers, text, lists and mappings.
  """

  name: str
  settings: Mapping[str, Any] = {}
