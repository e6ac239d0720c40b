"""Who calls a run's reward functions: the few that cannot hang or crash are called here, all others in processes that may be killed."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.outcome import Outcome, call_here
from jaxrl_llm.rewards.workers import Function, Job, Pool, open_pool
from jaxrl_llm.text_types import Completion

CODE = "code_tests"
"""The name of the reward that runs a response's program; it lives in the sandbox."""

_IMPORTS = {"maths": ("math_verify",)}  # Loaded when a worker starts: a second that is not to count against the first answer's deadline.
_MARGIN_SECONDS = 30.0  # For what surrounds the tests of a program.


class Grader:
  """Calls reward functions, as `rewards.grade` wants it: `(term, completions, examples) -> outcomes`.

  Terms with a spec are called by a pool of worker processes, which is opened at once if there are any; those without one here. A term with
  routes gives each response to the route that its example names. A context manager, which closes the pool.

  Args:
    terms: of the reward.
    num_workers: processes; None is one for each processor, and at least two.
    timeout_s: wall time of a call in a worker, in seconds.
    max_chars: of a response that a worker is sent: its end.
    memory_gb: address space of a worker, in GiB.
    cache_size: values that are remembered.

  Raises:
    ValueError: a function that cannot be built, or a limit out of range.
  """

  def __init__(
    self,
    terms: Sequence[WeightedReward],
    *,
    num_workers: int | None = None,
    timeout_s: float = 10.0,
    max_chars: int = 20_000,
    memory_gb: float = 4.0,
    cache_size: int = 100_000,
  ):
    self.pool: Pool | None = None
    limits = dict(num_workers=num_workers, timeout_s=timeout_s, max_chars=max_chars, memory_gb=memory_gb, cache_size=cache_size)
    flat = [route for term in terms for route in (term.routes or (term,))]
    if functions := {term.name: _function(term) for term in flat if term.spec is not None}:
      self.pool = open_pool(functions, **limits)

  def __call__(
    self, reward: WeightedReward, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]
  ) -> list[Outcome]:
    """Outcomes of one term, one for each response; of a conversation whose environment failed nothing is known, and nobody is asked."""
    if any(completion.failed for completion in completions):
      known = [i for i, completion in enumerate(completions) if completion.failed is None]
      found = dict(zip(known, self(reward, [completions[i] for i in known], [examples[i] for i in known]), strict=True))
      return [found[i] if i in found else Outcome(None, *completion.failed) for i, completion in enumerate(completions)]
    if reward.routes:
      return self._routed(reward, completions, examples)
    if reward.spec is None or self.pool is None:
      return call_here(reward, completions, examples)
    found = self.pool.score([Job(reward.name, *pair) for pair in zip(completions, examples, strict=True)])
    return [Outcome(0.0 if x.value is None else x.value, x.cause, x.detail) for x in found]

  def _routed(self, reward: WeightedReward, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    for route in reward.routes:
      own = [i for i, example in enumerate(examples) if example["reward"] == route.name]
      outcomes |= zip(own, self(route, [completions[i] for i in own], [examples[i] for i in own]), strict=True)
    return [outcomes[i] for i in range(len(examples))]

  def waits_for(self) -> str:
    """What the workers are at, in words; to be asked from another thread."""
    return "reward functions of this process" if self.pool is None else self.pool.under_way()

  def close(self) -> None:
    """Ends the workers."""
    if self.pool is not None:
      self.pool.close()

  def __enter__(self) -> "Grader":
    """The grader itself."""
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """Ends the workers."""
    self.close()


def _function(term: WeightedReward) -> Function:
  spec = term.spec
  if spec.name == CODE:
    return Function("jaxrl_llm.rewards.sandbox:code_tests", dict(spec.settings), timeout_s=spec.settings["total_s"] + _MARGIN_SECONDS)
  return Function("jaxrl_llm.rewards:make", {"name": spec.name, **spec.settings}, imports=_IMPORTS.get(spec.name, ()))
