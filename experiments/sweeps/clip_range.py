"""GSPO's clip range: the laptop job's band times 1/10, 1/3, 1 and 3, two seeds each.

Command: python -m experiments.launch --config=configs/gspo.py
  --sweep=experiments/sweeps/clip_range.py --max_parallel=2
Score: not yet measured.
"""

LOW, HIGH = 6e-3, 8e-3  # Band of configs/gspo.py, scaled to its short answers.


def sweep(add):
  """Adds the rows."""
  for factor in (0.1, 1 / 3, 1, 3):
    for seed in range(2):
      add({"objective.clip_low": round(LOW * factor, 6), "objective.clip_high": round(HIGH * factor, 6), "seed": seed})
