"""Files of published sets, from a local folder or downloaded."""

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
_SECONDS = 20  # Timeout of a connection that sends no bytes.
_CHUNK = 2**20


class Files(NamedTuple):
  """The location of a split of a published set.

  Attributes:
    patterns: Glob patterns below a local folder. All files that match the first pattern with any
      match are read, in sorted order.
    urls: Addresses to download if there are no local files. Wildcards in the last part are resolved
      with the repository's list of files.
  """

  patterns: tuple[str, ...]
  urls: tuple[str, ...] = ()


def hub(repository: str, *paths: str) -> tuple[str, ...]:
  """Returns the addresses of a dataset's files on the Hugging Face Hub.

  Example:
    >>> hub("openai/gsm8k", "README.md")
    ('https://huggingface.co/datasets/openai/gsm8k/resolve/main/README.md',)
  """
  return tuple(f"{HUB}/datasets/{repository}/resolve/main/{path}" for path in paths)


def find(folder: pathlib.Path, files: Files) -> list[pathlib.Path]:
  """Returns the local files of a split, or an empty list if there are none."""
  for pattern in files.patterns:
    if paths := sorted(path for path in folder.glob(pattern) if path.is_file()):
      return paths
  return []


def obtain(name: str, split: str, files: Files, *, source: str | os.PathLike | None, folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a split, and downloads them first if they are absent.

  Args:
    name: Name of the set, for messages.
    split: Name of the split, for messages and the download folder.
    files: Location of the split.
    source: The user's folder, which is never written to; None uses `folder`.
    folder: Folder for downloads.

  Raises:
    ValueError: If the files are absent and cannot be downloaded. One line that says which file to
      put where.
  """
  if source is not None:
    source = pathlib.Path(source).expanduser()
    if not source.is_dir():
      raise ValueError(f"task.source: found no folder {source}, expected the one with the files of {name}")
    if paths := find(source, files):
      return paths
    names = " or ".join(_plain(files))
    raise ValueError(f"task.source: found no {names} in {source}, expected the files of {name} ({split}){_where(files)}")
  if paths := find(folder, files):
    return paths
  try:
    urls = [url for listed in files.urls for url in _expand(listed)]
    return [download(url, folder / split / urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])) for url in urls]
  except (OSError, ValueError) as error:
    raise ValueError(
      f"task {name}: found no file {_plain(files)[0]} ({split}) in {folder} and no way to download it "
      f"({one_line(error, typed=False)}); put it there, or set task.source to the folder that has it{_where(files)}"
    ) from error


def download(url: str, path: pathlib.Path) -> pathlib.Path:
  """Downloads a file, which receives its final name only once it is complete.

  Raises:
    OSError: If there is no network or no such file, or the connection breaks off or is silent for
      20 s.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  logging.info("Downloading %s.", url)
  handle, scratch = tempfile.mkstemp(prefix=".downloading-", dir=path.parent)
  try:
    with os.fdopen(handle, "wb") as file, _open(url) as response:
      shutil.copyfileobj(response, file, _CHUNK)
      size, promised = file.tell(), response.headers.get("Content-Length")
    if promised is not None and size != int(promised):
      raise OSError(f"{url}: received {size} of {promised} bytes")
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
  """Expands a pattern to addresses, from the repository's list of the files in that folder."""
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
