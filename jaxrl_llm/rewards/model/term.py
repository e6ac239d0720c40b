"""The term of the reward that a reward model is."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards import Outcome, WeightedReward
from jaxrl_llm.rewards.model.folder import load_reward_tokenizer, same_vocabulary
from jaxrl_llm.rewards.model.judge import make_judge
from jaxrl_llm.text_types import Completion, Tokenizer

NAME = "reward_model"
"""Under which it is logged and blamed."""


def reward_model_term(
  path: str | os.PathLike, *, tokenizer: Tokenizer, max_tokens: int, weight: float = 1.0, dtype: str = "float32", chat: bool | None = None
) -> WeightedReward:
  """A term whose reward is what a reward model gives for prompt and response; loads the weights when it is first asked.

  A reward model with the policy's vocabulary reads the very tokens that the policy was given and drew. Any other reads the texts, with its
  own tokenizer and chat template, and an end token behind a response that ended by itself.

  Args:
    path: folder of the reward model.
    tokenizer: the policy's tokenizer.
    max_tokens: tokens of the longest prompt with its response, in the policy's vocabulary. Twice as many are read in another vocabulary; a
      longer sequence has no reward, for the cause "too_long".
    weight: factor in the total.
    dtype: see `make_judge`.
    chat: see `load_reward_tokenizer`.

  Raises:
    ValueError: see `rewards.model.problems`.
  """
  own = load_reward_tokenizer(path, chat=chat)
  exact = same_vocabulary(tokenizer, own)
  limit = max_tokens if exact else 2 * max_tokens
  judge_ids = make_judge(path, max_tokens=limit, dtype=dtype)

  def sequence(completion: Completion, example: Mapping[str, Any]) -> list[int]:
    if exact:
      return [*tokenizer.encode_prompt(example["prompt"]), *completion.token_ids]
    ends = [own.eos_id] if completion.stopped else []
    return [*own.encode_prompt(example["prompt"]), *own.encode(completion.text), *ends]

  def outcome(reward: float | None, length: int) -> Outcome:
    if reward is None:
      return Outcome(None, "too_long", f"it has {length} tokens with its prompt, expected at most {limit}")
    return Outcome(reward) if np.isfinite(reward) else Outcome(None, "not_finite", f"the reward model said {reward}")

  def judge(completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    sequences = [sequence(*pair) for pair in zip(completions, examples, strict=True)]
    fitting = [i for i, x in enumerate(sequences) if len(x) <= limit]
    found = dict(zip(fitting, judge_ids([sequences[i] for i in fitting]).tolist(), strict=True))
    return [outcome(found.get(i), len(x)) for i, x in enumerate(sequences)]

  def alone(completion: Completion, example: Mapping[str, Any]) -> float:
    value = judge([completion], [example])[0].value
    return float("nan") if value is None else value

  return WeightedReward(NAME, alone, weight, batch_fn=judge)
