"""The claim of a process on a workdir in a bucket: at most one process writes there.

The claim is a part of the index. Its owner writes the index every few seconds, as a sign of life.
A process that died without giving up its claim, or has lost its network, is replaced once it has
given no sign for a while. The clocks of two machines are never compared. The replaced process,
should it still run, can write no index any more, because the index has left the state it knows.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from jaxrl_llm.workdir.bucket import index as index_lib
from jaxrl_llm.workdir.bucket.index import Index, Owner
from jaxrl_llm.workdir.bucket.store import ConflictError, StorageError, Store, Tag, patiently
from jaxrl_llm.workdir.claim import WorkdirError
from jaxrl_llm.workdir.owner import stat_of

SILENCE_SECONDS = 60.0
"""Time without a sign of life after which a claim may be taken over."""

_LOOK_SECONDS = 2.0


def this_process() -> Owner:
  """Returns this process as the owner of a claim, under a new random name."""
  return Owner(secrets.token_hex(4), socket.gethostname(), _boot(), os.getpid(), _began(os.getpid()))


def is_gone(owner: Owner) -> bool:
  """Returns whether an owner was a process of this machine that has ended.

  A process of another machine, or of a machine that cannot tell, counts as running.
  """
  if owner.host != socket.gethostname() or not owner.boot:
    return False
  return owner.boot != _boot() or _began(owner.pid) != owner.began


def take(
  store: Store,
  owner: Owner,
  *,
  silence: float = SILENCE_SECONDS,
  tell: Callable[[str], None] = lambda line: None,
  sleep: Callable[[float], None] = time.sleep,
) -> tuple[Index, Tag]:
  """Claims a workdir for a process. Returns the index, which names the process as the owner.

  Args:
    store: Objects of the workdir.
    owner: Process to claim the workdir for.
    silence: Time without a sign of life, in seconds, after which another owner is replaced.
    tell: Function called with a line about a long wait or about a replaced owner.
    sleep: Function that waits between two looks at the index of a silent owner.

  Raises:
    WorkdirError: If another process writes there, or the folder holds something else.
    StorageError: If the storage fails for 20 seconds, or does not honour preconditions.
  """
  seen, since = None, time.monotonic()
  while True:
    try:
      known = patiently(lambda: index_lib.read(store))
      if known is None:
        return _create(store, owner)
      index, tag = known
      now = (index.owner, index.serial)
      if index.owner is None or index.owner.token == owner.token or is_gone(index.owner):
        return _replace(store, index, tag, owner)
      if seen is None:
        seen, since = now, time.monotonic()
        tell(f"{index.owner} claims {store.address}; waiting up to {silence:.0f} s for a sign of life")
      elif now != seen:
        raise WorkdirError(
          f"--workdir={store.address}: {index.owner} is writing there; wait until it ends, stop it, or choose another"
        )
      elif time.monotonic() - since >= silence:
        tell(f"{index.owner} has given no sign of life for {silence:.0f} s; its claim is taken over")
        return _replace(store, index, tag, owner)
      sleep(_LOOK_SECONDS)
    except ConflictError:  # Another process was faster. It may have been the last sign of life.
      continue


def _create(store: Store, owner: Owner) -> tuple[Index, Tag]:
  strangers = sorted(name for name, _ in zip(patiently(lambda: list(store.names())), range(1000), strict=False))
  if strangers:
    shown = ", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else "")
    raise WorkdirError(f"--workdir={store.address}: found {shown} but no {index_lib.NAME}, expected no object or a run; choose another")
  index = Index(serial=1, owner=owner)
  tag = _write(store, index, lambda data: store.create(index_lib.NAME, data))
  try:
    patiently(lambda: store.create(index_lib.NAME, index_lib.to_bytes(index)))
  except ConflictError:
    return index, tag
  raise StorageError(
    f"{store.address}: the storage ignores preconditions, so that it cannot keep a second writer out; choose another storage",
    lasting=True,
  )


def _replace(store: Store, index: Index, tag: Tag, owner: Owner) -> tuple[Index, Tag]:
  index = index._replace(serial=index.serial + 1, owner=owner)
  return index, _write(store, index, lambda data: store.replace(index_lib.NAME, data, tag))


def _write(store: Store, index: Index, write: Callable[[bytes], Tag]) -> Tag:
  try:
    return patiently(lambda: write(index_lib.to_bytes(index)))
  except ConflictError:  # With another process, or with a request whose answer was lost.
    known = patiently(lambda: index_lib.read(store))
    if known is None or known[0] != index:
      raise
    return known[1]


def _boot() -> str:
  try:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
  except OSError:  # Not Linux.
    return ""


def _began(pid: int) -> str:
  """Returns the start of a process, which tells it from a later one of the same number."""
  return "".join(stat_of(pid)[19:20])
