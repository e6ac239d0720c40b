"""Batches and cases of the golden advantages."""

import math
import random
from typing import Any

MASK = [
  [1, 1, 1, 1, 0],
  [0, 1, 1, 0, 1],  # A prompt token first, the other player or a tool in the middle.
  [1, 0, 0, 0, 0],
  [0, 0, 0, 0, 0],
  [1, 1, 1, 1, 1],
  [1, 1, 0, 1, 1],
  [1, 1, 1, 0, 0],
  [0, 1, 1, 1, 1],
]
ENDS = [
  [0, 1, 0, 1, 0],
  [1, 0, 1, 1, 1],  # Two of these turns end outside the mask.
  [1, 0, 0, 0, 1],
  [0, 1, 0, 1, 0],
  [1, 0, 1, 1, 1],
  [0, 1, 1, 0, 1],
  [0, 0, 1, 0, 0],
  [0, 0, 1, 0, 1],
]


STATES = [
  [3, 0, 3, 1, 3],
  [0, 3, 1, 1, 2],  # A state that the response has been in before.
  [0, 3, 3, 3, 1],
  [3, 0, 3, 2, 3],
  [0, 3, 0, 1, 1],
  [3, 0, 1, 3, 1],
  [3, 3, 0, 3, 3],
  [3, 3, 0, 3, 2],
]


def make_inputs(seed: int, rewards: list[float], second: list[float], role_baselines: list[float]) -> dict[str, Any]:
  """Makes a batch with given rewards and random numbers per token.

  Values outside the mask are plausible, so that an implementation that ignores the mask fails.

  Args:
    seed: Seed of the numbers.
    rewards: Reward of each response.
    second: The part of each reward that a second rule gave.
    role_baselines: Baselines before the batch.
  """
  # Python guarantees that the stream of its uniform draws does not change.
  uniform = random.Random(seed).random
  shape = [range(len(MASK[0]))] * len(rewards)

  def array(draw):
    return [[round(draw(), 3) for _ in row] for row in shape]

  def normal():
    return math.sqrt(-2 * math.log(1 - uniform())) * math.cos(2 * math.pi * uniform())

  return {
    "rewards": rewards,
    "parts": [[round(a - b, 3) for a, b in zip(rewards, second)], second],
    "weights": [1.0, -0.25],
    "mask": MASK[: len(rewards)],
    "written": [[1, 1, 1, 0, 1] if i == 3 else row for i, row in enumerate(MASK[: len(rewards)])],
    "kl": array(lambda: 0.2 + 0.4 * normal()),
    "kl_coef": 0.25,
    "values": array(lambda: 0.5 + 0.5 * normal()),
    "step_rewards": array(normal),
    "step_ends": [[bool(x) for x in row] for row in ENDS[: len(rewards)]],
    "step_states": [[STATES[i][t] + 4 * (i // 2) for t in range(len(MASK[0]))] for i in range(len(rewards))],
    "old_entropy": array(lambda: 0.02 + 2 * uniform()),
    "role_baselines": role_baselines,
    "beliefs": [[round(0.5 + 4 * uniform(), 3), round(0.5 + 4 * uniform(), 3)] for _ in rewards],
    "old_score_norm": array(lambda: 2 * uniform() * uniform()),
    "drift": [round(0.02 * uniform(), 4) for _ in rewards],
    "importance": array(lambda: 2 * uniform()),
  }


def all_inputs() -> dict[str, dict[str, Any]]:
  """Makes three batches: right or wrong, graded, and with missing rewards."""
  right = make_inputs(1, [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0], [0.3, -0.2])
  # The mean of three numbers 0.1, rounded, is not 0.1.
  graded = make_inputs(2, [0.7, -0.2, 0.9, 0.1, 0.1, 0.1], [0.2, 0.1, -0.1, 0.1, 0.3, 0.2], [0.1, 0.0, -0.4])
  missing = make_inputs(3, [0.9, -1.3, 0.4, -0.9, 0.3, 0.5, -0.7, 0.2], [0.4, 0.1, -0.2, 0.3, 0.1, 0.1, 0.6, 0.0], [-0.5, 0.5])
  # An entropy of 0 is raised to a floor before it is inverted.
  right["old_entropy"][4][1] = 0.0
  return {"right": right, "graded": graded, "missing": missing | {"valid": [True, True, False, True, True, True, False, False]}}


GROUP_SIZES = {"right": 4, "graded": 3, "missing": 4}
"""Samples per prompt, unless a case says otherwise."""

READS = {
  "maxrl": ["rewards"], "per_reward": ["parts"], "steps": ["step_rewards", "step_ends"], "gtpo": ["rewards", "old_entropy"],
  "rae": ["step_rewards", "step_ends"], "gigpo": ["rewards", "step_rewards", "step_ends", "step_states"],
  "hierarchical": ["step_rewards", "step_ends", "step_states"], "spo": ["rewards", "beliefs", "drift"],
  "otb": ["rewards", "old_score_norm"], "gae": ["rewards", "values"],
}  # fmt: skip
"""Fields that an estimator reads beside the mask; the others read `rewards`."""

WITH_MISSING = ("group", "leave_one_out", "rloo_n", "maxrl", "batch_scaled", "opo", "otb", "per_reward", "spo", "gigpo", "hierarchical")
WITH_KL = ("group", "leave_one_out", "rloo_n", "batch_scaled", "opo", "pass_at_k", "returns", "gae")
PER_TOKEN = ("otb", "gtpo", "returns", "gae")
"""Estimators with a statistic over tokens that others wrote."""

CHANGES: dict[str, list[tuple[str, dict[str, Any], int | None]]] = {
  "group": [("graded", {"normalize_std": False}, None), ("missing", {"normalize_std": False}, 2)],
  "leave_one_out": [("missing", {}, 2)],
  "rloo_n": [("missing", {"min_valid": 2}, None), ("missing", {"min_valid": 2}, 2)],
  "maxrl": [("missing", {}, 2)],
  "batch_scaled": [("missing", {}, 2)],
  "opo": [("missing", {}, 2)],
  "otb": [("missing", {}, 2), ("right", {}, 2)],
  "pass_at_k": [("graded", {"normalize_std": False}, None), ("right", {"pass_k": 3}, None), ("graded", {"pass_k": 1}, None)],
  "per_reward": [("graded", {"normalize_std": False}, None), ("missing", {}, 2)],
  "steps": [("right", {"normalize_std": False}, 2)],
  "gigpo": [
    ("right", {"gamma": 0.5, "normalize_std": False}, None), ("graded", {"episode_weight": 0.0}, None), ("right", {"step_weight": 0.5}, 2),
    ("missing", {}, 2),
  ],
  "hierarchical": [("right", {"challenge": 0.0}, None), ("missing", {"challenge": 2.0}, 2)],
  "gtpo": [("right", {"entropy_share": 0.5}, None), ("graded", {"right_above": 0.0}, None)],
  "rae": [
    ("right", {"decay": 0.5}, None), ("graded", {"num_roles": 3, "decay": 0.8}, None), ("right", {"zero_sum": False}, None),
    ("right", {"num_roles": 1, "zero_sum": False}, None),
  ],
  "spo": [
    ("right", {"half_drift": 0.01}, None), ("missing", {"half_drift": 0.03, "memory_low": 0.5}, 2), ("right", {"memory_high": 0.9}, 1),
    ("missing", {}, 1),
  ],
  "returns": [("graded", {"gamma": 0.9}, None)],
  "gae": [
    ("graded", {"gamma": 0.9, "lam": 0.8}, None), ("right", {"lam": 0.0, "critic_lam": 0.5}, None),
    ("graded", {"length_alpha": 0.4}, None),
  ],
}  # fmt: skip
"""Further cases of each estimator: batch, settings, and samples per prompt if others than usual."""


def all_cases(names: list[str]) -> list[tuple[str, str, dict[str, Any], int, list[str]]]:
  """Returns each case's estimator, batch, settings, samples per prompt, and fields."""
  cases = []
  for name in names:
    reads = ["mask", *READS.get(name, ["rewards"])]
    of_batch = {"right": reads, "graded": reads} | ({"missing": [*reads, "valid"]} if name in WITH_MISSING else {})
    cases += [(name, batch, {}, GROUP_SIZES[batch], fields) for batch, fields in of_batch.items()]
    cases += [(name, batch, changes, size or GROUP_SIZES[batch], of_batch[batch]) for batch, changes, size in CHANGES[name]]
    cases.append((name, "graded", {"whiten": True}, GROUP_SIZES["graded"], reads))
    cases += [(name, "right", {}, GROUP_SIZES["right"], [*reads, "kl", "kl_coef"])] if name in WITH_KL else []
    # Baselines of as many roles as the estimator has by default.
    carried = {"right": [*reads, "role_baselines"], "missing": [*reads, "role_baselines", "valid"]}
    cases += [(name, batch, {}, GROUP_SIZES[batch], fields) for batch, fields in carried.items()] if name == "rae" else []
    # A response that is not learned from: others are compared with it.
    written = [*reads, "written"]
    cases += [(name, "right", {}, GROUP_SIZES["right"], [*written, "kl", "kl_coef"])] if name in WITH_KL else []
    cases += [(name, "right", {"whiten": True}, GROUP_SIZES["right"], written)] if name in PER_TOKEN else []
    cases += [(name, batch, {}, GROUP_SIZES[batch], [*of_batch[batch], "weights"]) for batch in of_batch] if name == "per_reward" else []
    # Weights by which a correction multiplies the gradients of tokens.
    cases += [(name, batch, {}, GROUP_SIZES[batch], [*of_batch[batch], "importance"]) for batch in of_batch] if name == "otb" else []
    cases += [(name, "graded", {"num_roles": 3}, GROUP_SIZES["graded"], [*reads, "role_baselines"])] if name == "rae" else []
  return cases
