"""The table of an update's parts, and the update without some of them."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.devices.mesh import num_row_shards
from jaxrl_llm.learner.needs import needed_by_logprobs
from jaxrl_llm.learner.programs import rows_at_once
from jaxrl_llm.messages import UsageError, shown
from jaxrl_llm.run.jobs.blame.shares import Shares, decompose
from jaxrl_llm.run.jobs.bundle import repeat
from jaxrl_llm.run.jobs.bundle.opened import OpenBundle, placed

ORDERS = {
  "share": lambda shares: -np.abs(shares.shares),
  "against": lambda shares: shares.agreement,
  "norm": lambda shares: -shares.squares,
  "loss": lambda shares: -np.abs(shares.losses),
}
"""Sort keys by name: the first part has the smallest, and a part without one comes last."""

_WIDTH = 48


class Blamed(NamedTuple):
  """An update of a bundle, taken apart.

  Attributes:
    shares: Loss and gradient of each part.
    parts: Responses of each part.
    by: "group" or "response".
    order: Numbers of the parts, in the order of the table.
    left_out: Number of responses that the update was not made of.
  """

  shares: Shares
  parts: list[list[dict[str, Any]]]
  by: str
  order: list[int]
  left_out: int


def blame(opened: OpenBundle, *, by: str, order: str) -> Blamed:
  """Takes the next update of a bundle apart.

  Args:
    opened: The bundle.
    by: "group" or "response".
    order: Key of `ORDERS`.
  """
  parts: dict[int, list[dict[str, Any]]] = {}
  for x in opened.taken:
    parts.setdefault(x[by], []).append(x)
  programs, mesh = opened.programs, opened.mesh
  shares = decompose(
    programs.losses, opened.state.params, opened.batches[opened.update], [[tuple(x["place"][1:]) for x in part] for part in parts.values()],
    trainable=programs.trainable,
    at_once=rows_at_once(opened.config, mesh) or num_row_shards(mesh),
    place=partial(placed, opened),
  )  # fmt: skip
  keys = ORDERS[order](shares)
  ordered = sorted(range(len(keys)), key=lambda i: (math.isnan(keys[i]), keys[i]))
  left_out = sum(x["place"] is None for x in opened.responses)
  return Blamed(shares, list(parts.values()), by, ordered, left_out)


def lines_of(opened: OpenBundle, blamed: Blamed, *, most: int, group: int | None = None) -> list[str]:
  """Returns the table of the parts, and a line of their sums."""
  shares, about = blamed.shares, opened.about
  norm, recorded = math.sqrt(shares.total), about["updates"][opened.update].get("actor/grad_norm", math.nan)
  head = f"update {opened.update + 1} of RL step {about['step']} of {about['run']}: loss {np.sum(shares.losses):.6g}"
  lines = [f"{head}, gradient norm {norm:.6g} (in the run {recorded:.6g}), {counted(blamed)}"]
  lines.append(f"{blamed.by:>8} {'share':>9} {'agreement':>9} {'norm':>9} {'loss':>11}  {'rewards':24} {'advantages':24} prompt")
  order = [i for i in blamed.order if group is None or blamed.parts[i][0]["group"] == group]
  for i in order[:most]:
    part = blamed.parts[i]
    numbers = f"{number(shares.shares[i], 9)} {number(shares.agreement[i], 9)} {math.sqrt(shares.squares[i]):9.4g} {shares.losses[i]:11.4g}"
    rewards, advantages = (_listed([x[name] for x in part]) for name in ("reward", "advantage"))
    lines.append(f"{part[0][blamed.by]:8} {numbers}  {rewards:24} {advantages:24} {shown(part[0].get('prompt'), limit=_WIDTH)}")
  more = f", {len(order) - most} more are not shown" if len(order) > most else ""
  sums = f"{number(np.sum(shares.shares), 9)} {'':9} {'':9} {np.sum(shares.losses):11.4g}"
  lines.append(f"{'sum':>8} {sums}  of all {len(blamed.parts)}{more}")
  if blamed.left_out:
    lines.append(f"{blamed.left_out} responses without an advantage are in no update (learner.skip_zero_advantages)")
  return lines


def counted(blamed: Blamed) -> str:
  """Returns the number of parts in words."""
  return f"{len(blamed.parts)} {blamed.by}" + "s" * (len(blamed.parts) != 1)


def number(value: float, width: int = 0) -> str:
  """Returns a share or a cosine as text, and "-" for one that is not defined.

  Example:
    >>> number(0.25), number(math.nan, 9)
    ('0.2500', '        -')
  """
  return f"{'-' if math.isnan(value) else f'{value:.4f}':>{width}}"


def _listed(numbers: Sequence[float]) -> str:
  text = " ".join(f"{x:.3g}" for x in numbers)
  return text if len(text) <= 24 else f"{text[:21].rpartition(' ')[0]} ..."


def of_tokens(opened: OpenBundle, blamed: Blamed, response: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns loss, share of the response's |loss|, and advantage of each of its tokens."""
  (_, row, segment), batch = response["place"], opened.batches[opened.update]
  slots = np.flatnonzero(batch.segments[row] == segment)[-len(response["tokens"]) :]
  losses = blamed.shares.tokens[row][slots].astype(np.float64)
  whole = np.sum(np.abs(losses))
  return losses, np.abs(losses) / whole if whole else np.zeros(len(losses)), batch.advantages[row][slots]


def token_lines(opened: OpenBundle, blamed: Blamed, response: int) -> list[str]:
  """Returns a table of a response's tokens, with the largest loss first.

  Raises:
    UsageError: If the update is not made of that response.
  """
  there = {x["response"]: x for part in blamed.parts for x in part}
  if response not in there:
    raise UsageError(f"--response: found {response}, expected one of update {opened.update + 1}: {', '.join(map(str, sorted(there)))}")
  x = there[response]
  losses, shares, advantages = of_tokens(opened, blamed, x)
  lines = [f"response {response} of group {x['group']}, reward {x['reward']:.3g}: {shown(x['text'], limit=2 * _WIDTH)}"]
  lines.append(f"{'token':>6} {'loss':>11} {'of |loss|':>9} {'advantage':>9}  text")
  for i in np.argsort(-np.abs(losses), kind="stable"):
    lines.append(f"{i:6} {losses[i]:11.4g} {shares[i]:9.1%} {advantages[i]:9.3g}  {x['tokens'][i]!r}")
  return [*lines, f"{'sum':>6} {np.sum(losses):11.4g}"]


def changes(opened: OpenBundle, left_out: Sequence[dict[str, Any]] = ()) -> tuple[float, float]:
  """Returns by how much the next update changes the log-probability of its own responses, in nats.

  Args:
    opened: The bundle.
    left_out: Responses whose loss does not count.

  Returns:
    Means over the responses with a positive advantage, and over those with a negative one; NaN if
    there are none.
  """
  there = opened.taken
  gone = {x["response"] for x in left_out}
  responses = {x["response"] for x in there} - gone if gone else None
  state, _ = repeat.update(opened, jax.tree.map(jnp.copy, opened.state), opened.update, responses)
  batch = opened.batches[opened.update]
  read = needed_by_logprobs(batch._replace(routing=batch.routing if opened.config.moe.replay == "R3" else None))
  before, after = (np.asarray(opened.programs.logprobs(x.params, placed(opened, read)).logprobs) for x in (opened.state, state))
  moved = np.where(batch.mask > 0, after.astype(np.float64) - before, 0)
  of = lambda x: np.sum(moved[x["place"][1]], where=batch.segments[x["place"][1]] == x["place"][2])
  signs = [[of(x) for x in there if sign * x["advantage"] > 0] for sign in (1, -1)]
  return tuple(float(np.mean(x)) if x else math.nan for x in signs)


def change_lines(opened: OpenBundle, blamed: Blamed, count: int) -> list[str]:
  """Returns a table of the update as it is, and without each of the first parts of the table."""
  lines = ["mean change of the log-probability of a response by the update, in nats:"]
  lines.append(f"{'':24} {'advantage > 0':>14} {'advantage < 0':>14}")
  cases = [("with all", [])] + [(f"without {blamed.by} {blamed.parts[i][0][blamed.by]}", blamed.parts[i]) for i in blamed.order[:count]]
  for name, left_out in cases:
    up, down = changes(opened, left_out)
    lines.append(f"{name:24} {up:14.4g} {down:14.4g}")
  return lines
