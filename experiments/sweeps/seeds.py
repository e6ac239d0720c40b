"""The unchanged config with five seeds.

Command: python -m experiments.launch --config=configs/gspo.py
  --sweep=experiments/sweeps/seeds.py --max_parallel=2
Score: documented in configs/gspo.py.
"""


def sweep(add):
  """Adds the rows."""
  for seed in range(5):
    add(seed=seed)
