"""A pool of killable processes in which reward functions run: whatever one answer does to them costs that one sample. No JAX."""

from jaxrl_llm.rewards.workers.jobs import CAUSES, Function, Job, Outcome
from jaxrl_llm.rewards.workers.pool import Pool, open_pool

__all__ = ["CAUSES", "Function", "Job", "Outcome", "Pool", "open_pool"]
