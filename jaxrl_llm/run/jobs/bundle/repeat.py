"""The updates of a bundle, taken once more: as they were, with other settings, or of a part."""

import math
from collections.abc import Collection

import jax
import numpy as np

from jaxrl_llm.messages import UsageError
from jaxrl_llm.run.jobs.bundle.capture import stack
from jaxrl_llm.run.jobs.bundle.contents import digest
from jaxrl_llm.run.jobs.bundle.opened import OpenBundle, placed
from jaxrl_llm.types import TrainState
from jaxrl_llm.workdir.summary import to_floats

SHOWN = ("actor/loss", "actor/grad_norm", "actor/ppo_kl", "actor/entropy", "actor/lr")


def kept(opened: OpenBundle, number: int, responses: Collection[int]) -> np.ndarray:
  """Returns an array like the mask of a batch, 1 at the tokens of some responses of the step."""
  segments = opened.batches[number].segments
  own = np.zeros(segments.shape, np.float32)
  for x in opened.responses:
    if x["response"] in responses and x["place"] is not None and x["place"][0] == number:
      _, row, segment = x["place"]
      own[row] = np.where(segments[row] == segment, 1, own[row])
  return own


def chosen(
  opened: OpenBundle, *, drop: Collection[int] = (), groups: Collection[int] = (), responses: Collection[int] = ()
) -> set[int] | None:
  """Returns the responses whose loss counts; None if all do.

  Args:
    opened: The bundle.
    drop: Groups that are left out.
    groups: Groups that are kept; none for all.
    responses: Responses that are kept; none for all.

  Raises:
    UsageError: If the step has no such group or response, or no update was made of it.
  """
  if not (drop or groups or responses):
    return None
  asked = ("--drop_group", "group", drop), ("--only_group", "group", groups), ("--only_response", "response", responses)
  for flag, field, numbers in asked:
    there = {x[field] for x in opened.responses if x["place"] is not None}
    if missing := sorted(set(numbers) - there):
      raise UsageError(f"{flag}: found {missing[0]}, expected a {field} that an update was made of: {_ranges(there)}")
  keep = lambda x: x["group"] not in drop and (not groups or x["group"] in groups) and (not responses or x["response"] in responses)
  return {x["response"] for x in opened.responses if keep(x)}


def _ranges(numbers: Collection[int]) -> str:
  numbers = sorted(numbers)
  return ", ".join(map(str, numbers)) if len(numbers) <= 10 else f"{len(numbers)} from {numbers[0]} to {numbers[-1]}"


def update(
  opened: OpenBundle, state: TrainState, number: int, responses: Collection[int] | None = None
) -> tuple[TrainState, dict[str, float]]:
  """Takes one update; the state is donated.

  Args:
    opened: The bundle.
    state: State before the update.
    number: Number of the update, from 0.
    responses: Responses whose loss counts, with the weights that they have among all; None for all.
  """
  batch, step = opened.batches[number], opened.programs.rl_step
  if responses is not None:
    batch, step = batch._replace(kept=kept(opened, number, responses)), step.jitted
  state, metrics = step(state, placed(opened, batch))
  return state, to_floats(metrics)


def before(opened: OpenBundle, number: int) -> OpenBundle:
  """Returns a bundle whose next update is another one, from 0. The updates before it are taken.

  Raises:
    UsageError: If the step has no such update.
  """
  if not 0 <= number < len(opened.batches):
    raise UsageError(f"--update: found {number + 1}, expected 1 to {len(opened.batches)}, the number of updates of the step")
  state = opened.state
  for earlier in range(number):
    state, _ = update(opened, state, earlier)
  return opened._replace(state=state, update=number)


def repeat(opened: OpenBundle, responses: Collection[int] | None = None) -> tuple[list[dict[str, float]], TrainState]:
  """Takes all updates of a bundle. Returns the metrics of each, and the state after them."""
  state, updates = opened.state, []
  for number in range(len(opened.batches)):
    state, metrics = update(opened, state, number, responses)
    updates.append(metrics)
  return updates, state


def verdict(opened: OpenBundle, updates: list[dict[str, float]], state: TrainState) -> tuple[bool, list[str]]:
  """Compares a repetition with what came out in the run.

  Returns:
    Whether all is equal in every bit, and lines that say so, or name the largest difference of each
    metric and what differs in the stack.
  """
  recorded = opened.about["updates"]
  names = sorted(set().union(*recorded) & set().union(*updates))
  alone = sorted(set().union(*recorded) ^ set().union(*updates))
  same_weights = digest(jax.device_get(state.params)) == opened.about["weights_after"]
  differing = {name: worst for name in names if (worst := _largest_difference(name, recorded, updates)) is not None}
  if same_weights and not differing and not alone:
    return True, [f"equal in every bit: {len(names)} metrics of {len(updates)} updates, and the weights after them"]
  of_weights = "the weights after the updates are equal" if same_weights else "the weights after the updates differ"
  lines = [f"{len(differing)} of {len(names)} metrics differ, and {of_weights}; the largest difference of each, in any update:"]
  ordered = sorted(differing.items(), key=lambda item: -item[1][0])
  lines += [f"  {name:34} {was:14.8g} -> {now:14.8g}  (update {number + 1})" for name, (_, number, was, now) in ordered]
  if alone:
    lines.append(f"in one of the two only: {', '.join(alone)}")
  before, now = opened.about["stack"], stack()
  if other := [name for name in now if before.get(name) != now[name]]:
    lines.append(f"the stack differs from that of the run: {', '.join(other)}")
  return False, lines


def _largest_difference(name: str, recorded: list[dict], updates: list[dict]) -> tuple[float, int, float, float] | None:
  worst = None
  for number, (was, now) in enumerate(zip(recorded, updates, strict=True)):
    a, b = (float(x.get(name, math.nan)) for x in (was, now))
    if a == b or (math.isnan(a) and math.isnan(b)):
      continue
    scale = max(abs(a), abs(b))
    size = abs(a - b) / scale if math.isfinite(a) and math.isfinite(b) else math.inf
    if worst is None or size > worst[0]:
      worst = size, number, a, b
  return worst


def table(recorded: list[dict[str, float]], updates: list[dict[str, float]]) -> list[str]:
  """Returns lines with the main metrics of each update, as they were and as they are."""
  names = [name for name in SHOWN if any(name in x for x in updates)]
  lines = ["update  " + "".join(f"{name:>18}" for name in names)]
  for number, (was, now) in enumerate(zip(recorded, updates, strict=True), 1):
    for label, own in (("was", was), ("is", now)):
      lines.append(f"{number:2} {label:4} " + "".join(f"{own.get(name, math.nan):18.8g}" for name in names))
  return lines
