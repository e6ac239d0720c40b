"""The jobs of a pool, as callers submit them and as workers receive them."""

import hashlib
import pickle
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.messages import did_you_mean, one_line
from jaxrl_llm.text_types import Completion


class Function(NamedTuple):
  """A reward function that every worker builds once.

  Attributes:
    target: Import path `package.module:name`.
    settings: Keyword arguments for a factory at `target` that returns the reward function. None if
      `target` is the reward function itself.
    timeout_s: Time limit of a call, in seconds. None uses the limit of the pool.
    imports: Modules that a worker loads before its first call, so that their import time does not
      count against the first deadline.
  """

  target: str
  settings: Mapping[str, Any] | None = None
  timeout_s: float | None = None
  imports: tuple[str, ...] = ()


class WorkerJob(NamedTuple):
  """One call of a reward function.

  Attributes:
    function: Name of the function in the pool.
    completion: Response to judge.
    example: Row of the dataset, whose values can be pickled.
  """

  function: str
  completion: Completion
  example: Mapping[str, Any]


class Task(NamedTuple):
  """A job in the form that is sent to workers.

  Attributes:
    function: Index of the function in the pool.
    payload: Argument `job` of `worker.call`.
    key: Digest shared by equal jobs. None if the job shares no value.
    timeout_s: Time limit of the call, in seconds.
  """

  function: int
  payload: tuple[str, bytes, int, bool, tuple[tuple, ...], bytes]
  key: bytes | None
  timeout_s: float


def make_tasks(
  jobs: Sequence[WorkerJob], functions: Mapping[str, Function], *, max_chars: int, timeout_s: float, shared: bool
) -> list[Task]:
  """Converts jobs to the form that is sent to workers.

  Args:
    jobs: Calls to make.
    functions: Functions of the pool, by name.
    max_chars: Number of characters sent, from the end of a response.
    timeout_s: Time limit of functions that have none of their own, in seconds.
    shared: Whether equal jobs may share a value.

  Raises:
    ValueError: If a function is unknown, or an example cannot be pickled.
  """
  indices = {name: i for i, name in enumerate(functions)}
  examples: dict[int, tuple[bytes, bytes]] = {}
  tasks = []
  for number, (name, completion, example) in enumerate(jobs):
    if name not in indices:
      hint = did_you_mean(name, indices)
      raise ValueError(f"job {number}: found the function {name!r}, expected one of {', '.join(indices)}{hint}")
    if id(example) not in examples:  # Samples of a group share their example.
      try:
        pickled = pickle.dumps(example, pickle.HIGHEST_PROTOCOL)
      except Exception as error:
        raise ValueError(f"job {number}: its example cannot be sent to a worker ({one_line(error)}), expected plain values") from error
      examples[id(example)] = pickled, hashlib.blake2b(pickled, digest_size=16).digest()
    function, (data, digest) = functions[name], examples[id(example)]
    text, ids = completion.text[-max_chars:], array("q", completion.token_ids).tobytes()
    # Plain tuples, which are unpickled without looking up a class.
    turns = tuple(tuple(turn) for turn in completion.turns)
    key = None
    if shared:
      parts = text.encode("utf-8", "surrogatepass"), ids, repr(turns).encode("utf-8", "surrogatepass") if turns else b"", digest
      sizes = repr((indices[name], completion.num_tokens, completion.stopped, *map(len, parts))).encode()
      key = hashlib.blake2b(b"".join((sizes, *parts)), digest_size=16).digest()
    payload = text, ids, int(completion.num_tokens), bool(completion.stopped), turns, data
    tasks.append(Task(indices[name], payload, key, timeout_s if function.timeout_s is None else function.timeout_s))
  return tasks
