"""A pool of killable processes in which reward functions run; no JAX.

Whatever one response does to its process costs only that one sample.
"""

from jaxrl_llm.rewards.workers.jobs import Function, WorkerJob
from jaxrl_llm.rewards.workers.pool import WorkerPool

__all__ = ["Function", "WorkerJob", "WorkerPool"]
