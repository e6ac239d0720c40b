"""The config as it is, five seeds.

Command: python -m experiments.launch --config=configs/gspo.py --sweep=experiments/sweeps/seeds.py --max_parallel=2
Score: configs/gspo.py has it.
"""


def sweep(add):
  """The rows."""
  for seed in range(5):
    add(seed=seed)
