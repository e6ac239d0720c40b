"""The loaded form of a task: its problems, demonstrations and rewards."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.tasks.files.report import Report
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.text_types import RewardFn, Tokenizer


class Task(NamedTuple):
  """A loaded task.

  Attributes:
    name: Name of the task, as passed to `tasks.make`.
    tokenizer: The policy's tokenizer.
    train: Training problems. A row has `question`, `answer`, `level`, `prompt` (the text the policy
      is given) and `response` ("" except in demonstrations). Empty for a test-only set.
    test: Problems held out from training and demonstrations.
    demonstrations: Training problems with responses to imitate, right or wrong.
    rewards: Names of the task's reward functions. The first is its verifier, which gives 1 for a
      right response, else 0.
    form_reward: Name of the reward for the form of an answer; None if the task has none.
    step_rewards: Function `(row, response ids) -> [(index of a step's last token, reward), ...]`;
      None if there is no verifier of steps.
    verifiers: Reward functions that the task itself provides, by their names in `rewards`. They are
      module-level functions, so that they can be sent to another process by name.
    routed: Whether each row names its verifier, one of `rewards`, in `reward`, as in a mixture.
    report: Counts of rows read, kept and dropped; None for generated problems, which cannot be bad.
    fingerprint: Digest of all prompts, answers and responses, so that a run does not resume with
      other problems than it began with; None for generated problems, whose version identifies them.
  """

  name: str
  tokenizer: Tokenizer
  train: Sequence[Row]
  test: Sequence[Row]
  demonstrations: Sequence[Row]
  rewards: tuple[str, ...]
  form_reward: str | None = None
  step_rewards: Callable[[Row, Sequence[int]], list[tuple[int, float]]] | None = None
  verifiers: Mapping[str, RewardFn] = {}
  routed: bool = False
  report: Report | None = None
  fingerprint: str | None = None
