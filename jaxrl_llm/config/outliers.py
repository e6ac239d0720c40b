"""Texts that are left out when sizes follow from the data, because all others would pay for them.

Every row of a program has room for the longest text. One question of 100,000 characters among short
ones would make each update thousands of times as large.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.config.sizes import CHEAP, Bounds, Lengths

FACTOR = 4
"""A text is left out if it needs more than so many times the room of most others."""

_MOST = 0.95
_MOST_OF_SPLIT = 0.75


class SizeLimits(NamedTuple):
  """Sizes above which problems are left out; None where there is no limit.

  Attributes:
    prompt: Tokens of a prompt.
    demonstration: Tokens of a demonstration with its prompt.
    pictures: Pictures of a prompt.
  """

  prompt: int | None = None
  demonstration: int | None = None
  pictures: int | None = None


NO_LIMITS = SizeLimits()


def find_limits(config: ConfigDict, lengths: Lengths, bounds: Bounds) -> SizeLimits:
  """Returns the sizes above which problems are left out.

  A prompt is left out if it needs, with a response, more than four times the room of 95 % of the
  problems (and of three quarters of each split, so that no split vanishes), and more than a row as
  long as the model is wide. The same holds for the number of pictures, and for demonstrations that
  are shown as solved problems. Demonstrations of a warm start are left out if they do not fit
  behind the longest prompt, unless more than 5 % do not fit. Sizes that the config sets leave out
  nothing here.

  Args:
    config: Config of the run, before sizes are chosen.
    lengths: Lengths of the task's texts.
    bounds: Constraints of the devices and the model.

  Example:
    >>> from jaxrl_llm.config.fields import base
    >>> lengths = Lengths([20] * 129 + [50_000], [20])
    >>> find_limits(base(), lengths, Bounds(d_model=64)).prompt
    176
  """
  budget, prompt, demonstration, pictures = config.rollout.max_new_tokens, None, None, None
  if config.rollout.prompt_buckets is None:
    cheap = max(bounds.d_model, CHEAP)
    prompt = _limit([lengths.prompts, lengths.held_out], beside=budget, cheap=cheap)
    kept = [n for n in (*lengths.prompts, *lengths.held_out) if prompt is None or n <= prompt]
    room = max(kept, default=0) + budget
    shown = _behind_kept(lengths, prompt)
    if not config.warm_start.num_steps:
      demonstration = _limit([shown], cheap=cheap)
    elif 0 < sum(n > room for n in shown) <= (1 - _MOST) * len(shown):
      demonstration = room
  if config.rollout.prompt_images is None:
    pictures = _limit([[count for _, count, _ in lengths.pictures]])
  return SizeLimits(prompt, demonstration, pictures)


def describe_limits(limits: SizeLimits, lengths: Lengths) -> list[str]:
  """Describes what is left out and how to keep it, one line for each kind.

  Args:
    limits: Result of `find_limits`.
    lengths: Lengths of all texts, those left out included.
  """
  rule, lines = f"more than {FACTOR} times the room of {_MOST:.0%} of the problems", []
  if limits.prompt is not None:
    prompts = [*lengths.prompts, *lengths.held_out]
    lines.append(
      f"  {sum(n > limits.prompt for n in prompts)} problem(s) with prompts above {limits.prompt} tokens are left out, which need {rule}; "
      f"to keep them: --config.rollout.prompt_buckets='({max(prompts)},)'"
    )
  if limits.pictures is not None:
    most = max(count for _, count, _ in lengths.pictures)
    lines.append(
      f"  problems with more than {limits.pictures} picture(s) are left out, which need {rule}; to keep them: "
      f"--config.rollout.prompt_images={most}"
    )
  if limits.demonstration is not None:
    longer = sum(n > limits.demonstration for n in _behind_kept(lengths, limits.prompt))
    lines.append(
      f"  {longer} demonstration(s) above {limits.demonstration} tokens with their prompts are left out; to keep them, set "
      "rollout.prompt_buckets, and rollout.max_new_tokens to the longest"
    )
  return lines


def _behind_kept(lengths: Lengths, limit: int | None) -> list[int]:
  """Returns the lengths of the demonstrations whose prompts are kept."""
  return [n for n, prompt in zip(lengths.demonstrations, lengths.demonstrated, strict=True) if limit is None or prompt <= limit]


def _limit(splits: Sequence[Sequence[int]], *, beside: int = 0, cheap: int = 0) -> int | None:
  """Returns the largest size of a problem of some splits that is kept; None if all are.

  Every problem needs the room `beside` as well, and the room `cheap` costs little in any case.
  """
  splits = [split for split in splits if len(split)]
  if not splits:
    return None
  everything = np.concatenate(splits)
  quantile = lambda sizes, share: int(np.quantile(sizes, share, method="inverted_cdf"))
  usual = max(quantile(everything, _MOST), *(quantile(split, _MOST_OF_SPLIT) for split in splits))
  limit = max(FACTOR * (usual + beside), cheap) - beside
  return limit if everything.max() > limit else None
