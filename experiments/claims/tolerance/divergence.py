"""Divergence of samplers from the learner on the warm start of a seed, where nothing is stale."""

from collections.abc import Sequence

import jax
import numpy as np

from experiments.claims import bed as beds
from experiments.claims.precision import distortion

PROMPTS = 64


def measure(sizes: beds.Sizes, seed: int, model: str, samplers: Sequence[str]) -> list[dict]:
  """Measures how far samplers are from the learner, one row each.

  Args:
    sizes: Sizes of the bed.
    seed: Seed of the warm start, the problems and the samples.
    model: One of `beds.MODELS`.
    samplers: Samplers as `beds.Arm.dtype`.

  Returns:
    Rows with `k3`, the divergence in nats per token, and `gap`, the mean absolute error of a
    log-probability, of responses that an exact sampler has drawn.
  """
  bed, params = beds.make_bed(sizes, model), beds.warm_params(sizes, seed, model)
  chosen = sizes.problems("train", PROMPTS, np.random.default_rng([seed, 2]))
  batch = beds.draw(bed, params, chosen, jax.random.key(seed), beds.Arm("grpo", recompute=True)).batch._replace(sampler_logprobs=None)
  rows, counted = [], np.asarray(batch.mask) > 0
  for sampler in samplers:
    wrong = np.asarray(distortion.scored(sizes, sampler, model)(params, batch))
    error = (np.asarray(batch.old_logprobs) - wrong)[counted].astype(np.float64)
    measured = {"k3": float(np.mean(np.expm1(error) - error)), "gap": float(np.mean(np.abs(error)))}
    rows.append({"seed": seed, "sampler": sampler} | measured)
  return rows
