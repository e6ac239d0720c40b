"""Worker for the update of google-tunix: the train step of its GRPO learner, with its own Qwen3.

`tunix.rl.trainer.Trainer` is built as its `RLCluster` builds it, and gets the loss as in
`GRPOLearner` and `DAPOLearner`. The batch is padded, because only tunix's TPU attention kernel
separates packed sequences. Rematerialisation is off, which is the default. With `--microbatch`,
gradients are accumulated by its own `gradient_accumulation_steps`: a mean of means, and therefore
another loss for `dapo`.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from experiments.benchmarks.engines.google_tunix import load_model
from experiments.benchmarks.engines.train_job import CLIPS, TrainJob, padded, read_batch
from experiments.benchmarks.engines.worker import Engine, Stepped, serve

NO_STEP = 2**31 - 1  # A step that is never reached, so that it never evaluates.


def load(job: TrainJob, *, microbatch: int | None = None) -> Engine:
  """Loads the weights, and makes the optimizer and the train step.

  Args:
    job: Job to run.
    microbatch: Number of responses at a time, which replaces the job's.
  """
  from importlib import metadata

  import optax
  from tunix.rl import common, function_registry
  from tunix.rl.grpo import dapo_learner, grpo_learner
  from tunix.rl.trainer import Trainer
  from tunix.sft.peft_trainer import TrainingConfig

  if job.objective not in CLIPS or job.optimizer != "adamw":
    raise ValueError(
      f"tunix: found {job.objective} with {job.optimizer}, expected {' or '.join(CLIPS)} with adamw for this worker"
    )
  model, raw = load_model(job.checkpoint, job.dtype)
  batch = padded(
    read_batch(job, vocab_size=raw["vocab_size"], max_positions=raw.get("max_position_embeddings")), job.pad_id
  )
  rows, size = len(batch.advantages), (job.microbatch if microbatch is None else microbatch) or len(batch.advantages)
  low, high = CLIPS[job.objective]
  # `num_generations` is used to compute advantages, which is not done here.
  settings = dict(num_generations=2, epsilon=low)
  if job.objective == "grpo":
    algorithm = grpo_learner.GRPOConfig(**settings, beta=0.0)
  else:
    algorithm = dapo_learner.DAPOConfig(**settings, epsilon_high=high)
  # The learner takes the temperature from the sampler's settings.
  object.__setattr__(algorithm, "temperature", 1.0)
  optimizer = optax.chain(
    optax.clip_by_global_norm(job.max_grad_norm),
    optax.adamw(job.learning_rate, b1=job.b1, b2=job.b2, weight_decay=job.weight_decay),
  )
  config = TrainingConfig(
    eval_every_n_steps=NO_STEP, gradient_accumulation_steps=rows // size if size < rows else None
  )
  trainer = Trainer(model, optimizer, config, custom_checkpoint_metadata_fn=dict)
  loss_fn = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)
  trainer.with_loss_fn(
    lambda model, train_example, algo_config: loss_fn(
      model, train_example, algo_config=algorithm, pad_id=job.pad_id, eos_id=job.pad_id
    ),
    has_aux=True,
  )
  trainer.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": algorithm})
  step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

  def example(start: int) -> common.TrainExample:
    part = slice(start, start + size)
    return grpo_learner.TrainExample(
      prompt_ids=jnp.asarray(batch.prompt_ids[part]),
      prompt_mask=jnp.asarray(batch.prompt_mask[part]),
      completion_ids=jnp.asarray(batch.completion_ids[part]),
      completion_mask=jnp.asarray(batch.completion_mask[part]),
      ref_per_token_logps=None,
      advantages=jnp.asarray(batch.advantages[part]),
      old_per_token_logps=jnp.asarray(batch.old_logps[part]),
    )

  def run(seed: int) -> Stepped:
    del seed  # Nothing is drawn.
    results = [step(example(start)) for start in range(0, rows, size)]
    losses, _, norms = zip(*jax.block_until_ready(results))
    jax.block_until_ready(jax.tree.leaves(trainer.model))
    # With micro-batches it reports the gradient norm of each, but not that of their mean.
    return Stepped(
      batch.num_tokens,
      float(jnp.mean(jnp.stack(losses))),
      float(norms[0]) if size == rows else float("nan"),
    )

  versions = f"google-tunix {metadata.version('google-tunix')}, JAX {jax.__version__} on {jax.devices()[0].device_kind}"
  return Engine(
    f"{versions}, padded rows, no rematerialisation, {size} responses at a time, loss by {algorithm.loss_agg_mode}",
    run,
  )


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    prog="python -m experiments.benchmarks.engines.tunix_training", description=__doc__.splitlines()[0]
  )
  parser.add_argument("--microbatch", type=int, help="responses at a time, which replaces the job's number")
  serve(functools.partial(load, **vars(parser.parse_args())), TrainJob)
