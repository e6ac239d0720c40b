"""A trial: responses of a warm start, and their gradients at policies ever further from it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.claims import bed as beds
from experiments.claims.running_sums import problems
from experiments.gradients.measure import PLAIN, WHOLE, Measured, measure, rows_of
from experiments.studies.noise import protocol
from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.learner.gradient_noise import make_moments, units_of
from jaxrl_llm.learner.train_step import policy_outputs
from jaxrl_llm.models import make_model
from jaxrl_llm.types import Params, TrainBatch

GRPO = beds.Arm("grpo", (("kl_coef", 0.0),), learning_rate=protocol.RATE)


class Programs(NamedTuple):
  """Programs of a length, compiled once for all seeds.

  Attributes:
    bed: Bed of the length.
    moments: Function made by `make_moments`.
  """

  bed: beds.Bed
  moments: Callable[..., Any]


@functools.lru_cache(maxsize=1)
def programs(sizes: beds.Sizes) -> Programs:
  """Makes the programs of the bed of some sizes."""
  model = make_model(beds.model_config(sizes))
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter(), learns_entropy=False)
  return Programs(beds.make_bed(sizes), make_moments(outputs_fn, at_once=sizes.group_size))


def policies(sizes: beds.Sizes, seed: int, staleness: tuple[int, ...] = protocol.STALENESS) -> dict[int, Params]:
  """Returns the warm start (0), and the policy after each number of GRPO updates.

  All updates are of one rollout batch of the warm start, one mini-batch each.

  Raises:
    StartFailed: If the imitation fails.
  """
  bed, start = programs(sizes).bed, beds.warm_params(sizes, seed)
  chosen = problems("train", max(staleness) * sizes.num_prompts, np.random.default_rng([seed, 1]), digits=sizes.digits)
  rollout = beds.draw(bed, start, chosen, jax.random.fold_in(jax.random.key(seed), 1), GRPO)
  state, step, size = bed.new_state(start), bed.step(GRPO.objective, GRPO.settings, GRPO.correction), sizes.num_prompts * sizes.group_size
  reached = {0: start}
  for update in range(max(staleness)):
    batch = jax.tree.map(lambda x, first=update * size: x[first : first + size], rollout.batch)
    state, _ = step(state, batch, GRPO.learning_rate)
    if update + 1 in staleness:
      reached[update + 1] = state.params
  return reached


def responses(sizes: beds.Sizes, params: Params, seed: int, stream: int, num_prompts: int = protocol.PROMPTS) -> TrainBatch:
  """Draws responses to training problems that no update has seen, with their prompts as groups."""
  chosen = problems("train", num_prompts, np.random.default_rng([seed, stream]), digits=sizes.digits)
  batch = beds.draw(programs(sizes).bed, params, chosen, jax.random.fold_in(jax.random.key(seed), stream), GRPO).batch
  groups = np.broadcast_to(1 + np.arange(len(batch.mask))[:, None] // sizes.group_size, batch.mask.shape)
  return jax.tree.map(jnp.asarray, batch._replace(groups=groups.astype(np.int32)))


def run(length: int, seed: int, *, sizes: beds.Sizes | None = None, num_prompts: int = protocol.PROMPTS) -> dict[str, Any]:
  """Runs one trial.

  Args:
    length: Length of the responses.
    seed: Seed.
    sizes: Sizes of the bed; None takes those of the study.
    num_prompts: Number of prompts whose responses are measured.

  Returns:
    `length`, `seed`, `accuracy` of the measured responses, their mean number of `tokens`, and
    `rows`: those of `measure.rows_of` with the number of updates `k`, the standard deviations of
    the log-ratios of tokens and of sequences, and `along`, the product of the mean gradient and the
    fresh one over the root of the noise.

  Raises:
    StartFailed: If the imitation fails.
  """
  sizes = sizes or protocol.sizes(length)
  losses = {name: objectives.make(own.objective, **own.settings) for name, own in protocol.measured(length).items()}
  reached, own = policies(sizes, seed), programs(sizes)
  options = dict(outputs_fn=own.bed.score, moments_fn=own.moments)
  old, rows = responses(sizes, reached[0], seed, 2, num_prompts), []
  for k in protocol.STALENESS:
    params = reached[k]
    stale = measure([old], params, losses, **options)
    fresh = measure([responses(sizes, params, seed, 2 + k, num_prompts)], params, losses, only_plain=True, **options)
    spread = log_ratios(own.bed.score(params, old).logprobs, old)
    for row in rows_of(stale, fresh):
      if row["part"] == WHOLE or row["objective"] in ("grpo", "dapo"):
        rows.append({"k": k} | row | spread | {"along": along(stale, fresh, row)})
  right, lengths = np.asarray(old.advantages).max(axis=1) > 0, np.sum(np.asarray(old.mask), axis=1)
  return {"length": length, "seed": seed, "accuracy": float(np.mean(right)), "tokens": float(np.mean(lengths)), "rows": rows}


def along(stale: Measured, fresh: Measured, row: Mapping[str, Any]) -> float:
  """Computes how far a noisy step goes along the fresh gradient: ⟨E g, E f⟩ / √noise.

  The fresh gradient f is the same for all objectives with equal weights of tokens, and a loss's
  scale cancels.
  """
  place, other = stale.places[row["objective"], row["part"]], fresh.places[row["objective"], PLAIN]
  product = np.dot(stale.moments.totals[place], fresh.moments.totals[other]) / (stale.moments.count * fresh.moments.count)
  return float(product / np.sqrt(row["in_groups"])) if row["in_groups"] > 0 else float("nan")


def log_ratios(logprobs: Float[jax.Array, "B T"], batch: TrainBatch) -> dict[str, float]:
  """Returns standard deviations of log-ratios: of tokens, of their means and of their sums."""
  gap, mask = np.asarray(logprobs - batch.old_logprobs, np.float64), np.asarray(batch.mask) > 0
  sums = np.array([np.sum(gap[row][mask[row]]) for row, _, _ in units_of(batch)])
  lengths = np.array([np.sum(mask[row]) for row, _, _ in units_of(batch)])
  return {"std_token": float(np.std(gap[mask])), "std_sequence": float(np.std(sums / lengths)), "std_product": float(np.std(sums))}


def widths(gap: Float[np.ndarray, " n"], advantages: Float[np.ndarray, " n"], low: float, high: float) -> float:
  """Returns the factor of a band [1 - low, 1 + high] with which it leaves out `protocol.CLIPPED`.

  A ratio is left out above the band if its advantage is positive, and below if it is negative.

  Args:
    gap: Log-ratios, one for each token.
    advantages: Advantages of the tokens; those of 0 do not count.
    low: Lower half-width.
    high: Upper half-width.

  Example:
    >>> ratio = np.log(1 + np.array([0.1, 0.2, 0.3, 0.4]))
    >>> round(widths(ratio, np.array([1, 1, 1, -1]), 1.0, 1.0), 2)
    0.25
  """
  counts = advantages != 0
  reach = np.where(advantages > 0, np.expm1(gap) / high, -np.expm1(gap) / low)[counts]
  return float(np.quantile(reach, 1 - protocol.CLIPPED))


def calibrate(length: int) -> Mapping[str, float]:
  """Returns the width of GRPO's clip and the factor of GSPO's band, from the seeds for it."""
  sizes, of_seeds = protocol.sizes(length), {"grpo": [], "gspo": []}
  for seed in protocol.CALIBRATION_SEEDS:
    reached = policies(sizes, seed, (protocol.CALIBRATED_AT,))
    batch = responses(sizes, reached[0], seed, 2)
    gap = np.asarray(programs(sizes).bed.score(reached[protocol.CALIBRATED_AT], batch).logprobs - batch.old_logprobs, np.float64)
    mask, advantages = np.asarray(batch.mask) > 0, np.asarray(batch.advantages)
    means = np.sum(gap, axis=1, where=mask) / np.sum(mask, axis=1)
    of_sequences = np.broadcast_to(means[:, None], gap.shape)
    of_seeds["grpo"].append(widths(gap[mask], advantages[mask], 1.0, 1.0))
    of_seeds["gspo"].append(widths(of_sequences[mask], advantages[mask], 3e-4, 4e-4))
  return {name: float(f"{np.mean(values):.3g}") for name, values in of_seeds.items()}
