"""Groups that a step does not wait for and the next one continues: partial rollouts.

With 3 prompts to learn from and 1 to spare, a step ends when any 3 of the 4 groups in the sampler
are complete:

  step 0:  a ───┤  b ──────────  c ─────┤  d ─┤          learns from a, c, d; b continues
  step 1:  b ──────┤  e ──┤  f ────────  g ────┤         learns from b, e, g; f continues

So no step waits for the longest response, yet none is truncated, dropped or drawn twice. A step
learns from the oldest complete groups and carries all others, complete or not. A carried response
keeps the log-probabilities of the policies that drew its parts, and ratios and corrections use
these. A conversation also keeps its turns. The environment's state is not kept: the next step makes
it again from the turns; see `turns`.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int16, Integer

from jaxrl_llm.rollouts.jobs import Conversation
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason


class Groups(NamedTuple):
  """Prompts, oldest first, with their conversations so far: n groups of G.

  Attributes:
    examples: One task row per prompt.
    conversations: The n·G conversations.
    seeds: Seed of each conversation, which it keeps.
    steps: RL step in which each group was begun.
  """

  examples: list[Mapping[str, Any]]
  conversations: list[Conversation]
  seeds: list[int]
  steps: list[int]


NO_GROUPS = Groups([], [], [], [])
"""What is carried into the first step."""


def join(carried: Groups, examples: Sequence[Mapping[str, Any]], seeds: Sequence[int], *, step: int) -> Groups:
  """Joins the groups carried into a step and, behind them, the new prompts that it begins.

  `seeds` has one for each new conversation.
  """
  new = [Conversation(0, (), (), (), (), (), StopReason.UNFINISHED)] * len(seeds)
  conversations = [conversation._replace(sequence=i) for i, conversation in enumerate([*carried.conversations, *new])]
  return Groups([*carried.examples, *examples], conversations, [*carried.seeds, *seeds], [*carried.steps, *[step] * len(examples)])


def take(groups: Groups, played: Sequence[Conversation], *, num_groups: int) -> tuple[Int[np.ndarray, " m"], Groups]:
  """Separates the groups that a step learns from and those that it carries.

  Args:
    groups: Groups that were played.
    played: Their conversations as they were handed over, in the order of their sequences.
    num_groups: Number of groups that the step learns from.

  Returns:
    The rows to learn from, in whole groups with the oldest first, and the other groups, also oldest
    first.

  Raises:
    ValueError: If fewer than `num_groups` groups are complete.
  """
  reasons = np.array([conversation.reason for conversation in played])
  used, kept, indices = separate(reasons, len(groups.examples), num_groups=num_groups)
  carried = Groups(
    [groups.examples[i] for i in indices],
    [played[i] for i in kept],
    [groups.seeds[i] for i in kept],
    [groups.steps[i] for i in indices],
  )
  return used, carried


def separate(
  reasons: Integer[np.ndarray, " N"], total: int, *, num_groups: int
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " k"], Int[np.ndarray, " g"]]:
  """Returns the rows of the first complete groups, the rows of the others, and these groups.

  Args:
    reasons: Stop reason of each row.
    total: Number of groups of the rows.
    num_groups: Number of groups to learn from.

  Raises:
    ValueError: If fewer than `num_groups` groups are complete.
  """
  rows = np.arange(len(reasons)).reshape(total, -1)
  complete = np.all(reasons[rows] != StopReason.UNFINISHED, axis=1)
  if complete.sum() < num_groups:
    raise ValueError(f"rollouts: found {complete.sum()} complete groups of {total}, expected {num_groups} or more to learn from")
  used = complete & (np.cumsum(complete) <= num_groups)
  return rows[used].reshape(-1), rows[~used].reshape(-1), np.flatnonzero(~used)


def metrics(groups: Groups, played: Sequence[Conversation], rows: Int[np.ndarray, " m"], *, step: int) -> dict[str, float]:
  """Returns metrics of the age of the conversations that a step learns from, and of the cut.

  Args:
    groups: Groups that were played.
    played: Their conversations as they were handed over, in the order of their sequences.
    rows: Rows that `take` returned for them.
    step: Current RL step.
  """
  return age_metrics(groups.steps, rows, len(played) // len(groups.examples), step=step) | {
    "rollout/carried_tokens": sum(len(groups.conversations[i].tokens) for i in rows) / max(sum(len(played[i].tokens) for i in rows), 1),
    "rollout/discarded_tokens": float(sum(conversation.discarded_tokens for conversation in played)),
  }


def age_metrics(steps: Sequence[int], rows: Int[np.ndarray, " m"], group_size: int, *, step: int) -> dict[str, float]:
  """Returns metrics of the age of the groups that a step learns from, in RL steps.

  `steps` has the step in which each group began, and `rows` are those of whole groups.

  Example:
    >>> age_metrics([3, 5, 5], np.array([0, 1, 4, 5]), 2, step=5)
    {'rollout/carried_groups': 1.0, 'rollout/max_age': 2.0}
  """
  ages = step - np.array(steps)[rows[::group_size] // group_size]
  return {"rollout/carried_groups": float(np.sum(ages > 0)), "rollout/max_age": float(ages.max())}


def to_json(groups: Groups) -> dict[str, Any]:
  """Converts groups to lists, for a checkpoint's record; JSON restores every bit."""
  return {
    "examples": [dict(example) for example in groups.examples],
    "talks": [
      {
        "prompt": [int(x) for x in conversation.prompt],
        "tokens": [int(x) for x in conversation.tokens],
        "logprobs": [float(x) for x in conversation.logprobs],
        "written": [int(x) for x in conversation.written],
        "turns": [list(turn) for turn in conversation.turns],
        "reason": int(conversation.reason),
        "failed": conversation.failed,
        "routes": conversation.routes if conversation.routes is None else _to_text(conversation.routes),
        "versions": [int(x) for x in conversation.versions],
        "raw_logprobs": [float(x) for x in conversation.raw_logprobs],
      }
      for conversation in groups.conversations
    ],
    "seeds": [int(seed) for seed in groups.seeds],
    "steps": groups.steps,
  }


def from_json(saved: Mapping[str, Any]) -> Groups:
  """Inverts `to_json`; also reads responses of earlier versions, which had no `talks` or seeds."""
  if "sequences" in saved:
    conversations = [_response(i, **sequence) for i, sequence in enumerate(saved["sequences"])]
    return Groups(list(saved["examples"]), conversations, list(range(len(conversations))), list(saved["steps"]))
  conversations = []
  for i, conversation in enumerate(saved["talks"]):
    ids_of = lambda reply: tuple(reply) if isinstance(reply, list) else reply
    turns = (Turn(text, ids_of(reply), *rest) for text, reply, *rest in conversation["turns"])
    conversations.append(
      Conversation(
        i,
        conversation["prompt"],
        conversation["tokens"],
        conversation["logprobs"],
        [bool(own) for own in conversation["written"]],
        tuple(turns),
        StopReason(conversation["reason"]),
        conversation["failed"] and tuple(conversation["failed"]),
        routes=conversation["routes"] and _from_text(*conversation["routes"]),
        versions=tuple(conversation.get("versions", ())),
        raw_logprobs=tuple(conversation.get("raw_logprobs", ())),
      )
    )
  return Groups(list(saved["examples"]), conversations, list(saved["seeds"]), list(saved["steps"]))


def _response(
  number: int, *, reason: int, tokens: Sequence[int], logprobs: Sequence[float], raw_logprobs: Sequence[float],
  routing: Sequence[Any] | None = None,
) -> Conversation:  # fmt: skip
  """Returns a response of an earlier version, whose routes begin with the prompt's last token."""
  own = dict(raw_logprobs=raw_logprobs, routes=None if routing is None else np.array(routing, np.int16))
  return Conversation(number, (), tokens, logprobs, [True] * len(tokens), (), StopReason(reason), **own)


def _to_text(routes: Int16[np.ndarray, "S L K"]) -> tuple[list[int], str]:
  """Returns the shape of routes, and their bytes in Base64, which are fewer than in lists."""
  return list(routes.shape), base64.b64encode(routes.astype("<i2").tobytes()).decode()


def _from_text(shape: Sequence[int], text: str) -> Int16[np.ndarray, "S L K"]:
  return np.frombuffer(base64.b64decode(text), "<i2").astype(np.int16).reshape(shape)
