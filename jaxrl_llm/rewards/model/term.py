"""The reward term computed by a reward model."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.pretrained.tokenizer import encode_foreign
from jaxrl_llm.rewards import Outcome, WeightedReward
from jaxrl_llm.rewards.model.folder import load_reward_tokenizer, same_vocabulary
from jaxrl_llm.rewards.model.judge import make_judge
from jaxrl_llm.tasks.files.storage import IDS, IMAGES
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Completion, Tokenizer


def reward_model_term(
  path: str | os.PathLike, *, tokenizer: Tokenizer, max_tokens: int, weight: float = 1.0, dtype: str = "float32", chat: bool | None = None
) -> WeightedReward:
  """Makes a term with a reward model's score for prompt and response.

  The weights are loaded on the first call. A reward model with the policy's vocabulary reads the
  exact tokens that the policy was given and sampled. Any other reads the texts with its own
  tokenizer and chat template, plus an end token after a response that ended by itself.

  Args:
    path: Folder of the reward model.
    tokenizer: Tokenizer of the policy.
    max_tokens: Length of the longest prompt with its response, in tokens of the policy's
      vocabulary. In another vocabulary, twice as many are read. A longer sequence has no reward,
      with the cause "too_long".
    weight: Factor in the total.
    dtype: Dtype of weights and activations.
    chat: Whether prompts are written with the chat template; see `load_reward_tokenizer`.

  Raises:
    ValueError: If the config or the tokenizer of the reward model is missing or unusable.
  """
  own = load_reward_tokenizer(path, chat=chat)
  exact = same_vocabulary(tokenizer, own)
  limit = max_tokens if exact else 2 * max_tokens
  judge_ids = make_judge(path, max_tokens=limit, dtype=dtype)

  def prompt_of(example: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Encodes the texts of a prompt; ids and pictures are the policy's own."""
    return prompt_ids({name: value for name, value in example.items() if name not in (IDS, IMAGES)}, tokenizer)

  def sequence(completion: Completion, example: Mapping[str, Any]) -> list[int]:
    if exact:
      return [*prompt_of(example, tokenizer), *completion.token_ids]
    ends = [own.eos_id] if completion.stopped else []
    return [*prompt_of(example, own), *encode_foreign(completion.text, own), *ends]

  def outcome(reward: float | None, length: int) -> Outcome:
    if reward is None:
      return Outcome(None, "too_long", f"it has {length} tokens with its prompt, expected at most {limit}")
    return Outcome(reward) if np.isfinite(reward) else Outcome(None, "not_finite", f"the reward model said {reward}")

  def judge(completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    sequences = [sequence(*pair) for pair in zip(completions, examples, strict=True)]
    fitting = [i for i, x in enumerate(sequences) if len(x) <= limit]
    scores = dict(zip(fitting, judge_ids([sequences[i] for i in fitting]).tolist(), strict=True))
    return [outcome(scores.get(i), len(x)) for i, x in enumerate(sequences)]

  def alone(completion: Completion, example: Mapping[str, Any]) -> float:
    value = judge([completion], [example])[0].value
    return float("nan") if value is None else value

  return WeightedReward("reward_model", alone, weight, batch_fn=judge)
