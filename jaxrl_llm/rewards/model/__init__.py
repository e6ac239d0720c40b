"""A reward model as a term of the reward: its folder, its tokenizer and its batched rewards.

The rewards are computed on this process's devices.
"""

from jaxrl_llm.rewards.model.folder import folder_problems, load_reward_tokenizer, notes_of
from jaxrl_llm.rewards.model.term import reward_model_term

__all__ = ["folder_problems", "load_reward_tokenizer", "notes_of", "reward_model_term"]
