"""Objects of a bucket under one path: small calls with preconditions, and errors of one line."""

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.messages import MissingPackageError, one_line
from jaxrl_llm.workdir.bucket.address import Address

_PIECE = 16 << 20  # Bytes of a download at a time, so that no request outlasts its timeout.
_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json", ".log": "text/plain; charset=utf-8"}


class StorageError(Exception):
  """A failed request to the storage. One line.

  Attributes:
    lasting: Whether the same request would fail again: a missing bucket, no permission.
  """

  def __init__(self, message: str, *, lasting: bool = False):
    super().__init__(message)
    self.lasting = lasting


class ConflictError(Exception):
  """A write whose precondition does not hold: the object was created or replaced by another."""


class Tag(NamedTuple):
  """State of an object, as the storage names it, for a later precondition."""

  e_tag: str | None
  version: str | None


class Store:
  """The objects of a bucket under one path.

  Args:
    address: Address of the workdir.
    seconds: Maximum time of one request.

  Raises:
    MissingPackageError: If obstore is not installed.
    StorageError: If the settings of the environment are not valid.
  """

  def __init__(self, address: Address, *, seconds: float = 30.0):
    try:
      from obstore import exceptions, store  # Lazy: runs in folders do not need it.
    except ImportError as error:
      raise MissingPackageError(f"{address} needs obstore: pip install 'jaxrl-llm[bucket]'") from error
    self.address, self._errors = address, exceptions
    # The publisher has a longer patience of its own: a request must end in time for a sign of life.
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2}
    retries = {"max_retries": 2, "retry_timeout": timedelta(seconds=seconds), "backoff": backoff}
    client = {"timeout": timedelta(seconds=seconds), "connect_timeout": timedelta(seconds=min(5.0, seconds)), "allow_http": True}
    checked = {"checksum_algorithm": "sha256"} if address.scheme == "s3" else {}
    self._store = self._call(lambda: store.from_url(str(address), client_options=client, retry_config=retries, **checked))

  def put(self, name: str, data: bytes | Path) -> None:
    """Writes an object whole. Its type follows from the name's ending."""
    kind = _TYPES.get(Path(name).suffix)
    # A Path is sent in parts, and need not fit in memory.
    self._call(lambda: self._store.put(name, data, attributes={"Content-Type": kind} if kind else None))

  def create(self, name: str, data: bytes) -> Tag:
    """Writes an object that must not exist. Raises `ConflictError` if it does."""
    return _tag(self._call(lambda: self._store.put(name, data, mode="create")))

  def replace(self, name: str, data: bytes, tag: Tag) -> Tag:
    """Replaces an object in a known state. Raises `ConflictError` if its state is another one."""
    mode = {name: value for name, value in tag._asdict().items() if value is not None}
    return _tag(self._call(lambda: self._store.put(name, data, mode=mode)))

  def get(self, name: str) -> tuple[bytes, Tag] | None:
    """Reads a small object and its state; None if there is none."""

    def read() -> tuple[bytes, Tag]:
      answer = self._store.get(name)
      return bytes(answer.bytes()), _tag(answer.meta)

    try:
      return self._call(read)
    except FileNotFoundError:
      return None

  def download(self, name: str, file: Any) -> tuple[int, str]:
    """Appends an object to an open file. Returns its size and SHA-256.

    Raises:
      FileNotFoundError: If there is no such object.
    """
    size, digest = self._call(lambda: self._store.head(name))["size"], hashlib.sha256()
    for start in range(0, size, _PIECE):
      piece = bytes(self._call(lambda: self._store.get_range(name, start=start, end=min(start + _PIECE, size))))  # noqa: B023 (called at once)
      digest.update(piece)
      file.write(piece)
    return size, digest.hexdigest()

  def names(self, prefix: str = "") -> Iterator[str]:
    """Yields the names of all objects, or of those below a folder."""
    pages = iter(self._call(lambda: self._store.list(prefix or None)))
    while (objects := self._call(lambda: next(pages, None))) is not None:
      yield from (str(each["path"]) for each in objects)

  def folders(self) -> list[str]:
    """Returns the names of the folders at the top, in order."""
    return sorted(str(name) for name in self._call(lambda: self._store.list_with_delimiter(None))["common_prefixes"])

  def delete(self, names: Iterable[str]) -> None:
    """Deletes objects, which may be missing."""
    for name in names:
      try:
        self._call(lambda: self._store.delete(name))  # noqa: B023 (called at once)
      except FileNotFoundError:
        continue

  def _call(self, do: Callable[[], Any]) -> Any:
    errors = self._errors
    try:
      return do()
    except (errors.AlreadyExistsError, errors.PreconditionError) as error:
      raise ConflictError(_reason(error)) from error
    except FileNotFoundError as error:
      if "NoSuchBucket" in str(error) or "bucket does not exist" in str(error).lower():
        raise StorageError(
          f"{self.address}: found no bucket {self.address.bucket!r}, expected an existing one; make it, or correct the name",
          lasting=True,
        ) from error
      raise
    except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
      raise StorageError(
        f"{self.address}: access denied, expected credentials that may read and write there ({_reason(error)})", lasting=True
      ) from error
    except (errors.BaseError, ValueError) as error:
      if lacks_credentials(str(error)):
        variable = "GOOGLE_APPLICATION_CREDENTIALS" if self.address.scheme == "gs" else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise StorageError(
          f"{self.address}: found no credentials, expected {variable} or the account of this machine ({_reason(error)})",
          lasting=True,
        ) from error
      raise StorageError(f"{self.address}: {_reason(error)}") from error


def _tag(facts: Any) -> Tag:
  return Tag(facts.get("e_tag"), facts.get("version"))


def lacks_credentials(text: str) -> bool:
  """Returns whether the text of an error says that no credentials were found.

  Without any, the libraries ask the metadata server of a cloud's machine, at 169.254.169.254.
  """
  return re.search(r"169\.254\.(169\.254|170\.)|metadata\.google\.internal|token request|credential", text, re.IGNORECASE) is not None


def _reason(error: Exception) -> str:
  """Returns the part of an error that a user can act on, on one line."""
  text = str(error).split("Debug source")[0]
  status = re.search(r"status code: (\d+ [A-Za-z ]+)", text)
  message = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
  if status:
    return one_line(status[1].strip() + (f": {message[1]}" if message else ""), typed=False)
  return one_line(re.sub(r"Error performing (\w+) (\S+) in \S+", r"\1 \2", text), typed=False, limit=160)


def patiently(do: Callable[[], Any], *, seconds: float = 20.0, sleep: Callable[[float], None] = time.sleep) -> Any:
  """Repeats a call until the storage answers, or for a limited time.

  Args:
    do: Function that may raise `StorageError`. A lasting one is raised at once.
    seconds: Time after which the error is raised.
    sleep: Function that waits.
  """
  until, wait = time.monotonic() + seconds, 0.2
  while True:
    try:
      return do()
    except StorageError as error:
      if error.lasting or time.monotonic() + wait > until:
        raise
    sleep(wait)
    wait = min(2 * wait, 5.0)
