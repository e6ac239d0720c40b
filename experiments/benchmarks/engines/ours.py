"""Worker for the project's sampler."""

import functools

import jax
import numpy as np

from experiments.benchmarks.engines.job import Job
from experiments.benchmarks.engines.worker import Engine, Generated, serve
from experiments.benchmarks.sampler import load_model, prepare


def load(job: Job) -> Engine:
  """Loads the weights.

  The program is compiled by the first generation, as it is for the peers, so that the memory can be
  compared.
  """
  model, params = load_model(job)
  generation = functools.cache(lambda: prepare(job, model, params))

  def generate(seed: int) -> Generated:
    rollouts = generation().run(seed)
    lengths, total = np.sum(rollouts.mask, axis=1), np.sum(rollouts.logprobs)
    return Generated(lengths, total / np.sum(lengths))

  return Engine(
    f"jaxrl_llm, JAX {jax.__version__} on {jax.devices()[0].device_kind}, slots={job.slots or 'default'}", generate
  )


if __name__ == "__main__":
  serve(load)
