"""Recorder of `peers.json`: results of verl 0.9.1 (Apache-2.0) on small random inputs.

`test_advantages_peers.py` compares with them. No test runs this module.

  python tests/advantages/record_peers.py VERL > tests/advantages/peers.json

VERL is the folder of an unpacked verl. Python needs torch. Only the named functions are taken out
of verl's files, so nothing else of verl needs to be importable.
"""

import ast
import json
import pathlib
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np

MASK = [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [1, 0, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0]]
LENGTHS = [5, 3, 1, 4, 2, 2]  # Mask for GDPO, because verl's version does not support holes.


def take(path: pathlib.Path, names: set[str], space: dict) -> None:
  """Defines the named functions of a file in `space`, without decorators and annotations."""
  for node in ast.parse(path.read_text(encoding="utf-8")).body:
    if isinstance(node, ast.FunctionDef) and node.name in names:
      node.decorator_list, node.returns = [], None
      for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
        if argument is not None:
          argument.annotation = None
      exec(compile(ast.Module([node], []), str(path), "exec"), space)


def main(verl: pathlib.Path) -> None:
  """Prints the inputs, and the counted entries of each output in reading order."""
  import torch

  whitening = {"torch": torch}
  take(verl / "utils/torch_functional.py", {"masked_sum", "masked_mean", "masked_var", "masked_whiten"}, whitening)
  space = {"torch": torch, "np": np, "defaultdict": defaultdict, "verl_F": SimpleNamespace(**whitening)}
  estimators = ("grpo_outcome", "gdpo_outcome", "rloo_outcome", "reinforce_plus_plus_outcome", "reinforce_plus_plus_baseline_outcome")
  take(verl / "trainer/ppo/core_algos.py", {"compute_gae_advantage_return", *(f"compute_{x}_advantage" for x in estimators)}, space)
  grpo, gdpo, rloo, reinforce, baseline = (space[f"compute_{name}_advantage"] for name in estimators)
  gae = space["compute_gae_advantage_return"]

  rng = np.random.default_rng(0)
  # Multiples of 1/64, because verl's GDPO reads its rewards in float32.
  draw = lambda *shape: np.round(64 * rng.standard_normal(shape)) / 64
  inputs = {"rewards": draw(6), "second_rewards": draw(6), "token_rewards": draw(6, 5), "values": draw(6, 5)}
  mask, groups = torch.tensor(MASK, dtype=torch.float64), np.repeat(["a", "b"], 3)
  tokens, values = torch.tensor(inputs["token_rewards"]), torch.tensor(inputs["values"])
  outcome = torch.zeros_like(mask)
  for row, counts in enumerate(MASK):
    outcome[row, 4 - counts[::-1].index(1)] = inputs["rewards"][row]

  outputs = {
    "grpo": grpo(outcome, mask, groups)[0],
    "grpo_without_std": grpo(outcome, mask, groups, norm_adv_by_std_in_grpo=False)[0],
    "rloo": rloo(outcome, mask, groups)[0],
    "reinforce_plus_plus_baseline": baseline(outcome, mask, groups)[0],
    "whiten": whitening["masked_whiten"](tokens, mask),
    "whiten_without_shift": whitening["masked_whiten"](tokens, mask, shift_mean=False),
  }
  names = "reinforce_plus_plus", "reinforce_plus_plus_returns"
  outputs |= zip(names, reinforce(tokens, mask, config=SimpleNamespace(gamma=0.9)))
  for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
    outputs |= zip((f"gae_{gamma}_{lam}", f"gae_returns_{gamma}_{lam}"), gae(tokens, values, mask, gamma, lam))
  recorded = {name: x[mask > 0].tolist() for name, x in outputs.items()}

  for name, lengths in {"gdpo": LENGTHS, "gdpo_one_token": [1] * 6}.items():
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(int)
    result = gdpo(
      torch.zeros(mask.shape),
      torch.tensor(mask, dtype=torch.float32),
      groups,
      config={"gdpo_reward_keys": ["rewards", "second_rewards"], "gdpo_reward_weights": [1.0, 0.5]},
      non_tensor_batch=inputs,
      batch={"prompts": torch.zeros(6, 1), "attention_mask": torch.tensor(np.concatenate([np.ones((6, 1), int), mask], axis=1))},
    )
    recorded[name] = result[0][:, 0].tolist()

  arrays = {"mask": MASK, "lengths": LENGTHS, **{name: x.tolist() for name, x in inputs.items()}, **recorded}
  lines = [f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in arrays.items()]
  print("{", ",\n".join(lines), "}", sep="\n")


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
