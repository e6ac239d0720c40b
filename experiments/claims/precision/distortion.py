"""Effect of errors of the old log-probabilities on the weights of tokens, on one rollout batch."""

import functools
from collections.abc import Mapping

import jax
import numpy as np

from experiments.claims import bed as beds
from experiments.claims import running_sums
from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.learner.train_step import policy_outputs
from jaxrl_llm.objectives.gate_weight import gate_weight
from jaxrl_llm.types import PolicyOutputs, TrainBatch


def measure(sizes: beds.Sizes, seed: int, arms: Mapping[str, beds.Arm], errors: Mapping[str, float | str], *, updates: int) -> list[dict]:
  """Measures the effect of wrong old log-probabilities on the weights of a stale policy.

  Exact updates on one rollout batch make the policy stale. The batch is then weighted with exact
  and with wrong old log-probabilities.

  Args:
    sizes: Sizes of the bed.
    seed: Seed of warm start, problems, samples and errors.
    arms: Objectives by name; the first one trains.
    errors: Errors by name. A number is the standard deviation of an independent error of each
      token, in nats. "bfloat16" and "float8" stand for log-probabilities that a sampler in this
      type would compute.
    updates: Number of updates on the rollout batch.

  Returns:
    One row per objective and error, over the tokens whose advantage is not 0: `weight`, the mean of
    |C - C exact|, where C is the weight of the token's gradient relative to REINFORCE's; `ratio`,
    the same for the ratio alone, without clip or gate (of the sequence for GSPO, of the token for
    others); `flips`, the fraction of tokens of which the clip binds in one case and not in the
    other; `clipped`, the fraction on which it binds with exact log-probabilities; `gap`, the mean
    absolute error of an old log-probability; `k3`, the divergence due to this error, in nats per
    token.
  """
  bed, params = beds.make_bed(sizes), beds.warm_params(sizes, seed)
  trained = next(iter(arms.values()))
  chosen = running_sums.problems("train", updates * sizes.num_prompts, np.random.default_rng([seed, 2]))
  rollout = beds.draw(bed, params, chosen, jax.random.key(seed), beds.Arm("grpo", recompute=True))
  exact, size = rollout.batch._replace(sampler_logprobs=None), sizes.num_prompts * sizes.group_size
  state, step = bed.new_state(params), bed.step(trained.objective, trained.settings, "none")
  for index in range(updates):
    piece = jax.tree.map(lambda x, start=index * size: x[start : start + size], rollout.batch)
    state, _ = step(state, piece, trained.learning_rate)
  now = np.asarray(bed.score(state.params, rollout.batch).logprobs)
  rng, rows = np.random.default_rng([seed, 3]), []
  for error, spread in errors.items():
    if isinstance(spread, str):
      wrong = np.asarray(scored(sizes, spread)(params, rollout.batch))
    else:
      wrong = exact.old_logprobs + spread * rng.standard_normal(exact.mask.shape) * exact.mask
    other = exact._replace(old_logprobs=wrong.astype(np.float32))
    rows += [{"seed": seed, "objective": name, "error": error} | compare(arm, now, exact, other) for name, arm in arms.items()]
  return rows


@functools.cache
def scored(sizes: beds.Sizes, dtype: str, model: str = "dense"):
  """Returns a function `(params, batch)` that computes log-probabilities as a sampler would.

  Args:
    sizes: Sizes of the bed.
    dtype: Type of the sampler; see `Arm`.
    model: One of `beds.MODELS`.
  """
  model, lower = beds.lowered(beds.model_config(sizes, model), dtype)
  outputs = functools.partial(policy_outputs, model.logprobs, make_filter())
  return jax.jit(lambda params, batch: outputs(lower(params), batch).logprobs)


def compare(arm: beds.Arm, now: np.ndarray, exact: TrainBatch, wrong: TrainBatch) -> dict:
  """Compares the weights with exact and with wrong old log-probabilities.

  Args:
    arm: Arm with the objective.
    now: Log-probabilities under the current policy, [N, T].
    exact: Batch with exact old log-probabilities.
    wrong: The same batch with wrong ones.

  Returns:
    The measures that `measure` lists.
  """
  objective = objectives.make(arm.objective, **dict(arm.settings))
  weigh = jax.jit(lambda now, batch: gate_weight(objective, PolicyOutputs(now), batch))
  one, other = (np.asarray(weigh(now, batch)) for batch in (exact, wrong))
  known = (exact.mask > 0) & (exact.advantages != 0)
  one, other = one[known], other[known]
  ratio = [ratios(now - batch.old_logprobs, exact.mask, sequence=arm.objective == "gspo")[known] for batch in (exact, wrong)]
  error = (exact.old_logprobs - wrong.old_logprobs)[known].astype(np.float64)
  mean = lambda x: float(np.mean(x)) if len(x) else 0.0
  return {
    "weight": mean(np.abs(one - other)),
    "ratio": mean(np.abs(ratio[0] - ratio[1])),
    "flips": mean((one == 0) != (other == 0)),
    "clipped": mean(one == 0),
    "gap": mean(np.abs(error)),
    "k3": mean(np.expm1(error) - error),
  }


def ratios(log_ratio: np.ndarray, mask: np.ndarray, *, sequence: bool) -> np.ndarray:
  """Returns the ratio of each token, or the length-normalised ratio of its sequence, [N, T].

  Example:
    >>> ratios(np.log([[2.0, 0.5]]), np.ones((1, 2)), sequence=True).tolist()
    [[1.0, 1.0]]
  """
  if sequence:
    log_ratio = np.broadcast_to(np.sum(log_ratio * mask, axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True), mask.shape)
  return np.exp(log_ratio)
