"""Rows that the updates of a rollout batch take, for responses of given lengths."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.learner import packing


class Update(NamedTuple):
  """The packed sequences of one update.

  Attributes:
    rows: Number of rows that hold a sequence.
    bucket: Number of rows of the batch, which are all computed.
    used: Number of slots that hold a token.
    slots: Number of slots of the batch.
  """

  rows: int
  bucket: int
  used: int
  slots: int


def updates_of(config: ConfigDict, lengths: np.ndarray, *, prompt_tokens: int | None = None) -> tuple[Update, ...]:
  """Packs the sequences of each update as a run does, by their lengths alone.

  Args:
    config: Checked config with all sizes.
    lengths: Number of tokens of the responses to each prompt, [n G].
    prompt_tokens: Number of tokens of each prompt; None for the largest bucket of prompts, which
      bounds the rows from above.

  Raises:
    ValueError: If an update needs more rows than the largest bucket.
  """
  learner, prompt = config.learner, prompt_tokens or max(config.rollout.prompt_buckets)
  updates = []
  for part in lengths.reshape(learner.updates_per_rollout, -1, lengths.shape[1]).tolist():
    units = _units(part, prompt, pictures=config.rollout.prompt_images or 0, share_prompts=learner.share_prompts)
    rows = packing.fewest_rows(*units, learner.row_tokens, learner.row_images)
    bucket = next((size for size in sorted(learner.row_buckets) if size >= len(rows)), None)
    if bucket is None:
      raise ValueError(
        f"config.learner.row_buckets: found {tuple(learner.row_buckets)}, expected a bucket of at least {len(rows)} for the lengths drawn"
      )
    used = sum(unit.size for row in rows for unit in row)
    updates.append(Update(len(rows), bucket, used, bucket * learner.row_tokens))
  return tuple(updates)


def padding(updates: Sequence[Update]) -> float:
  """Returns the fraction of the slots of some updates that hold padding.

  Example:
    >>> padding([Update(rows=1, bucket=2, used=60, slots=200), Update(rows=2, bucket=2, used=190, slots=200)])
    0.375
  """
  return 1 - sum(update.used for update in updates) / sum(update.slots for update in updates)


def _units(
  groups: Sequence[Sequence[int]], prompt: int, *, pictures: int, share_prompts: bool
) -> tuple[list[packing.Unit], list[packing.Unit] | None]:
  """Returns each response with its prompt, and each group with one prompt if prompts are shared."""
  size = len(groups[0])
  members = [tuple(range(g * size, (g + 1) * size)) for g in range(len(groups))]
  alone = [packing.Unit(0, (i,), (prompt + length,), pictures) for group, own in zip(groups, members) for i, length in zip(own, group)]
  shared = [packing.Unit(prompt, own, tuple(group), pictures) for group, own in zip(groups, members)]
  return alone, shared if share_prompts else None
