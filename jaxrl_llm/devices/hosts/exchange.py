"""Exchange of texts and arrays between the processes of a run."""

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

WAIT_SECONDS = 300
"""Default number of seconds to wait for the other processes."""

_AT_LEAST = 0.1  # Seconds to wait for a text that may be there already.
_MARGIN = 10.0  # Seconds that process 0 may take to answer after all have answered it.
_BLOCK = 64  # Number of messages of a channel that are forgotten together.
_AT_ONCE = 1 << 27  # Bytes of an array that is copied to the host in one piece.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"  # Key of the notice in XLA's coordination service.
_stopping = threading.Event()
_asked = itertools.count()  # Number of calls of `preempted`.
_rounds = itertools.count()  # All processes exchange the same texts in the same order.


@functools.cache
def run_state() -> Any:
  """Returns JAX's own record of the processes.

  It holds their number, the index of this one, and the client through which they exchange texts.
  """
  # This is not public, but there is no other way to exchange texts; Orbax uses it as well.
  from jax._src import distributed

  return distributed.global_state


def is_main() -> bool:
  """Returns whether this is process 0, the one that writes."""
  return jax.process_index() == 0


def to_host(tree: Any) -> Any:
  """Copies a tree of arrays to whole NumPy arrays in every process.

  The arrays may be spread over the devices of all processes, so all processes must call this.
  """
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return jax.tree.map(_whole, tree)


def _whole(x: Any) -> np.ndarray:
  if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
    return multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(jax.device_get(x))


def to_main(x: jax.Array) -> np.ndarray | None:
  """Copies an array to a whole NumPy array in process 0, and returns None elsewhere.

  It may be spread over the devices of all processes, so all processes must call this. What is large
  passes the devices entry by entry of its first axis, such as layer by layer.
  """
  if x.is_fully_addressable or x.is_fully_replicated or x.nbytes <= _AT_ONCE:
    whole = _whole(x)
    return whole if is_main() else None
  whole_on_each = NamedSharding(x.sharding.mesh, PartitionSpec())
  entry = jax.jit(lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), out_shardings=whole_on_each)
  whole = np.empty(x.shape, x.dtype) if is_main() else None
  for i in range(len(x)):
    part = entry(x, i)
    if whole is not None:
      whole[i] = part
  return whole


def share(values_of: Callable[[Sequence[int]], Float[np.ndarray, "m k"]], num_items: int) -> Float[np.ndarray, "n k"]:
  """Computes each value in one process and returns all values in every process.

  Neighbouring items go to different processes, because costly items often come together.

  Args:
    values_of: `(indices of some items) -> one float32 row each`, also for no items. It is called
      once in each process, with the items of that process.
    num_items: Number of items (n), the same in all processes.

  Example:
    >>> share(lambda items: np.array([[i, i * i] for i in items], np.float32), 3).tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 4.0]]
  """
  count = jax.process_count()
  own = values_of(range(jax.process_index(), num_items, count))
  if count == 1:
    return own
  values = np.zeros((num_items, own.shape[1]), np.float32)
  # As text, because devices may be at work on something else, in another order in each process.
  for process, text in enumerate(gather_text(own.astype("<f4").tobytes().hex())):
    values[process::count] = np.frombuffer(bytes.fromhex(text), "<f4").reshape(-1, own.shape[1])
  return values


def gather_text(text: str) -> list[str]:
  """Gathers the texts of all processes, in their order, without touching a device."""
  number = next(_rounds)
  texts = gather_under(f"text/{number}", text)
  if number and run_state().process_id == 0:
    forget(f"text/{number - 1}")  # All have reached this round, so all have read the previous one.
  return texts


def gather_under(key: str, text: str, *, seconds: float = WAIT_SECONDS) -> list[str]:
  """Gathers the texts of all processes, in the order of the processes, under a key of their own.

  Unlike `gather_text`, it needs no common order of exchanges, so a background thread may call it.
  The number of messages grows as the number of processes does.

  Args:
    key: Key of the exchange, the same in all processes and never used again.
    text: Text of this process.
    seconds: Seconds to wait for the others.

  Raises:
    TimeoutError: In all processes, if one has not answered by then; it names the first of those.
  """
  state = run_state()
  if state.num_processes == 1:
    return [text]
  of = lambda index: f"jaxrl_llm/{key}/{index}"
  state.client.key_value_set(of(state.process_id), text)
  # Process 0 gathers and answers all others at once. If each process read from each, messages would
  # grow with the square of their number.
  if state.process_id == 0:
    answer = _gathered(of, text, seconds)
    state.client.key_value_set(of("all"), json.dumps(answer))
  else:
    answer = json.loads(_received(of("all"), seconds) or _late_answer(of, seconds))
  if "missing" in answer:
    waited = f"has not answered within {seconds:g} s (waiting for its {key!r})"
    raise TimeoutError(f"process {answer['missing']} of {state.num_processes} {waited}")
  return answer["texts"]


def _gathered(of: Callable[[int | str], str], text: str, seconds: float) -> dict[str, Any]:
  """Returns the texts of all processes, or the first of those that have not answered in time."""
  texts, until = [text], time.monotonic() + seconds
  for index in range(1, run_state().num_processes):
    received = _received(of(index), max(until - time.monotonic(), _AT_LEAST))
    if received is None:
      return {"missing": index}
    texts.append(received)
  return {"texts": texts}


def _late_answer(of: Callable[[int | str], str], seconds: float) -> str:
  """Waits for an answer of process 0 that has not come in time, because it came late itself.

  It then waits for the others from that time on, and answers in any case.
  """
  has_come = _received(of(0), _AT_LEAST) is not None
  return (has_come and _received(of("all"), seconds + _MARGIN)) or json.dumps({"missing": 0})


def _received(key: str, seconds: float) -> str | None:
  """Returns the text under a key, or None if there is none within the time."""
  try:
    return run_state().client.blocking_key_value_get(key, int(seconds * 1000))
  except jax.errors.JaxRuntimeError as error:
    if "DEADLINE_EXCEEDED" not in str(error):
      raise
    return None


def forget(key: str) -> None:
  """Removes the texts under a key, or under keys below it, once all processes have read them."""
  state = run_state()
  if state.num_processes > 1:
    state.client.key_value_delete(f"jaxrl_llm/{key}/")


class Channel:
  """Messages that process 0 sends to all others, which get each of them in its order.

  They touch no device, so background threads may exchange them.

  Args:
    name: Name of the channel, the same in all processes and never used again.
  """

  def __init__(self, name: str):
    self._name, self._number = f"jaxrl_llm/channel/{name}", 0

  def send(self, message: bytes) -> None:
    """Sends a message, and waits for those who have not read the last but one 64."""
    state, (block, number) = run_state(), divmod(self._number, _BLOCK)
    if not number and block > 1:
      for process in range(1, state.num_processes):
        state.client.blocking_key_value_get(f"{self._name}/read/{block - 2}/{process}", WAIT_SECONDS * 1000)
      for done in (f"{block - 2}", f"read/{block - 2}"):
        state.client.key_value_delete(f"{self._name}/{done}/")
    state.client.key_value_set_bytes(f"{self._name}/{block}/{number}", message)
    self._number += 1

  def receive(self, seconds: float) -> bytes | None:
    """Returns the next message; None if there is none within the time."""
    state, (block, number) = run_state(), divmod(self._number, _BLOCK)
    try:
      message = state.client.blocking_key_value_get_bytes(f"{self._name}/{block}/{number}", int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise
      return None
    self._number += 1
    if number == _BLOCK - 1:
      state.client.key_value_set(f"{self._name}/read/{block}/{state.process_id}", "")
    return message


def agree(settings: Mapping[str, Any]) -> None:
  """Refuses to start processes that would not run the same program.

  Args:
    settings: Settings by name, with values that JSON can hold.

  Raises:
    ValueError: In all processes, if one has other settings than process 0.
  """
  first, *others = [json.loads(text) for text in gather_text(json.dumps(dict(settings)))]
  for index, other in enumerate(others, 1):
    names = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
    if names:
      shown = "; ".join(f"{name}: {other.get(name)!r}, but {first.get(name)!r} in process 0" for name in names[:3])
      more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
      raise ValueError(f"process {index} was started with {shown}{more}; start all processes with the same command")


def on_main(do: Callable[[], Any]) -> Any:
  """Calls a function in process 0 alone and returns its result in all processes.

  Args:
    do: Function without arguments, whose result JSON can hold.

  Raises:
    Exception: The exception that `do` raises; the other processes raise a ValueError with its
      message.
  """
  state, error = run_state(), None
  if state.num_processes == 1:
    return do()
  outcome: dict[str, Any] = {}
  if state.process_id == 0:
    try:
      outcome["value"] = do()
    except Exception as raised:  # The other processes wait for an outcome of any kind.
      error, outcome["error"] = raised, str(raised)
  received = json.loads(gather_text(json.dumps(outcome))[0])
  if error is not None:
    raise error
  if "error" in received:
    raise ValueError(received["error"])
  return received["value"]


def barrier() -> None:
  """Waits for all processes, for at most five minutes."""
  gather_text("")


def preempted() -> bool:
  """Returns whether the run should save and end because a process was sent SIGTERM.

  It becomes true at the same call in all processes, and stays true. All processes must call it
  equally often, and regularly: they agree on a call that none of them has made yet.
  """
  # The sync point is reported only once.
  if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(next(_asked)):
    _stopping.set()
  return _stopping.is_set()


def told_to_end() -> bool:
  """Returns whether a process was sent SIGTERM, so that the caller should come to an end soon.

  It becomes true earlier than `preempted`.
  """
  if not jax.distributed.is_initialized():
    return False
  try:
    return bool(run_state().client.key_value_try_get(_NOTICE))
  except jax.errors.JaxRuntimeError:  # No notice, or the coordinator is gone.
    return False
