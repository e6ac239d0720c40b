"""Update of one mini-batch, packed against one sequence per padded row, alternating in one process.

  python -m experiments.benchmarks.packing

Both compute the same loss, which is printed as a check. Lengths are those of the laptop job's demonstrations.
"""

import statistics
import time
from functools import partial

import jax
import numpy as np

from configs import common
from jaxrl_llm import objectives, packing, tasks
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.sampler import make_filter
from jaxrl_llm.tasks.pipeline import encode_demonstrations
from jaxrl_llm.train_step import init_state, make_optimizer, make_train_step, policy_outputs

ROUNDS = 7


def main() -> None:
  """Measures and prints."""
  config = common.laptop("gspo", "")
  task = tasks.make("arithmetic", levels=config.task.levels)
  count = config.rollout.num_prompts * config.rollout.group_size // config.learner.updates_per_rollout
  order = np.random.default_rng(0).permutation(len(task.demonstrations))[:count]
  pairs = encode_demonstrations([task.demonstrations[i] for i in order], task.tokenizer)
  sequences = [packing.demonstration(prompt, response) for prompt, response in pairs]
  longest = max(config.rollout.prompt_buckets) + config.rollout.max_new_tokens
  batches = {
    "packed": packing.pack(sequences, row_tokens=config.learner.row_tokens, row_buckets=config.learner.row_buckets),
    "padded": padded(sequences, longest),
  }

  model = make_model(preset("tiny", vocab_size=task.tokenizer.vocab_size))
  optimizer, schedule = make_optimizer(learning_rate=0.0, warmup_steps=0, weight_decay=0.0, b1=0.9, b2=0.95, max_grad_norm=1.0)
  outputs_fn = partial(policy_outputs, model.logits, make_filter())
  step = jax.jit(make_train_step(outputs_fn, objectives.make("gspo"), optimizer, learning_rate=schedule), donate_argnums=0)
  state = init_state(model.init(jax.random.key(0)), optimizer)

  seconds: dict[str, list[float]] = {name: [] for name in batches}
  for _ in range(ROUNDS + 1):
    for name, batch in batches.items():
      started = time.perf_counter()
      state, metrics = jax.block_until_ready(step(state, batch))
      seconds[name].append(time.perf_counter() - started)
      loss = float(metrics["actor/loss"])
      if len(seconds[name]) == 1:
        print(f"{name}: rows x slots {batch.tokens.shape}, {packing.packing_waste([batch]):.1%} padding, loss {loss:.6f}")
  times = {name: values[1:] for name, values in seconds.items()}  # The first compiles.
  ratios = [slow / fast for slow, fast in zip(times["padded"], times["packed"], strict=True)]
  for name, values in times.items():
    print(f"{name}: median {statistics.median(values):.3f} s, {min(values):.3f} to {max(values):.3f}")
  print(f"padded / packed, pair by pair: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


def padded(sequences: list[packing.Trajectory], row_tokens: int) -> packing.TrainBatch:
  """One sequence per row: what a loop that does not pack computes."""
  rows = [packing.pack([sequence], row_tokens=row_tokens, row_buckets=(1,)) for sequence in sequences]
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)


if __name__ == "__main__":
  main()
