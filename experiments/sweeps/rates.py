"""Eight learning rates of RL, which share one warm start.

Command: python -m experiments.launch --config=configs/gspo.py:tiny
  --sweep=experiments/sweeps/rates.py --max_parallel=2
"""


def sweep(add):
  """Adds one row for each learning rate."""
  for rate in (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3):
    add({"learner.learning_rate": rate})
