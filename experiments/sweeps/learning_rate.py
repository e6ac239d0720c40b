"""Search for the learning rate and for the number of updates per batch of rollouts.

Command: python -m experiments.launch --config=configs/gspo.py
  --sweep=experiments/sweeps/learning_rate.py --search=tpe --num_trials=20
Score: not yet measured.
"""


def space(h):
  """Returns the distributions to draw from."""
  return {"learner.learning_rate": h.log_uniform(5e-5, 2e-3), "learner.updates_per_rollout": h.choice((4, 8))}
