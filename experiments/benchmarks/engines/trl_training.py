"""Worker for the update of TRL: `GRPOTrainer`'s own training step, gradient clipping and AdamW.

The trainer requests responses once for each update, and gets the batch where it would generate
them. From there on everything is TRL's own: its shuffle, its split into micro-batches, forward pass
and loss, backward pass, and the optimizer that it creates. Its defaults are kept, except for
bfloat16 and the settings in `--options.trl`: gradient checkpointing is on, and 8 responses pass
through the model at a time.
"""

import argparse
import functools
import os
import tempfile

from experiments.benchmarks.engines.train_job import CLIPS, TrainJob, padded, read_batch
from experiments.benchmarks.engines.worker import Engine, Stepped, serve

DEFAULT_MICROBATCH = 8  # `per_device_train_batch_size` of transformers.


def load(
  job: TrainJob,
  *,
  microbatch: int = DEFAULT_MICROBATCH,
  gradient_checkpointing: bool = True,
  threads: int = 0,
) -> Engine:
  """Loads the weights, and makes the optimizer and the trainer.

  Args:
    job: Job to run.
    microbatch: Number of responses at a time; 0 means all of them.
    gradient_checkpointing: Whether the backward pass recomputes layers.
    threads: Number of threads of torch; 0 means one per core.
  """
  import datasets
  import torch
  import transformers
  import trl

  num_threads = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
  torch.set_num_threads(num_threads)
  if job.objective not in CLIPS or job.optimizer != "adamw":
    raise ValueError(
      f"trl: found {job.objective} with {job.optimizer}, expected {' or '.join(CLIPS)} with adamw for this worker"
    )
  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = transformers.AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32)
  if hasattr(model.config, "router_aux_loss_coef"):
    model.config.router_aux_loss_coef = 0.0  # TRL adds the routers' own loss; the project's is off.
  positions = getattr(model.config, "max_position_embeddings", None)
  batch = padded(read_batch(job, vocab_size=model.config.vocab_size, max_positions=positions), job.pad_id)
  rows, size = len(batch.advantages), microbatch or len(batch.advantages)
  low, high = CLIPS[job.objective]
  args = trl.GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=size,
    gradient_accumulation_steps=rows // size,
    max_completion_length=batch.completion_ids.shape[1],
    num_generations=2,  # Used to compute advantages, which is not done here.
    loss_type=job.objective,
    epsilon=low,
    epsilon_high=high,
    beta=0.0,
    gradient_checkpointing=gradient_checkpointing,
    bf16=job.dtype == "bfloat16",
    learning_rate=job.learning_rate,
    lr_scheduler_type="constant",
    adam_beta1=job.b1,
    adam_beta2=job.b2,
    weight_decay=job.weight_decay,
    max_grad_norm=job.max_grad_norm,
    use_cpu=device == "cpu",
    report_to=[],
  )
  prompts = datasets.Dataset.from_dict({"prompt": [""] * rows})
  tokenizer = _tokenizer(model.config.vocab_size, job.pad_id)
  trainer = trl.GRPOTrainer(model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args, train_dataset=prompts,
                            processing_class=tokenizer)  # fmt: skip
  trainer.create_optimizer_and_scheduler(NUM_STEPS)
  trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
  trainer.model.train()
  if gradient_checkpointing:
    trainer.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)

  def responses(_) -> dict[str, torch.Tensor]:
    """Returns what the trainer would have generated and scored."""
    as_tensor = lambda x: torch.from_numpy(x).to(device)
    mask = as_tensor(batch.completion_mask.astype("int64"))
    return {
      "prompt_ids": as_tensor(batch.prompt_ids.astype("int64")),
      "prompt_mask": as_tensor(batch.prompt_mask.astype("int64")),
      "completion_ids": as_tensor(batch.completion_ids.astype("int64")),
      "completion_mask": mask,
      "old_per_token_logps": as_tensor(batch.old_logps),
      "advantages": as_tensor(batch.advantages),
      "num_items_in_batch": mask.sum(),
    }

  trainer._generate_and_score_completions = responses

  def run(seed: int) -> Stepped:
    del seed  # Nothing is drawn.
    losses = [trainer.training_step(trainer.model, {}, None) for _ in range(args.gradient_accumulation_steps)]
    norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), args.max_grad_norm)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return Stepped(batch.num_tokens, float(sum(losses)), float(norm))

  versions = (
    f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__} on {device}, "
    f"{num_threads} threads"
  )
  checkpointing = f"gradient checkpointing {'on' if gradient_checkpointing else 'off'}"
  return Engine(f"{versions}, padded rows, {size} responses at a time, {checkpointing}", run)


NUM_STEPS = 10**6


def _tokenizer(vocab_size: int, pad_id: int):
  """Makes a tokenizer that knows ids and no text; the trainer needs one with a pad token."""
  import tokenizers
  import transformers

  words = tokenizers.models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, unk_token="<0>")
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(words), pad_token=f"<{pad_id}>", eos_token=f"<{pad_id}>", padding_side="left"
  )


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    prog="python -m experiments.benchmarks.engines.trl_training", description=__doc__.splitlines()[0]
  )
  parser.add_argument(
    "--microbatch", type=int, default=DEFAULT_MICROBATCH, help="responses at a time; 0 means all of them"
  )
  parser.add_argument("--gradient_checkpointing", action=argparse.BooleanOptionalAction, default=True)
  parser.add_argument("--threads", type=int, default=0)
  serve(functools.partial(load, **vars(parser.parse_args())), TrainJob)
