"""Checks that the beds meet the requirements of the study.

They are measured on the tuning seeds before any trial, and read before any verdict.

  start     Imitation leaves room for RL: 20 to 60 % of the responses are right.
  length    The spread of a sequence's log-ratio grows with its length, as in language models.
  band      GSPO's band clips 5 to 40 % of the tokens; in its paper it clips 15 % with 4 updates.
  mismatch  Rounded weights put the sampler as far from the learner as the engines of large models:
            k3 is 3e-4 to 3e-3.
"""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from experiments.claims import bed as beds
from experiments.studies.forecast import protocol
from jaxrl_llm.types import Params

START, BAND, MISMATCH = (0.2, 0.6), (0.05, 0.4), (3e-4, 3e-3)
UPDATES = 4
RATE = 1e-3


def measure(start: Callable[[int, int], tuple[beds.Bed, Params]]) -> dict:
  """Measures the numbers of every check.

  Args:
    start: `(length, seed) -> (bed, warm params)`.

  Returns:
    `rows`, one per length, measured on the first tuning seed. `right` is the share of right
    responses at the start, `std_log_rho` the spread for GRPO before the last of 4 updates of one
    rollout batch, `clipped` the mean share of tokens that GSPO clips in these updates, and `k3` the
    KL estimate of a float8 sampler.
  """
  return {"rows": [{"length": length} | _measure(*start(length, protocol.TUNING_SEEDS[0]), length) for length in protocol.LENGTHS]}


def _measure(bed: beds.Bed, params: Params, length: int) -> dict[str, float]:
  """Measures the numbers of one length."""
  sizes, rng = bed.sizes, np.random.default_rng([protocol.TUNING_SEEDS[0], 3])
  chosen = sizes.problems("train", UPDATES * sizes.num_prompts, rng)
  cell, size = protocol.Cell(length, UPDATES), sizes.num_prompts * sizes.group_size
  values = {"right": float(beds.draw(bed, params, chosen, jax.random.key(1), beds.Arm("reinforce")).rewards.mean())}
  for name in ("grpo", "gspo"):
    arm = protocol.arm(name, cell, RATE, 1.0)
    state, step = bed.new_state(params), bed.step(arm.objective, arm.settings, arm.correction)
    rollout = beds.draw(bed, params, chosen, jax.random.key(0), arm)
    clipped = []
    for update in range(UPDATES):
      rows = slice(update * size, (update + 1) * size)
      batch = jax.tree.map(lambda x, rows=rows: x[rows], rollout.batch)
      if update == UPDATES - 1 and name == "grpo":
        log_ratio = (np.asarray(bed.score(state.params, batch).logprobs) - batch.old_logprobs) * batch.mask
        values["std_log_rho"] = float(np.std(log_ratio.sum(axis=1)))
      state, metrics = step(state, batch, arm.learning_rate)
      clipped.append(float(metrics["actor/pg_clipfrac"]))
    if name == "gspo":
      values["clipped"] = float(np.mean(clipped))
  rounded = beds.draw(bed, params, chosen, jax.random.key(2), beds.Arm("reinforce", dtype="float8", recompute=True))
  k = (rounded.batch.old_logprobs - rounded.batch.sampler_logprobs)[rounded.batch.mask > 0]
  return values | {"k3": float(np.mean(np.expm1(k) - k))}


def problems_of(measured: Mapping) -> list[str]:
  """Lists the checks that fail, one line each.

  Verdicts of the beds count only if the list is empty.
  """
  lines = []
  rows = sorted(measured["rows"], key=lambda row: row["length"])
  for row in rows:
    for name, (low, high) in (("right", START), ("clipped", BAND), ("k3", MISMATCH)):
      if not low <= row[name] <= high:
        lines.append(f"{row['length']} digits: {name}: found {row[name]:.3g}, expected {low:g} to {high:g}")
  for short, long in zip(rows, rows[1:], strict=False):
    if long["std_log_rho"] <= short["std_log_rho"]:
      lines.append(f"std_log_rho: found {long['std_log_rho']:.3g} at {long['length']} digits, expected more than at {short['length']}")
  return lines


def text(measured: Mapping) -> str:
  """Formats all numbers and the checks that fail."""
  lines = [", ".join(f"{name} {value:.4g}" for name, value in row.items()) for row in measured["rows"]]
  return "\n".join([*lines, *(problems_of(measured) or ["all checks pass"])])
