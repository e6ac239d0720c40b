"""Sizes of compiled programs that a config leaves open, chosen from the lengths of the data."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.config.fields import flatten

SIZES = ("rollout.prompt_buckets", "learner.row_tokens", "learner.row_buckets", "warm_start.row_buckets")
"""Fields that `choose_sizes` fills in if they are None."""

IMAGE_SIZES = ("model.image_tokens", "rollout.prompt_images", "learner.row_images")
"""Fields that `choose_sizes` fills in for prompts with pictures if they are None."""

TEACHER_SIZES = ("teacher.row_tokens", "teacher.row_buckets")
"""Fields that `choose_sizes` fills in for a teacher with a prompt of its own if they are None."""

BY_MEMORY = ("rollout.slots", "model.remat")
"""Fields that `learner.memory.fitted` chooses, by the memory of the devices."""

_SLOTS_STEP = 8
CHEAP = 128  # Slots of a row whose attention costs little in any model.
_STRETCH = 1.25  # Factor by which a row may exceed its cheap length if it then holds a whole group.
_ROWS_FOR_CHOICE = 8  # Fewer rows leave the smaller buckets nothing to save.
_MANY_SLOTS = 2**20  # The padding of such updates costs a run more than two further programs.


class Lengths(NamedTuple):
  """Lengths of a task's texts, in tokens.

  Attributes:
    prompts: Length of each prompt of the training problems.
    held_out: Length of each prompt of the test problems.
    demonstrations: Length of each demonstration with its prompt and its end token; empty without a
      warm start.
    pictures: Length of each prompt that shows pictures, number of its pictures, and image tokens of
      the largest of them; empty without any.
    privileged: Length of each training problem's prompt for the teacher; empty unless it has its
      own.
    demonstrated: Length of the prompt of each demonstration.
  """

  prompts: Sequence[int]
  held_out: Sequence[int] = ()
  demonstrations: Sequence[int] = ()
  pictures: Sequence[tuple[int, int, int]] = ()
  privileged: Sequence[int] = ()
  demonstrated: Sequence[int] = ()


class Bounds(NamedTuple):
  """Constraints of the devices and the model on the sizes.

  Attributes:
    shards: Number of shards of the rows of an update.
    context: Number of shards of the slots of a row.
    d_model: Width of the model's states.
    tile: Number of slots that a longer row is a multiple of.
    max_positions: Number of positions of the model; None for any.
  """

  shards: int = 1
  context: int = 1
  d_model: int = 512
  tile: int = 16
  max_positions: int | None = None


def choose_sizes(config: ConfigDict, lengths: Lengths, bounds: Bounds) -> ConfigDict:
  """Returns a config in which every size of `SIZES` is set; those that are set stay as they are.

  * A bucket of prompts holds the longest prompt; a second one of half the width is added if at
    least half of all batches fit into it.
  * A row holds the longest sequence. It is longer if several sequences, with a shared prompt where
    prompts are shared, fit into a row as long as the model is wide: up to there, the attention of a
    row costs little beside its products, and longer rows waste fewer slots.
  * The largest bucket of rows holds every possible mini-batch (`most_rows`). The smaller ones, of
    two thirds, four ninths and two ninths, hold those whose responses are shorter than their
    budget. One of a ninth is added if responses without an advantage are skipped. A mini-batch of
    a million slots or more has finer buckets: 1/8, 1/4, 3/8, 1/2 and 3/4. Each bucket costs a
    compiled program.
  * A prompt has room for the largest number of pictures, each with the tokens of the largest. A row
    has room for the pictures of sequences of the greatest length, and for more if their image
    tokens are no more than its slots.
  * A teacher with a prompt of its own has rows as an update with such prompts would have them, in
    at most two numbers.
  * A warm start has a bucket for the largest possible batch of its demonstrations, and one for a
    usual batch if that is clearly smaller.

  The same config, data and devices give the same sizes, so a resumed run has those that it began
  with.

  Args:
    config: Config whose fields are legal by themselves.
    lengths: Lengths of the task's texts.
    bounds: Constraints of the devices and the model.

  Example:
    >>> from jaxrl_llm.config.fields import base
    >>> config = choose_sizes(base(), Lengths([12, 30, 21], [33], [40, 60]), Bounds())
    >>> config.rollout.prompt_buckets, config.learner.row_tokens, config.learner.row_buckets
    ((40,), 512, (4, 8, 11, 16))
  """
  config = config.copy_and_resolve_references()
  with config.unlocked():
    rollout, learner, warm = config.rollout, config.learner, config.warm_start
    if rollout.prompt_buckets is None:
      rollout.prompt_buckets = prompt_buckets(lengths, config, bounds)
    # An update that compares both models on the same rows has room for the longer of the prompts.
    of_update = config
    if lengths.privileged and config.teacher.gkd_coef:
      of_update = with_prompts_of(config, max(*lengths.privileged, *rollout.prompt_buckets), learner.row_tokens)
    if learner.row_tokens is None:
      learner.row_tokens = of_update.learner.row_tokens = row_tokens(of_update, bounds)
    if lengths.pictures:
      prompts, counts, tokens = (np.asarray(x) for x in zip(*lengths.pictures, strict=True))
      config.model.image_tokens = config.model.image_tokens or int(tokens.max())
      rollout.prompt_images = rollout.prompt_images or int(counts.max())
      # No row can show more, with at least one token of a response.
      most = max(int(np.max(learner.row_tokens * counts // (prompts + 1))), 1)
      longest = max(rollout.prompt_buckets) + rollout.max_new_tokens
      enough = max(learner.row_tokens // config.model.image_tokens, learner.row_tokens // longest * rollout.prompt_images)
      learner.row_images = learner.row_images or max(min(most, enough), rollout.prompt_images)
    longest, parts = max(of_update.rollout.prompt_buckets) + rollout.max_new_tokens, bounds.shards * (learner.rows_per_device or 1)
    if learner.row_tokens < longest:
      return config.lock()  # `check.size_problems` refuses it.
    if learner.row_buckets is None:
      most = most_rows(of_update)
      shares = (1, 2 / 3, 4 / 9, 2 / 9, 1 / 9) if learner.skip_zero_advantages else (1, 2 / 3, 4 / 9, 2 / 9)
      if most * learner.row_tokens >= _MANY_SLOTS:
        shares = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8)
      learner.row_buckets = multiples([most * share for share in shares], parts)
    if lengths.privileged or (config.teacher.privileged is not None and config.teacher.row_tokens is not None):
      config.teacher.row_tokens, config.teacher.row_buckets = teacher_rows(config, lengths, bounds)
    if warm.row_buckets is None and warm.num_steps:
      shown, batch = np.asarray(lengths.demonstrations), warm.batch_size
      most = -(-batch // per_row(config, min(int(shown.max()), longest)))
      # Two standard deviations above the mean, and a tenth for the ends of rows.
      usual = 1.1 * (batch * shown.mean() + 2 * batch**0.5 * shown.std()) / learner.row_tokens
      warm.row_buckets = multiples((most, usual if usual < 0.75 * most else most), parts)
  return config.lock()


def teacher_rows(config: ConfigDict, lengths: Lengths, bounds: Bounds) -> tuple[int, tuple[int, ...] | None]:
  """Returns the slots of a row of a teacher with prompts of its own, and the numbers of rows.

  Those that the config sets stay as they are. The numbers are None if no row holds a sequence.
  """
  # Without data, rows are taken to hold the longest sequence.
  longest = max(lengths.privileged, default=max((config.teacher.row_tokens or 0) - config.rollout.max_new_tokens, 1))
  other = with_prompts_of(config, longest, config.teacher.row_tokens)
  if other.learner.row_tokens is None:
    other.learner.row_tokens = row_tokens(other, bounds)
  buckets = config.teacher.row_buckets
  if buckets is None and other.learner.row_tokens >= longest + config.rollout.max_new_tokens:
    most, parts = most_rows(other), bounds.shards * (config.learner.rows_per_device or 1)
    buckets = multiples([most, most * 2 / 3], parts)
  return other.learner.row_tokens, buckets


def with_prompts_of(config: ConfigDict, longest: int, row_tokens: int | None) -> ConfigDict:
  """Returns a config whose learner has other prompts and rows, such as a teacher's.

  Args:
    config: Config of the run.
    longest: Number of tokens of the longest prompt.
    row_tokens: Number of slots of a row.
  """
  other = ConfigDict(config.to_dict())
  other.rollout.prompt_buckets, other.learner.row_tokens = (longest,), row_tokens
  return other


def open_sizes(config: ConfigDict) -> list[str]:
  """Returns the sizes that a run of a config would leave to `choose_sizes`.

  Example:
    >>> from jaxrl_llm.config.fields import base
    >>> open_sizes(base())
    ['rollout.prompt_buckets', 'learner.row_tokens', 'learner.row_buckets',
    'warm_start.row_buckets']
  """
  values = flatten(config)
  return [path for path in SIZES if values[path] is None and (config.warm_start.num_steps or not path.startswith("warm_start."))]


def describe_sizes(asked: ConfigDict, config: ConfigDict, lengths: Lengths) -> list[str]:
  """Describes what was chosen, one per line, as overrides of the command line.

  Args:
    asked: Config before `choose_sizes`, and before a choice by the memory of the devices.
    config: Config after it.
    lengths: Lengths of the task's texts.
  """
  before, after = flatten(asked), flatten(config)
  changed = lambda paths: [
    f"  --config.{path}={str(after[path]).replace(' ', '')}" for path in paths if before.get(path) != after.get(path)
  ]
  of_memory, lines = changed(BY_MEMORY), changed((*SIZES, *IMAGE_SIZES, *TEACHER_SIZES))
  of_memory = ["chosen for the memory of the devices:", *of_memory] if of_memory else []
  if not lines:
    return of_memory
  prompts = np.concatenate([lengths.prompts, lengths.held_out])
  facts = f"prompts have {int(prompts.min())} to {int(prompts.max())} tokens, responses up to {config.rollout.max_new_tokens}"
  lines = [f"sizes chosen from the data ({facts}):", *lines]
  usual = int(np.quantile(prompts, 0.99))
  if before["rollout.prompt_buckets"] is None and prompts.max() > 2 * usual:
    width = _up(usual, _SLOTS_STEP)
    lines.append(
      f"  1 % of the prompts are longer than {usual} tokens: --config.rollout.prompt_buckets='({width},)' leaves out "
      f"those above {width} and saves memory and time"
    )
  if lengths.pictures and before["rollout.prompt_images"] is None:
    counts = [count for _, count, _ in lengths.pictures]
    usual = int(np.quantile(counts, 0.95, method="higher"))
    if max(counts) > 2 * usual:
      lines.append(
        f"  at most 5 % of the prompts show more than {usual} picture(s): --config.rollout.prompt_images={usual} leaves "
        "those out and saves memory"
      )
  return lines + of_memory


def prompt_buckets(lengths: Lengths, config: ConfigDict, bounds: Bounds) -> tuple[int, ...]:
  """Returns the prompt slots that programs are compiled for."""
  longest, num_prompts = max([*lengths.prompts, *lengths.held_out, 1]), config.rollout.num_prompts
  widest = _up(longest, _SLOTS_STEP)
  if bounds.max_positions is not None:
    widest = max(min(widest, bounds.max_positions - config.rollout.max_new_tokens), longest)
  half = _up(widest / 2, _SLOTS_STEP)
  # Quantile of the lengths up to which every other batch of `num_prompts` prompts fits.
  usual = np.quantile(lengths.prompts, 0.5 ** (1 / num_prompts)) if len(lengths.prompts) else widest
  return (half, widest) if usual <= half < widest else (widest,)


def row_tokens(config: ConfigDict, bounds: Bounds) -> int:
  """Returns the number of slots of a row, for a config whose prompt buckets are set."""
  prompt, response = max(config.rollout.prompt_buckets), config.rollout.max_new_tokens
  groups, unit = _groups(config), _unit(config)
  slots = groups * (unit if config.learner.share_prompts else unit * config.rollout.group_size)
  useful = slots // (_ROWS_FOR_CHOICE * bounds.shards * (config.learner.rows_per_device or 1))
  cheap = max(bounds.d_model, CHEAP)
  # A group that just exceeds its row would leave the next one half empty.
  if cheap < unit <= _STRETCH * cheap:
    cheap = unit
  slots_needed = max(prompt + response, min(cheap, max(unit, useful)))
  return _up(slots_needed, bounds.context * (bounds.tile if slots_needed > bounds.tile else 1))


def most_rows(config: ConfigDict) -> int:
  """Returns the number of rows that every mini-batch of whole groups fits into.

  `packing.arrange` needs no more, for all lengths: first fit opens a row only if no open one
  has room for the largest of what it packs. Shared prompts are packed only if that takes no more
  rows.

  Args:
    config: Config whose prompt buckets and row length are set, to at least the longest sequence.
  """
  rollout, slots = config.rollout, config.learner.row_tokens
  prompt, response = max(rollout.prompt_buckets), rollout.max_new_tokens
  groups, unit = _groups(config), _unit(config)
  alone = -(-groups * rollout.group_size // per_row(config, prompt + response))
  if not config.learner.share_prompts:
    return alone
  # Rows of several groups, or several rows of a group, each with a copy of the prompt.
  shared = -(-groups // per_row(config, unit)) if unit <= slots else groups * -(-rollout.group_size // ((slots - prompt) // response))
  return min(alone, shared)


def per_row(config: ConfigDict, tokens: int) -> int:
  """Returns how many prompts with `tokens` tokens, responses included, every row has room for."""
  most = config.learner.row_tokens // tokens
  pictures = config.learner.row_images, config.rollout.prompt_images
  return min(most, max(pictures[0] // pictures[1], 1)) if all(pictures) else most


def _groups(config: ConfigDict) -> int:
  return -(-config.rollout.num_prompts // config.learner.updates_per_rollout)


def _unit(config: ConfigDict) -> int:
  """Returns the largest number of tokens that are packed as one: a group, or a sequence."""
  prompt, response = max(config.rollout.prompt_buckets), config.rollout.max_new_tokens
  return prompt + response * (config.rollout.group_size if config.learner.share_prompts else 1)


def _up(value: float, step: int) -> int:
  return int(-(-value // step) * step)


def multiples(values: Sequence[float], step: int) -> tuple[int, ...]:
  """Rounds numbers up to multiples, in ascending order, each once.

  Example:
    >>> multiples((9, 8, 3.5), 4)
    (4, 8, 12)
  """
  return tuple(sorted({max(_up(value, step), step) for value in values}))
