"""What a policy is trained on, loaded."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.tasks.files.report import Report
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.text_types import RewardFn, Tokenizer


class Task(NamedTuple):
  """A task, loaded.

  Attributes:
    name: as in `tasks.make`.
    tokenizer: text to ids and back; the policy's.
    train: problems to train on. A row has `question`, `answer`, `level`, `prompt` (what the policy is given) and `response`
      ("" but in demonstrations). Empty for a set that is meant for tests only.
    test: problems held out from training and demonstrations.
    demonstrations: training problems with responses to imitate, right or wrong.
    rewards: names of the reward functions the task is meant for. The first is its verifier, 1 for a right response, else 0.
    form_reward: name of the reward for the form of an answer; None where the task has none.
    step_rewards: `(row, response's ids) -> [(index of a step's last token, reward), ...]`; None where no verifier of steps exists.
    verifiers: reward functions that the task brings along, by the names that `rewards` has for them; functions of a module, so that a
      process can be told which.
    routed: whether each row says in `reward` which one of `rewards` is its verifier, as in a mixture.
    report: what was read, kept and dropped; None for generated problems, of which none can be bad.
    fingerprint: changes with any prompt, answer or response, so that no run goes on with other problems than it began with; None for
      generated problems, whose version says as much.
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
