"""What a pool is asked."""

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
    target: `package.module:name`.
    settings: None where the name is the reward function itself; else the keyword arguments of the call that makes one.
    cached: whether equal completions of equal examples may share one value; False for a function that draws or asks somebody.
    timeout_s: its deadline, in seconds; None takes the pool's.
    imports: modules to load beforehand, where it would load them in its first call, within the deadline.
  """

  target: str
  settings: Mapping[str, Any] | None = None
  cached: bool = True
  timeout_s: float | None = None
  imports: tuple[str, ...] = ()


class Job(NamedTuple):
  """One call.

  Attributes:
    function: key of the pool's functions.
    completion: the response.
    example: row of the dataset; its values can be pickled.
  """

  function: str
  completion: Completion
  example: Mapping[str, Any]


class Task(NamedTuple):
  """A job as workers are sent it.

  Attributes:
    function: which of the pool's functions.
    payload: as `worker.call` reads it.
    key: what equal jobs share; None where nothing is shared.
    timeout_s: its deadline, in seconds.
  """

  function: int
  payload: tuple[str, bytes, int, bool, tuple[tuple, ...], bytes]
  key: bytes | None
  timeout_s: float


def make_tasks(jobs: Sequence[Job], functions: Mapping[str, Function], *, max_chars: int, timeout_s: float, shared: bool) -> list[Task]:
  """Jobs as workers are sent them.

  Args:
    jobs: the calls.
    functions: the pool's functions, by name.
    max_chars: length of the end of a text that is sent.
    timeout_s: deadline of functions that have none of their own, in seconds.
    shared: whether equal jobs may share a value.

  Raises:
    ValueError: an unknown function, or an example that cannot be pickled.
  """
  indices = {name: i for i, name in enumerate(functions)}
  examples: dict[int, tuple[bytes, bytes]] = {}
  tasks = []
  for number, (name, completion, example) in enumerate(jobs):
    if name not in indices:
      hint = did_you_mean(name, indices)
      raise ValueError(f"job {number}: found the function {name!r}, expected one of {', '.join(indices)}{hint}")
    if id(example) not in examples:  # The samples of a group share theirs.
      try:
        pickled = pickle.dumps(example, pickle.HIGHEST_PROTOCOL)
      except Exception as error:
        raise ValueError(f"job {number}: its example cannot be sent to a worker ({one_line(error)}), expected plain values") from error
      examples[id(example)] = pickled, hashlib.blake2b(pickled, digest_size=16).digest()
    function, (data, digest) = functions[name], examples[id(example)]
    text, ids = completion.text[-max_chars:], array("q", completion.token_ids).tobytes()
    turns = tuple(tuple(turn) for turn in completion.turns)  # Plain: unpickled without a class to look up.
    key = None
    if shared and function.cached:
      parts = text.encode("utf-8", "surrogatepass"), ids, repr(turns).encode("utf-8", "surrogatepass") if turns else b"", digest
      sizes = repr((indices[name], completion.num_tokens, completion.stopped, *map(len, parts))).encode()
      key = hashlib.blake2b(b"".join((sizes, *parts)), digest_size=16).digest()
    payload = text, ids, int(completion.num_tokens), bool(completion.stopped), turns, data
    tasks.append(Task(indices[name], payload, key, timeout_s if function.timeout_s is None else function.timeout_s))
  return tasks
