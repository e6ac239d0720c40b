"""Three objectives with the constants of their papers, five seeds each.

Use it with configs/grpo.py, whose own hyper-parameters suit GRPO.

Command: python -m experiments.launch --config=configs/grpo.py
  --sweep=experiments/sweeps/objectives.py --max_parallel=2
Score: not yet measured.
"""


def get_hyper(h):
  """Returns the rows."""
  return h.product(
    [
      h.chainit(
        [
          h.sweep("objective.name", ("grpo", "sapo")),
          # The paper's band suits answers of thousands of tokens; this one is scaled to the laptop
          # job's answers.
          [{"objective.name": "gspo", "objective.clip_low": 6e-3, "objective.clip_high": 8e-3}],
        ]
      ),
      h.sweep("seed", range(5)),
    ]
  )
