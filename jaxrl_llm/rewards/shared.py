"""Rewards of a batch, computed jointly by all processes of a run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm.devices import hosts
from jaxrl_llm.rewards.outcome import CallFn, Graded, WeightedReward, call_here, grade, weigh
from jaxrl_llm.text_types import Completion


def grade_shared(
  rewards: Sequence[WeightedReward], completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]], *, call: CallFn = call_here
) -> Graded:
  """Grades each response in one process and returns the whole batch in all of them.

  `grade` describes the arguments.
  """
  failures: dict[str, tuple[str, str]] = {}

  def parts_of(own: Sequence[int]) -> Float[np.ndarray, "m k"]:
    graded = grade(rewards, [completions[i] for i in own], [examples[i] for i in own], call=call)
    failures.update({str(own[i]): (graded.failed[i], graded.details[i]) for i in np.flatnonzero(~graded.valid)})
    return np.stack([*graded.parts.values()], axis=1)

  columns = hosts.share(parts_of, len(completions)).T
  for text in hosts.gather_text(json.dumps(failures)):
    failures |= json.loads(text)
  parts = {reward.name: part for reward, part in zip(rewards, columns, strict=True)}
  return weigh(rewards, parts, {int(i): (cause, detail) for i, (cause, detail) in failures.items()})
