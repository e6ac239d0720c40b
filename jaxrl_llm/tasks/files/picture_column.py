"""Pictures of the user's own problems, from a column of paths or of bytes."""

import base64
import hashlib
import os
import pathlib
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.messages import one_line
from jaxrl_llm.pretrained import pictures
from jaxrl_llm.tasks.files import columns as columns_lib
from jaxrl_llm.tasks.files.columns import Columns, Convert, Unusable, short
from jaxrl_llm.tasks.files.storage import IMAGES, Row
from jaxrl_llm.tasks.files.text_files import FileFault, Record, Records
from jaxrl_llm.tasks.files.values import find

_SOURCES = "sources of the pictures"  # Key of a record; no column of a file is named so.
# PNG, JPEG, GIF, WebP and BMP in base64; a path does not have so many characters without a dot.
_BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk)[A-Za-z0-9+/\s]{40,}={0,2}\s*$")


def read(path: os.PathLike, columns: Columns) -> Records:
  """Yields the records of a file with the sources of their pictures, for `with_pictures`."""
  folder = pathlib.Path(path).parent
  for place, record in columns_lib.read_columns(path, columns):
    yield place, record if isinstance(record, FileFault) else {**record, _SOURCES: (find(record, columns.images, None), folder)}


def with_pictures(convert: Convert) -> Convert:
  """Returns a converter that also reads the pictures of a record from `read`."""

  def converted(record: Record) -> Row:
    value, folder = record[_SOURCES]
    return convert(record) | {IMAGES: load(value, folder)}

  return converted


def load(value: Any, folder: pathlib.Path) -> tuple[bytes, ...]:
  """Returns the contents of a record's pictures, each of which has been decoded once.

  Args:
    value: Value of the column: a picture, a list of pictures, or null. A picture is a path, bytes,
      bytes in base64 (alone or as an address `data:...`), or an object with `bytes` or else `path`.
    folder: Folder of relative paths.

  Raises:
    Unusable: If a picture is missing, broken, or too large or small.
    MissingPackageError: If Pillow is not installed.
  """
  contents = []
  for source in _sources(value, folder):
    try:
      if not isinstance(source, bytes):
        if source.exists() and not source.is_file():  # Reading a pipe or a device would never end.
          raise Unusable("picture is no file", short(str(source)))
        pictures.size_of(source)  # Refuses a file that is too large before it is read.
        source = source.read_bytes()
      pictures.open_picture(source)
    except pictures.BadPicture as error:
      raise Unusable(error.reason, error.detail) from None
    except OSError as error:
      raise Unusable("broken picture", f"{short(str(source))}: {error.strerror}") from None
    contents.append(source)
  return tuple(contents)


def stamp(path: os.PathLike, columns: Columns) -> str:
  """Returns a digest of the sizes and times of all pictures that a file names.

  A picture that has appeared or changed changes the digest, and the problems are read anew.
  """
  digest = hashlib.blake2b(digest_size=8)
  for _, record in read(path, columns):
    try:
      sources = [] if isinstance(record, FileFault) else list(_sources(*record[_SOURCES]))
    except Unusable:
      continue
    for source in sources:
      if not isinstance(source, bytes):  # The key of the table covers bytes in the file itself.
        try:
          stat = source.stat() if source.is_file() else None
        except OSError:  # A name that is too long, a folder without rights: `load` says why.
          stat = None
        digest.update(f"{source}\0{stat and (stat.st_size, stat.st_mtime_ns)}\0".encode("utf-8", "surrogateescape"))
  return digest.hexdigest()


def _sources(value: Any, folder: pathlib.Path) -> Iterator[bytes | pathlib.Path]:
  """Yields the pictures of a value, as bytes or absolute paths."""
  if value is None or value == "":
    return
  for one in value if isinstance(value, list | tuple) else [value]:
    if isinstance(one, dict):
      one = one.get("bytes") or one.get("path")
    if isinstance(one, str) and one and "\0" not in one:
      one = _named(one, folder)
    if not isinstance(one, bytes | pathlib.Path):
      raise Unusable("picture is neither a path nor bytes", short(str(one)))
    yield one


def _named(name: str, folder: pathlib.Path) -> bytes | pathlib.Path:
  """Returns the picture that a text is or names: base64 or a path."""
  if re.match("(?i)data:", name):
    head, _, body = name.partition(",")
    return _decoded(body, name) if head.lower().endswith(";base64") else urllib.parse.unquote_to_bytes(body)
  if "://" in name[:16]:
    raise Unusable("picture is an address", f"{short(name)}, expected a file; download it first")
  if _BASE64.match(name):
    return _decoded(name, name)
  try:
    return folder / pathlib.Path(name).expanduser()
  except RuntimeError as error:  # The home of an unknown user.
    raise Unusable("missing picture", f"{short(name)}: {error}") from None


def _decoded(body: str, name: str) -> bytes:
  if len(body) > 2 * pictures.MAX_BYTES:
    raise Unusable("picture's file too large", f"{len(body):,} characters of base64")
  try:
    return base64.b64decode("".join(urllib.parse.unquote(body).split()), validate=True)
  except ValueError as error:
    raise Unusable("picture's base64 is broken", f"{short(name)}: {one_line(error, typed=False)}") from None
