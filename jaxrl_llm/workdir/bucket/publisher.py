"""The publisher: a thread that sends a run's mirror to the bucket while the run goes on.

What it has sent is always a state that the run could have been killed in: the index names a
checkpoint only together with the rows that came before it. Storage that fails is tried again, and
everything waits on the local disk meanwhile.
"""

import hashlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl_llm.messages import one_line
from jaxrl_llm.workdir.bucket import index as index_lib
from jaxrl_llm.workdir.bucket import objects as objects_lib
from jaxrl_llm.workdir.bucket.address import Mirror
from jaxrl_llm.workdir.bucket.download import MANIFEST, PAGES, files_of
from jaxrl_llm.workdir.bucket.index import Index, Step
from jaxrl_llm.workdir.bucket.store import ConflictError, StorageError, Store, Tag
from jaxrl_llm.workdir.checkpoint import manifest
from jaxrl_llm.workdir.checkpoint.retention import Save, kept

_LOOK_SECONDS = 1.0  # Time between two looks at the mirror.
_BEAT_SECONDS = 10.0  # Maximum time between two writes of the index, which are signs of life.
_WAITS = (0.5, 15.0)  # First and last wait before a failed request is tried again, in seconds.
_THREADS = 4  # Files of a checkpoint sent at a time.
_TOLD_SECONDS = 5.0  # Failures that are over sooner are not worth a line.


class LostClaimError(Exception):
  """The takeover of the workdir by another process. One line."""


class Publisher:
  """Sends a mirror to a bucket, as long as this process owns the claim.

  Args:
    store: Objects of the workdir.
    mirror: Local folders.
    name: Name of the mirror.
    index: Index that names this process as the owner.
    tag: State of the index in the bucket.
    retention: Keyword arguments of `retention.kept`, for the checkpoints in the bucket.
    tell: Function called with lines about storage that fails or answers again.
    lost: Function called once if another process has taken the workdir over.
  """

  def __init__(
    self, store: Store, mirror: Mirror, name: str, index: Index, tag: Tag, *, retention: Mapping[str, Any],
    tell: Callable[[str], None], lost: Callable[[], None],
  ):  # fmt: skip
    self._store, self._mirror, self._name, self._retention = store, mirror, name, retention
    self._index, self._tag, self._tell, self._lost, self._beat = index, tag, tell, lost, time.monotonic()
    self._seen: dict[str, objects_lib.Signature] = {}
    self._pages: dict[str, objects_lib.Signature] = {}
    self._sent: dict[int, Step] = {}  # Checkpoints that the index does not name yet.
    # Folder and files in the bucket of each checkpoint that is being sent.
    self._begun: dict[int, tuple[str, set[str]]] = {}
    self._dropped: set[str] = set()  # Objects and folders to delete.
    self._numbers, self._lock = itertools.count(1), threading.Lock()
    # Newest checkpoint of the run as it began, until the index knows it.
    self._resumed: int | None = None
    self._wake, self._enabled, self._ending = threading.Event(), False, False
    self._failing, self._told, self.failure = None, False, ""
    self.is_lost = False
    self.progressed = time.monotonic()  # Time at which something was last sent that stays.
    self._threads = [threading.Thread(target=each, daemon=True, name=f"bucket-{each.__name__}") for each in (self._publish, self._upload)]
    for thread in self._threads:
      thread.start()

  def enable(self) -> None:
    """Begins to send. Before, the publisher only gives signs of life.

    Checkpoints in the bucket that the run has not resumed from, although they are newer, are set
    aside: those are damaged.
    """
    self._resumed = max(manifest.whole_steps(self._mirror.run / "checkpoints"), default=-1)
    self._enabled = True
    self._wake.set()

  def unsent(self) -> list[str]:
    """Returns the paths of what is not in the bucket yet: checkpoints as folders, and files."""
    # Until the first cycle, the index may name a damaged checkpoint of a new one's number.
    if self._resumed is not None:
      return [index_lib.NAME]
    steps = [f"checkpoints/{number}" for number in self._unsent_steps()] + [f"checkpoints/{number}" for number in self._sent]
    kept_parts, pieces = objects_lib.collect(self._mirror.run, self._index.files, dict(self._seen))
    gone = self._index.files.keys() - kept_parts.keys()
    return steps + [piece.path for piece in pieces] + sorted(gone)

  def close(self, *, patience: float = 120.0) -> list[str]:
    """Sends the rest and gives the claim up.

    Args:
      patience: Time in seconds without any answer of the storage after which the rest stays unsent.

    Returns:
      What is not in the bucket, as `unsent` does.
    """
    self.progressed = time.monotonic()
    while self._enabled and not self.is_lost and self.unsent() and time.monotonic() - self.progressed < patience:
      self._wake.set()
      time.sleep(0.05)
    self._ending = True
    self._wake.set()
    for thread in self._threads:
      thread.join(timeout=patience)
    if self.is_lost:
      return []
    left = self.unsent() if self._enabled else []
    until = time.monotonic() + (2.0 if left else patience)
    while True:
      try:
        if self._enabled and not left:
          self._send_pages()
          self._delete()
        self._commit(self._index._replace(owner=None))
        return left
      except (StorageError, LostClaimError) as error:
        self.failure = str(error)
        if time.monotonic() > until:
          return left
        time.sleep(0.5)

  def _publish(self) -> None:
    """Runs the thread that sends files and writes the index."""
    while not self._ending:
      self._wake.wait(_LOOK_SECONDS)
      self._wake.clear()
      try:
        self._cycle()
        self._answered()
      except LostClaimError as error:
        self.is_lost = True
        self._tell(str(error))
        self._lost()
        return
      # A defect must not stop a run, nor go unnoticed.
      except Exception as error:
        self._failed(error)

  def _cycle(self) -> None:
    sent = dict(self._sent)  # Before the rows are read, so that the rows cover these checkpoints.
    before = index = self._index
    resumed, seen = self._resumed, dict(self._seen)
    if self._enabled:
      aside = {} if resumed is None else {number: step for number, step in index.steps.items() if number > resumed}
      files, pieces = objects_lib.collect(self._mirror.run, index.files, seen)
      files = objects_lib.send(pieces, files, self._put_and_beat, self._new_name)
      steps = {number: step for number, step in (index.steps | sent).items() if aside.get(number) != step}
      stay = kept([Save(**step.save) for step in steps.values()], **self._retention) if steps else set()
      steps = {number: step for number, step in steps.items() if number in stay}
      index = index._replace(
        files=files, steps=steps, aside=(*index.aside, *(step.at for step in aside.values())), mirror=self._name
      )
    if index != before:
      self._commit(index)
      self.progressed = time.monotonic()
    else:
      self._beat_if_due()
    if not self._enabled:
      return
    self._seen = seen
    if self._resumed == resumed:
      self._resumed = None
    self._dropped |= index_lib.names_of(before) - index_lib.names_of(index)
    old = [(number, step) for number, step in (*before.steps.items(), *sent.items()) if index.steps.get(number) != step]
    self._dropped |= {f"{step.at}/" for _, step in old if step.at not in index.aside}
    with self._lock:
      self._sent = {number: step for number, step in self._sent.items() if sent.get(number) != step}
    self._send_pages()
    self._delete()

  def _beat_if_due(self) -> None:
    if time.monotonic() - self._beat >= _BEAT_SECONDS:
      self._commit(self._index)

  def _commit(self, index: Index) -> None:
    """Writes the index, unless another process has taken it over.

    A request that seemed to fail may have been carried out, and then changes the state of the
    index, so that the next one has another precondition.
    """
    index = index._replace(serial=self._index.serial + 1)
    try:
      self._tag = self._store.replace(index_lib.NAME, index_lib.to_bytes(index), self._tag)
    except (ConflictError, FileNotFoundError):
      known, own = index_lib.read(self._store), self._index.owner
      if known is None or known[0].owner is None or known[0].owner.token != own.token:
        by = "deleted" if known is None else f"taken over by {known[0].owner}" if known[0].owner else "taken over"
        if known is not None and known[0] == index:  # Given up by this process itself.
          self._index, self._tag = index, known[1]
          return
        raise LostClaimError(
          f"{self._store.address} was {by}, which this run has noticed only now; it stops, and its own steps stay in {self._mirror.run}"
        ) from None
      self._tag = known[1]
      if known[0] != index:
        index = index._replace(serial=max(index.serial, known[0].serial) + 1)
        self._tag = self._store.replace(index_lib.NAME, index_lib.to_bytes(index), self._tag)
    self._index, self._beat = index, time.monotonic()

  def _upload(self) -> None:
    """Runs the thread that sends checkpoints."""
    wait = _WAITS[0]
    while not self._ending and not self.is_lost:
      steps = self._unsent_steps() if self._enabled else []
      if not steps:
        time.sleep(0.2)
        continue
      try:
        self._send_step(steps[0])
        wait = _WAITS[0]
      except FileNotFoundError:  # Retention has removed the checkpoint before it could be held.
        continue
      except Exception as error:
        self._failed(error)
        time.sleep(wait)
        wait = min(2 * wait, _WAITS[1])

  def _unsent_steps(self) -> list[int]:
    """Returns the numbers of the checkpoints to send, the newest first."""
    folder, known = self._mirror.run / "checkpoints", self._index.steps | self._sent
    local = [number for number in manifest.whole_steps(folder) if number not in known]
    if not local:
      return []
    saves = {number: Save(**step.save) for number, step in known.items()}
    try:
      saves |= {number: manifest.facts(folder / str(number))[0] for number in local}
    except FileNotFoundError:
      return []
    stay = kept(list(saves.values()), **self._retention)
    return sorted((number for number in local if number in stay), reverse=True)

  def _send_step(self, number: int) -> None:
    folder = self._mirror.outgoing / str(number)
    if number not in self._begun:
      shutil.rmtree(folder, ignore_errors=True)
      _hold(self._mirror.run / "checkpoints" / str(number), folder)
      self._begun[number] = f"checkpoints/{number}-{self._new_token()}", set()
    at, done = self._begun[number]
    text = (folder / MANIFEST).read_bytes()
    save, size = manifest.facts(folder)

    def put(name: str) -> None:
      self._put(f"{at}/{name}", folder / name)
      done.add(name)  # Another try leaves it out.

    with ThreadPoolExecutor(_THREADS) as threads:
      list(threads.map(put, sorted(files_of(text).keys() - done)))
    self._put(f"{at}/{MANIFEST}", text)
    self._begun.pop(number)
    with self._lock:
      self._sent = self._sent | {number: Step(at, hashlib.sha256(text).hexdigest(), size, save._asdict())}
    shutil.rmtree(folder, ignore_errors=True)
    self._wake.set()

  def _send_pages(self) -> None:
    """Sends what can be made again, for a browser to open."""
    for name in PAGES:
      path = self._mirror.run / name
      if path.is_file() and self._pages.get(name) != (now := objects_lib.signature(path)):
        self._put_and_beat(name, path.read_bytes())
        self._pages[name] = now

  def _delete(self) -> None:
    """Deletes objects that the index does not name any more."""
    for name in sorted(self._dropped):
      names = list(self._store.names(name.rstrip("/"))) if name.endswith("/") else [name]
      self._store.delete(names)
      self._dropped.discard(name)

  def _put(self, name: str, data: bytes | Path) -> None:
    self._store.put(name, data)
    self.progressed = time.monotonic()

  def _put_and_beat(self, name: str, data: bytes) -> None:
    self._beat_if_due()  # Between the files, because together they may take long.
    self._put(name, data)

  def _new_token(self) -> str:
    return f"{self._index.owner.token}-{next(self._numbers)}"

  def _new_name(self, path: str) -> str:
    """Returns a name for an object that no other object has ever had."""
    return f"files/{path}/{self._new_token()}"

  def _failed(self, error: Exception) -> None:
    self.failure = one_line(error, typed=not isinstance(error, StorageError))
    now = time.monotonic()
    self._failing = self._failing or now
    if not self._told and now - self._failing >= _TOLD_SECONDS:
      self._told = True
      self._tell(f"{self._store.address} does not answer ({self.failure}); the run goes on, and what is new waits in {self._mirror.run}")
    time.sleep(_WAITS[0])

  def _answered(self) -> None:
    if self._told:
      self._tell(f"{self._store.address} answers again after {time.monotonic() - self._failing:.0f} s; what waited is being sent")
    self._failing, self._told = None, False


def _hold(folder: Path, place: Path) -> None:
  """Keeps the files of a checkpoint while it is sent, although the run may delete it.

  Raises:
    FileNotFoundError: If the run was faster.
  """
  for path in sorted(folder.rglob("*")):
    target = place / path.relative_to(folder)
    if path.is_dir():
      target.mkdir(parents=True, exist_ok=True)
      continue
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
      os.link(path, target)
    except FileNotFoundError:
      raise
    except OSError:  # No hard links on this file system.
      shutil.copyfile(path, target)
  if not (place / MANIFEST).is_file():
    raise FileNotFoundError(place / MANIFEST)
