"""Rewards of the project, beside the task's own verifier, which compares the answer.

The config names each as `rewards:FUNCTION=WEIGHT` in `reward.terms`. A reward is a function of a
response and its problem; it runs in a process of its own, which may hang or crash.
"""


def brief(completion, example) -> float:
  """Returns 1 for a response of a digit and the end token, 0 for a longer one.

  Args:
    completion: Response: `text`, `num_tokens` and `stopped` are its parts.
    example: Problem: a row of the task's file.
  """
  return float(completion.stopped and completion.num_tokens <= 2)
