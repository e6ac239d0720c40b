"""A run whose workdir is in a bucket: claim, mirror and publisher, from start to end."""

import contextlib
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.workdir import disk
from jaxrl_llm.workdir.bucket import address as address_lib
from jaxrl_llm.workdir.bucket import claim as claim_lib
from jaxrl_llm.workdir.bucket import download
from jaxrl_llm.workdir.bucket.address import Address, Mirror
from jaxrl_llm.workdir.bucket.index import NAME, Index, content_digest, names_of
from jaxrl_llm.workdir.bucket.store import StorageError, Store, patiently
from jaxrl_llm.workdir.claim import WorkdirError, lock, unlock

_LISTED = ("checkpoints", "files")  # Folders of objects that only the index gives a meaning.


class Session:
  """A claimed workdir in a bucket, as made by `opened`.

  Attributes:
    workdir: Local folder in which the run works.
    address: Address of the workdir.
  """

  def __init__(self, address: Address, mirror: Mirror, publisher: Any):
    self.workdir, self.address, self._publisher, self._left = mirror.run, address, publisher, []
    self._clean, self._enabled = mirror.state / "clean", False

  def enable(self) -> None:
    """Begins to send, once the run has resumed from its checkpoint."""
    self._clean.unlink(missing_ok=True)
    self._enabled = True
    self._publisher.enable()

  def close(self, *, patience: float) -> None:
    """Sends the rest and gives up the claim; see `Publisher.close`."""
    try:
      self._left = self._publisher.close(patience=patience)
    except KeyboardInterrupt:
      self._left, self._publisher.failure = self._publisher.unsent() or ["the end of the run"], "interrupted"
    if self._enabled and self.is_sent:
      self._clean.touch()

  def status(self, status: int) -> int:
    """Returns the exit status of the run, and prints what is not in the bucket.

    Args:
      status: Exit status of the run itself. A finished run whose workdir is not in the bucket ends
        with 1.
    """
    if self._publisher.is_lost:
      return 1
    if self._left:
      shown = ", ".join(self._left[:3]) + (f" and {len(self._left) - 3} more" if len(self._left) > 3 else "")
      print(
        f"error: {shown} not in {self.address} yet ({self._publisher.failure}); "
        f"all of it is in {self.workdir}, and the same command on this machine sends it",
        file=sys.stderr,
      )
      return status or 1
    return status

  @property
  def is_sent(self) -> bool:
    """Whether the bucket has all that the mirror has."""
    return not self._left and not self._publisher.is_lost


@contextlib.contextmanager
def opened(
  address: Address, *, retention: Mapping[str, Any], tell: Callable[[str], None], patience: float = 120.0,
  silence: float = claim_lib.SILENCE_SECONDS, seconds: float = 30.0,
) -> Iterator[Session]:  # fmt: skip
  """Claims a workdir in a bucket and brings its mirror up to date. At the end, sends the rest.

  If the mirror has published last, or nothing was published since it was brought, it is at least as
  new as the bucket and stays as it is.
  Otherwise the bucket wins: the mirror becomes a copy of it, and what it holds is set aside unless
  all of it was sent.

  Args:
    address: Address of the workdir.
    retention: Keyword arguments of `retention.kept`, for the checkpoints in the bucket.
    tell: Function called with lines for the user.
    patience: Time in seconds without an answer of the storage after which the end does not wait.
    silence: Time in seconds without a sign of life after which another owner is replaced.
    seconds: Maximum time of one request.

  Raises:
    WorkdirError: If another process writes there, the folder holds something else, or the storage
      does not answer. Also if obstore is not installed.
  """
  mirror = address_lib.mirror_of(address)
  try:
    mirror.state.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise WorkdirError(f"--workdir={address}: its local mirror {mirror.state.parent} cannot be made ({error.strerror})") from error
  try:
    lock(mirror.state)
  except WorkdirError as error:
    raise WorkdirError(str(error).replace(str(mirror.state), str(address))) from error
  try:
    store = Store(address, seconds=seconds)
    index, tag = claim_lib.take(store, claim_lib.this_process(), silence=silence, tell=tell)
    from jaxrl_llm.workdir.bucket.publisher import Publisher  # Late: it imports jax.

    name = _name_of(mirror)
    # The run then stops as if it were preempted.
    lost = lambda: os.kill(os.getpid(), signal.SIGTERM)
    publisher = Publisher(store, mirror, name, index, tag, retention=retention, tell=tell, lost=lost)
    session = Session(address, mirror, publisher)
    try:
      _bring(store, mirror, name, index, tell)
      _sweep(store, index)
      yield session
    finally:
      session.close(patience=patience)
      if index.mirror is None and not (mirror.run / "config.json").exists() and session.is_sent:
        # Nothing has begun: the next command starts afresh.
        with contextlib.suppress(StorageError):
          store.delete([NAME])
  except (MissingPackageError, StorageError) as error:
    raise WorkdirError(f"--workdir={error}") from error
  finally:
    unlock(mirror.state)


def _bring(store: Store, mirror: Mirror, name: str, index: Index, tell: Callable[[str], None]) -> None:
  """Makes the mirror at least as new as the bucket."""
  mark, has_run = mirror.state / "bringing", (mirror.run / "config.json").exists()
  if index.mirror is None:  # Nothing was ever published.
    return
  base = mirror.state / "base"  # The state of the bucket that the mirror was brought from.
  is_current = index.mirror == name or (base.exists() and base.read_text(encoding="ascii") == content_digest(index))
  if is_current and has_run and not mark.exists():
    return
  if mirror.run.exists() and not mark.exists():
    _leave(mirror, tell)
  mark.touch()
  base.unlink(missing_ok=True)
  shutil.rmtree(mirror.outgoing, ignore_errors=True)
  tell(f"bringing {store.address} to {mirror.run}")
  try:
    download.bring_steps(store, index, mirror.run)
    # The config comes last: without it, the next start brings everything again.
    download.bring_files(store, index, mirror.run, needed=lambda path: path != "config.json")
    download.bring_pages(store, mirror.run)
    download.bring_files(store, index, mirror.run)
  except FileNotFoundError as error:
    raise WorkdirError(
      f"--workdir={store.address}: an object that its {NAME} names is gone ({error}); restore it, or choose another --workdir"
    ) from error
  except ValueError as error:
    raise WorkdirError(f"--workdir={error}") from error
  except OSError as error:
    raise WorkdirError(f"--workdir={store.address}: its mirror {mirror.run} cannot be written ({error.strerror})") from error
  base.write_text(content_digest(index), encoding="ascii")
  mark.unlink()


def _leave(mirror: Mirror, tell: Callable[[str], None]) -> None:
  """Removes what an outdated mirror holds, or sets it aside if some of it was never sent."""
  if (mirror.state / "clean").exists():
    shutil.rmtree(mirror.run)
    return
  place = mirror.run.parent
  aside = next(path for n in range(1, 10_000) if not (path := place.with_name(f"{place.name}.aside-{n}")).exists())
  place.rename(aside)
  tell(f"another machine has continued the run since; what this one had, some of it never sent, was moved to {aside}")


def _sweep(store: Store, index: Index) -> None:
  """Deletes objects that a killed writer has sent and the index does not name."""
  with contextlib.suppress(StorageError):
    known = names_of(index)
    folders = (*(f"{step.at}/" for step in index.steps.values()), *(f"{place}/" for place in index.aside))
    names = [name for folder in _LISTED for name in patiently(lambda: list(store.names(folder)))]  # noqa: B023 (called at once)
    store.delete(name for name in names if name not in known and not name.startswith(folders or ("\0",)))


def _name_of(mirror: Mirror) -> str:
  """Returns the random name of a mirror, which it keeps."""
  path = mirror.state / "name"
  if not path.exists():
    disk.replace(path, secrets.token_hex(8))
  return path.read_text(encoding="ascii")
