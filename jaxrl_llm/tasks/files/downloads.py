"""Published files from a local folder, or from where they are published when a network is there."""

import contextlib
import fnmatch
import json
import os
import pathlib
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from typing import NamedTuple

from absl import logging

from jaxrl_llm.messages import one_line

HUB = "https://huggingface.co"
_SECONDS = 20  # Without a byte, before a connection counts as dead.
_CHUNK = 2**20


class Files(NamedTuple):
  """Where a split of a published set lies.

  Attributes:
    patterns: file names below a local folder, with wildcards; all files of the first pattern that has any are read, in order.
    urls: what to download where none is there; a last part with wildcards is looked up in the repository's list of files.
  """

  patterns: tuple[str, ...]
  urls: tuple[str, ...] = ()


def hub(repository: str, *paths: str) -> tuple[str, ...]:
  """Addresses of a dataset's files.

  Example:
    >>> hub("openai/gsm8k", "README.md")
    ('https://huggingface.co/datasets/openai/gsm8k/resolve/main/README.md',)
  """
  return tuple(f"{HUB}/datasets/{repository}/resolve/main/{path}" for path in paths)


def find(folder: pathlib.Path, files: Files) -> list[pathlib.Path]:
  """The local files of a split; none is an empty list."""
  for pattern in files.patterns:
    if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
      return found
  return []


def obtain(name: str, split: str, files: Files, *, source: str | os.PathLike | None, folder: pathlib.Path) -> list[pathlib.Path]:
  """The files of a split, downloaded where they are not there yet.

  Args:
    name: of the set, for messages.
    split: likewise.
    files: what to look for and where.
    source: the user's folder, in which nothing is ever written; None for `folder`.
    folder: where downloads go.

  Raises:
    ValueError: no such files and no way to get them. One line, which says what to put where.
  """
  if source is not None:
    source = pathlib.Path(source).expanduser()
    if not source.is_dir():
      raise ValueError(f"task.source: found no folder {source}, expected the one with the files of {name}")
    if found := find(source, files):
      return found
    names = " or ".join(_plain(files))
    raise ValueError(f"task.source: found no {names} in {source}, expected the files of {name} ({split}){_where(files)}")
  if found := find(folder, files):
    return found
  try:
    urls = [url for listed in files.urls for url in _expand(listed)]
    return [download(url, folder / split / urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])) for url in urls]
  except (OSError, ValueError) as error:
    raise ValueError(
      f"task {name}: found no file {_plain(files)[0]} ({split}) in {folder} and no way to download it "
      f"({one_line(error, typed=False)}); put it there, or set task.source to the folder that has it{_where(files)}"
    ) from error


def download(url: str, path: pathlib.Path) -> pathlib.Path:
  """Downloads a file; it has its name only once it is whole.

  Raises:
    OSError: no network, no such file, or a connection that breaks off or stays silent for 20 s.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  logging.info("Downloading %s.", url)
  handle, scratch = tempfile.mkstemp(prefix=".downloading-", dir=path.parent)
  try:
    with os.fdopen(handle, "wb") as file, _open(url) as response:
      shutil.copyfileobj(response, file, _CHUNK)
      size, promised = file.tell(), response.headers.get("Content-Length")
    if promised is not None and size != int(promised):
      raise OSError(f"{url}: {size} bytes came, of {promised}")
    os.replace(scratch, path)
  except BaseException:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(scratch)
    raise
  return path


def _open(url: str):
  request = urllib.request.Request(url, headers={"User-Agent": "jaxrl_llm"})
  try:
    return urllib.request.urlopen(request, timeout=_SECONDS)
  except urllib.error.URLError as error:
    raise OSError(f"{url}: {error}") from error


def _expand(url: str) -> list[str]:
  """The addresses that a pattern stands for, from the repository's list of the files in that folder."""
  base, _, path = url.partition("/resolve/main/")
  if "*" not in path:
    return [url]
  folder = path.rpartition("/")[0]
  api = base.replace("/datasets/", "/api/datasets/", 1) + f"/tree/main/{folder}"
  with _open(api) as response:
    listed = json.load(response)
  names = sorted(entry["path"] for entry in listed if entry.get("type") == "file" and fnmatch.fnmatch(entry["path"], path))
  if not names:
    raise ValueError(f"{api} lists no {path}")
  return [f"{base}/resolve/main/{urllib.parse.quote(name)}" for name in names]


def _plain(files: Files) -> list[str]:
  return [pattern.removeprefix("**/") for pattern in files.patterns]


def _where(files: Files) -> str:
  return f"; published as {files.urls[0]}" + (f" and {len(files.urls) - 1} more" if len(files.urls) > 1 else "") if files.urls else ""
