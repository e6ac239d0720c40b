"""A reward model as a term of the reward: its folder, its tokenizer and its batched rewards.

The rewards are computed on this process's devices.
"""

from jaxrl_llm.rewards.model.folder import folder_problems, load_reward_tokenizer, notes_of, same_vocabulary
from jaxrl_llm.rewards.model.judge import make_judge
from jaxrl_llm.rewards.model.term import NAME, reward_model_term

__all__ = [
  "NAME",
  "folder_problems",
  "load_reward_tokenizer",
  "make_judge",
  "notes_of",
  "reward_model_term",
  "same_vocabulary",
]
