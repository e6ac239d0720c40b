"""What the processes of a run tell each other."""

import functools
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float

WAIT_SECONDS = 300
"""For the others, when nobody says otherwise."""

_NOTICE = "RECEIVED_PREEMPTION_NOTICE"  # Where XLA's coordination service keeps it.
_stopping = threading.Event()
_asked = itertools.count()  # How often `preempted` was.
_rounds = itertools.count()  # All processes exchange the same things in the same order.


@functools.cache
def run_state() -> Any:
  """JAX's own record of the processes: their number, this one's, and the client that they exchange texts through."""
  from jax._src import distributed  # Not public, and the only way to the exchange of texts; Orbax takes it as well.

  return distributed.global_state


def is_main() -> bool:
  """Whether this is the process that writes."""
  return jax.process_index() == 0


def to_host(tree: Any) -> Any:
  """Arrays, perhaps of all processes' devices together, as whole NumPy arrays in every process. All processes must ask."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return jax.tree.map(_whole, tree)


def _whole(x: Any) -> np.ndarray:
  if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
    return multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(jax.device_get(x))


def share(values_of: Callable[[Sequence[int]], Float[np.ndarray, "m k"]], num_items: int) -> Float[np.ndarray, "n k"]:
  """Values that each are computed by one process and known to all.

  Neighbours go to different processes: what is costly often comes together.

  Args:
    values_of: `(numbers of some items) -> a float32 row each`, also for none. It is called once in each process, with its own.
    num_items: n, the same in all processes.

  Example:
    >>> share(lambda items: np.array([[i, i * i] for i in items], np.float32), 3).tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 4.0]]
  """
  count = jax.process_count()
  own = values_of(range(jax.process_index(), num_items, count))
  if count == 1:
    return own
  padded = np.zeros((-(-num_items // count), own.shape[1]), np.float32)
  padded[: len(own)] = own
  return multihost_utils.process_allgather(padded).transpose(1, 0, 2).reshape(-1, own.shape[1])[:num_items]


def gather_text(text: str) -> list[str]:
  """The texts of all processes, in their order, given this one's; touches no device."""
  number = next(_rounds)
  found = gather_under(f"text/{number}", text)
  if number and run_state().process_id == 0:
    forget(f"text/{number - 1}")  # All have come to this round, so all have read that one.
  return found


def gather_under(key: str, text: str, *, seconds: float = WAIT_SECONDS) -> list[str]:
  """The texts of all processes, in their order, for a thread beside the main one: it keeps to no order of exchanges.

  Args:
    key: the same in all processes, and never used again.
    text: of this one.
    seconds: to wait for the others.

  Raises:
    TimeoutError: one that has not answered by then.
  """
  state = run_state()
  if state.num_processes == 1:
    return [text]
  of = lambda index: f"jaxrl_llm/{key}/{index}"
  state.client.key_value_set(of(state.process_id), text)
  found = []
  for index in range(state.num_processes):
    try:
      found.append(state.client.blocking_key_value_get(of(index), int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise
      waited = f"has not answered within {seconds:g} s (waiting for its {key!r})"
      raise TimeoutError(f"process {index} of {state.num_processes} {waited}") from error
  return found


def forget(key: str) -> None:
  """Removes what was told under a key, or under keys below it, once all processes have read it."""
  state = run_state()
  if state.num_processes > 1:
    state.client.key_value_delete(f"jaxrl_llm/{key}/")


def agree(settings: Mapping[str, Any]) -> None:
  """Refuses to start processes that would not run the same program. The settings, by name, must be fit for JSON.

  Raises:
    ValueError: in all processes, where one has other settings than process 0.
  """
  first, *others = [json.loads(text) for text in gather_text(json.dumps(dict(settings)))]
  for index, other in enumerate(others, 1):
    names = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
    if names:
      shown = "; ".join(f"{name}: {other.get(name)!r}, but {first.get(name)!r} in process 0" for name in names[:3])
      more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
      raise ValueError(f"process {index} was started with {shown}{more}; start all processes with the same command")


def on_main(do: Callable[[], Any]) -> Any:
  """Calls a function in process 0 alone and returns its result, which must be fit for JSON, in all processes.

  Raises:
    Exception: what `do` raises; a ValueError with its message in the other processes.
  """
  state, error = run_state(), None
  if state.num_processes == 1:
    return do()
  found: dict[str, Any] = {}
  if state.process_id == 0:
    try:
      found["value"] = do()
    except Exception as raised:  # All are to hear of it, whatever it is.
      error, found["error"] = raised, str(raised)
  told = json.loads(gather_text(json.dumps(found))[0])
  if error is not None:
    raise error
  if "error" in told:
    raise ValueError(told["error"])
  return told["value"]


def barrier() -> None:
  """Waits for all processes, for five minutes at the most."""
  gather_text("")


def preempted() -> bool:
  """Whether the run is to save and to end, because some process was sent SIGTERM; true from the same call on in all of them.

  All must ask as often, and soon again: they agree on a call that none of them has made yet.
  """
  if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(next(_asked)):  # Which says so once.
    _stopping.set()
  return _stopping.is_set()


def told_to_end() -> bool:
  """Whether some process was sent SIGTERM, and whoever asks is to come to an end soon; known before `preempted` is."""
  if not jax.distributed.is_initialized():
    return False
  try:
    return bool(run_state().client.key_value_try_get(_NOTICE))
  except jax.errors.JaxRuntimeError:  # No notice, or the coordinator is gone.
    return False
