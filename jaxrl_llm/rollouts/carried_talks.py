"""Groups of conversations that a step does not wait for and the next one continues.

They are to conversations what `partial` is to single responses. A conversation keeps its tokens,
with the log-probabilities of the policies that drew them, and its turns. The environment's state is
not kept: the next step makes it again from the turns; see `turns`.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int16

from jaxrl_llm.rollouts.partial import age_metrics, separate
from jaxrl_llm.rollouts.playing import Conversation
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason


class TalkGroups(NamedTuple):
  """Prompts, oldest first, with their conversations so far: n groups of G.

  Attributes:
    examples: One task row per prompt.
    talks: The n·G conversations.
    seeds: Seed of each conversation, which it keeps.
    steps: RL step in which each group was begun.
  """

  examples: list[Mapping[str, Any]]
  talks: list[Conversation]
  seeds: list[int]
  steps: list[int]


NO_GROUPS = TalkGroups([], [], [], [])
"""What is carried into the first step."""


def join(carried: TalkGroups, examples: Sequence[Mapping[str, Any]], seeds: Sequence[int], *, step: int) -> TalkGroups:
  """Joins the groups carried into a step and, behind them, the new prompts that it begins.

  `seeds` has one for each new conversation.
  """
  new = [Conversation(0, (), (), (), (), (), StopReason.UNFINISHED)] * len(seeds)
  talks = [talk._replace(sequence=i) for i, talk in enumerate([*carried.talks, *new])]
  return TalkGroups([*carried.examples, *examples], talks, [*carried.seeds, *seeds], [*carried.steps, *[step] * len(examples)])


def take(groups: TalkGroups, played: Sequence[Conversation], *, num_groups: int) -> tuple[Int[np.ndarray, " m"], TalkGroups]:
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
  reasons = np.array([talk.reason for talk in played])
  used, kept, indices = separate(reasons, len(groups.examples), num_groups=num_groups)
  carried = TalkGroups(
    [groups.examples[i] for i in indices],
    [played[i] for i in kept],
    [groups.seeds[i] for i in kept],
    [groups.steps[i] for i in indices],
  )
  return used, carried


def metrics(groups: TalkGroups, played: Sequence[Conversation], rows: Int[np.ndarray, " m"], *, step: int) -> dict[str, float]:
  """Returns metrics of the age of the conversations that a step learns from, and of the cut.

  Args:
    groups: Groups that were played.
    played: Their conversations as they were handed over, in the order of their sequences.
    rows: Rows that `take` returned for them.
    step: Current RL step.
  """
  return age_metrics(groups.steps, rows, len(played) // len(groups.examples), step=step) | {
    "rollout/carried_tokens": sum(len(groups.talks[i].tokens) for i in rows) / max(sum(len(played[i].tokens) for i in rows), 1),
    "rollout/discarded_tokens": float(sum(talk.discarded_tokens for talk in played)),
  }


def to_json(groups: TalkGroups) -> dict[str, Any]:
  """Converts groups to lists, for a checkpoint's record; JSON restores every bit."""
  return {
    "examples": [dict(example) for example in groups.examples],
    "talks": [
      {
        "prompt": [int(x) for x in talk.prompt],
        "tokens": [int(x) for x in talk.tokens],
        "logprobs": [float(x) for x in talk.logprobs],
        "written": [int(x) for x in talk.written],
        "turns": [list(turn) for turn in talk.turns],
        "reason": int(talk.reason),
        "failed": talk.failed,
        "routes": talk.routes if talk.routes is None else _to_text(talk.routes),
        "versions": [int(x) for x in talk.versions],
      }
      for talk in groups.talks
    ],
    "seeds": [int(seed) for seed in groups.seeds],
    "steps": groups.steps,
  }


def from_json(saved: Mapping[str, Any]) -> TalkGroups:
  """Inverts `to_json`."""
  talks = []
  for i, talk in enumerate(saved["talks"]):
    turns = (Turn(text, tuple(reply) if isinstance(reply, list) else reply, reward, end) for text, reply, reward, end in talk["turns"])
    talks.append(
      Conversation(
        i,
        talk["prompt"],
        talk["tokens"],
        talk["logprobs"],
        [bool(own) for own in talk["written"]],
        tuple(turns),
        StopReason(talk["reason"]),
        talk["failed"] and tuple(talk["failed"]),
        routes=talk["routes"] and _from_text(*talk["routes"]),
        versions=tuple(talk.get("versions", ())),
      )
    )
  return TalkGroups(list(saved["examples"]), talks, list(saved["seeds"]), list(saved["steps"]))


def _to_text(routes: Int16[np.ndarray, "S L K"]) -> tuple[list[int], str]:
  """Returns the shape of routes, and their bytes in Base64, which are fewer than in lists."""
  return list(routes.shape), base64.b64encode(routes.astype("<i2").tobytes()).decode()


def _from_text(shape: Sequence[int], text: str) -> Int16[np.ndarray, "S L K"]:
  return np.frombuffer(base64.b64decode(text), "<i2").astype(np.int16).reshape(shape)
