"""Rollouts of one RL step: prompts -> sample -> responses."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int, PRNGKeyArray

from jaxrl_llm.decoding.sampler import Requests, SampleFn
from jaxrl_llm.devices.mesh import place_rows
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.outcome import Graded, mapped, weigh
from jaxrl_llm.rollouts.gallery import Gallery
from jaxrl_llm.tasks.pipeline import encode_prompts
from jaxrl_llm.text_types import Completion, Tokenizer
from jaxrl_llm.types import Params, Rollouts

Examples = Sequence[Mapping[str, Any]]

PENDING = "pending"
"""Value for the cause of failure of a sequence that is graded later, at the end of its batch."""


class DrawnBatch(NamedTuple):
  """Rollouts on the host, as `assess` needs them.

  Attributes:
    rollouts: Tokens and log-probabilities.
    responses: Completions of the sequences.
    examples: One task row per prompt.
    graded: Rewards of the sequences graded while others were still being drawn, the others
      `PENDING`; None if there are none.
  """

  rollouts: Rollouts
  responses: list[Completion]
  examples: Examples
  graded: Graded | None = None


def dispatch(
  sample: SampleFn,
  params: Params,
  examples: Examples,
  key: PRNGKeyArray,
  *,
  mesh: Mesh,
  tokenizer: Tokenizer,
  prompt_buckets: Sequence[int],
  requests: Requests | None = None,
  gallery: Gallery | None = None,
) -> Rollouts:
  """Dispatches the rollouts of a batch of problems without waiting for them.

  Args:
    sample: The jitted sampler.
    params: Weights of the policy, on the sampler's devices.
    examples: Task rows; the mesh must divide their number.
    key: Random key of this batch alone.
    mesh: The sampler's mesh, over which the rows of the prompts are split.
    tokenizer: The task's tokenizer.
    prompt_buckets: Numbers of prompt slots to choose from.
    requests: Responses to continue and their limits, for a sampler compiled for them; None for
      other samplers.
    gallery: Pictures of the problems; None if there are none.

  Returns:
    Rollouts on the devices.
  """
  prompts = encode_prompts(examples, tokenizer, buckets=prompt_buckets, pictures=gallery and gallery.settings)
  shown = None if gallery is None else place_rows(mesh, gallery.shown(examples, prompts[0].shape[1], params))
  prompts = place_rows(mesh, prompts)
  if requests is None:
    return sample(params, *prompts, key) if shown is None else sample(params, *prompts, key, Requests(), shown)
  placed = place_rows(mesh, {name: x for name, x in requests._asdict().items() if name in ("partial", "limits")})
  return sample(params, *prompts, key, requests._replace(**placed))


def pending(rewards: Sequence[WeightedReward], count: int) -> Graded:
  """Makes rewards of sequences that are yet to be graded."""
  parts = {reward.name: np.zeros(count, np.float32) for reward in rewards}
  return weigh(rewards, parts, dict.fromkeys(range(count), (PENDING, "")))


def put(graded: Graded, rows: Sequence[int] | Int[np.ndarray, " m"], own: Graded) -> Graded:
  """Replaces the rewards of the sequences in `rows` by `own`, which holds theirs alone."""

  def filled(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[rows] = values
    return x

  return mapped(filled, graded, own)


def written_mask(rollouts: Rollouts) -> Bool[np.ndarray, "N R"]:
  """Returns a mask that is True at the tokens that the policy wrote."""
  return rollouts.mask if rollouts.written is None else rollouts.written


def transcript(completion: Completion) -> str:
  """Returns a response as text; for a conversation, all turns with the replies between them."""
  if not completion.turns:
    return completion.text
  words = [(turn.text, turn.reply if isinstance(turn.reply, str) else f"[{len(turn.reply)} tokens]") for turn in completion.turns]
  return "".join(text + reply for text, reply in words[:-1]) + words[-1][0]
