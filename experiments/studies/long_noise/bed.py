"""A trial: responses of a warm start of any task, and their gradients at a later policy."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import bed as beds
from experiments.gradients.measure import WHOLE, measure, rows_of
from experiments.studies.long_noise import rules
from experiments.studies.noise.bed import GRPO, log_ratios, programs, widths
from jaxrl_llm import objectives
from jaxrl_llm.types import Params, TrainBatch


def policies(sizes: beds.Sizes, seed: int, updates: tuple[int, ...]) -> dict[int, Params]:
  """Returns the warm start (0), and the policy after each number of GRPO updates.

  All updates are of one rollout batch of the warm start, one mini-batch each.

  Raises:
    StartFailed: If the imitation fails.
  """
  bed, start = programs(sizes).bed, beds.warm_params(sizes, seed)
  chosen = sizes.problems("train", max(updates) * sizes.num_prompts, np.random.default_rng([seed, 1]))
  batch = beds.draw(bed, start, chosen, jax.random.fold_in(jax.random.key(seed), 1), GRPO).batch
  state, step, size = bed.new_state(start), bed.step(GRPO.objective, GRPO.settings, GRPO.correction), sizes.num_prompts * sizes.group_size
  reached = {0: start}
  for update in range(max(updates)):
    state, _ = step(state, jax.tree.map(lambda x, first=update * size: x[first : first + size], batch), GRPO.learning_rate)
    if update + 1 in updates:
      reached[update + 1] = state.params
  return reached


def responses(sizes: beds.Sizes, params: Params, seed: int, num_prompts: int) -> TrainBatch:
  """Draws responses to training problems that no update has seen, with their prompts as groups."""
  chosen = sizes.problems("train", num_prompts, np.random.default_rng([seed, 2]))
  batch = beds.draw(programs(sizes).bed, params, chosen, jax.random.fold_in(jax.random.key(seed), 2), GRPO).batch
  groups = np.broadcast_to(1 + np.arange(len(batch.mask))[:, None] // sizes.group_size, batch.mask.shape)
  return jax.tree.map(jnp.asarray, batch._replace(groups=groups.astype(np.int32)))


def run(length: int, seed: int, clips: Mapping[str, float], *, sizes: beds.Sizes | None = None) -> dict[str, Any]:
  """Runs one trial.

  Args:
    length: Length of the responses.
    seed: Seed.
    clips: Calibrated widths of the clips, from `calibrate`.
    sizes: Sizes of the bed; None takes those of the study.

  Returns:
    `length`, `seed`, the `accuracy` of the responses, and of each of the `objectives` `inflation`,
    the share `clipped`, and the standard deviations of log-ratios.

  Raises:
    StartFailed: If the imitation fails.
  """
  sizes = sizes or rules.sizes(length)
  losses = {name: objectives.make(objective, **settings) for name, (objective, settings) in rules.measured(clips).items()}
  reached, own = policies(sizes, seed, (rules.UPDATES,)), programs(sizes)
  batch, params = responses(sizes, reached[0], seed, rules.PROMPTS), reached[rules.UPDATES]
  rows = rows_of(measure([batch], params, losses, outputs_fn=own.bed.score, moments_fn=own.moments))
  spread = log_ratios(own.bed.score(params, batch).logprobs, batch)
  kept = {row["objective"]: {name: row[name] for name in ("inflation", "clipped")} | spread for row in rows if row["part"] == WHOLE}
  right = np.asarray(batch.advantages).max(axis=1) > 0
  return {"length": length, "seed": seed, "accuracy": float(np.mean(right)), "objectives": kept}


def calibrate(length: int) -> dict[str, float]:
  """Returns the width of GRPO's clip and the factor of GSPO's band, from the seeds for it."""
  sizes, of_seeds = rules.sizes(length), {"grpo": [], "gspo": []}
  for seed in rules.CALIBRATION_SEEDS:
    reached = policies(sizes, seed, (rules.CALIBRATED_AT,))
    batch = responses(sizes, reached[0], seed, rules.PROMPTS)
    gap = np.asarray(programs(sizes).bed.score(reached[rules.CALIBRATED_AT], batch).logprobs - batch.old_logprobs, np.float64)
    mask, advantages = np.asarray(batch.mask) > 0, np.asarray(batch.advantages)
    of_sequences = np.broadcast_to(np.mean(gap, axis=1, where=mask)[:, None], gap.shape)
    of_seeds["grpo"].append(widths(gap[mask], advantages[mask], 1.0, 1.0))
    of_seeds["gspo"].append(widths(of_sequences[mask], advantages[mask], 3e-4, 4e-4))
  return {name: float(f"{np.mean(values):.3g}") for name, values in of_seeds.items()}
