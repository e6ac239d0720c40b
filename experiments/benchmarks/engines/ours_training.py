"""Worker for the project's update."""

import functools

import jax

from experiments.benchmarks import train_step
from experiments.benchmarks.engines.train_job import TrainJob, read_batch
from experiments.benchmarks.engines.worker import Engine, Stepped, serve


def load(job: TrainJob) -> Engine:
  """Loads the weights.

  The program is compiled by the first update, as it is for the peers, so that the memory can be
  compared.
  """
  model, params = train_step.load_model(job)
  batch = read_batch(job, vocab_size=model.config.vocab_size, max_positions=model.config.max_positions)
  state = [train_step.fresh_state(job, params)]
  del params  # The state is donated.
  update = functools.cache(lambda: train_step.prepare(job, batch, model, state[0]))

  def run(seed: int) -> Stepped:
    del seed  # Nothing is drawn.
    state[0], metrics = jax.block_until_ready(update().step(state[0], update().pack()))
    return Stepped(batch.num_tokens, float(metrics["actor/loss"]), float(metrics["actor/grad_norm"]))

  rows = f"rows of {job.row_tokens or 'chosen'} tokens, prompts {'shared' if job.share_prompts else 'repeated'}"
  micro = f"{job.microbatch or 'a chosen number of'} responses at a time"
  return Engine(f"jaxrl_llm, JAX {jax.__version__} on {jax.devices()[0].device_kind}, {rows}, {micro}", run)


if __name__ == "__main__":
  serve(load, TrainJob)
