"""A pool of killable processes in which reward functions run: whatever one answer does to them costs that one sample. No JAX."""

from jaxrl_llm.rewards.workers.jobs import Function, Job
from jaxrl_llm.rewards.workers.pool import Pool, open_pool

__all__ = ["Function", "Job", "Pool", "open_pool"]
