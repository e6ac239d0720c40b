"""Ids of environments of the package verifiers, without importing it or them."""

import importlib.metadata
import importlib.util
import pathlib
from collections.abc import Mapping, Sequence

from jaxrl_llm.messages import MissingPackageError, Problem, did_you_mean

_INSTALL = "environments verifiers:ID need the package verifiers: pip install 'jaxrl-llm[verifiers]'"


def module_name(name: str) -> str:
  """Returns the module of an environment's id, `[owner/]name[@version]`.

  Example:
    >>> module_name("primeintellect/Reverse-Text@0.1.0")
    'reverse_text'
  """
  return name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def check_installed(name: str) -> None:
  """Checks that the package and an environment are installed, without importing them.

  Raises:
    MissingPackageError: If the package is missing. One line.
    ValueError: If the environment is missing, or the id is no module's name. One line, with the
      command that installs it.
  """
  package = importlib.util.find_spec("verifiers")
  if package is None or not importlib.metadata.packages_distributions().get("verifiers"):
    raise MissingPackageError(_INSTALL)  # A folder of that name on the path is not the package.
  module = module_name(name)
  bundled = _bundled(package)
  if module in bundled:
    return
  if not module.isidentifier() or importlib.util.find_spec(module) is None:
    modules = importlib.metadata.packages_distributions()
    environments = [*bundled, *_dependents(modules)]
    hint = did_you_mean(module, [*environments, *modules])
    missing = f"'verifiers:{name}', which is not installed"
    expected = f"an installed environment ({', '.join(sorted(environments))}){hint}; pip install {module.replace('_', '-')}"
    raise ValueError(Problem("environment.name", missing, expected))


def _bundled(package) -> list[str]:
  """Returns the ids that the package brings along."""
  folder = pathlib.Path(package.submodule_search_locations[0]) / "v1" / "tasksets"
  return sorted(path.name for path in folder.glob("*") if (path / "__init__.py").is_file())


def _dependents(modules: Mapping[str, Sequence[str]]) -> list[str]:
  """Returns the modules of the installed packages that require verifiers."""
  needs = {
    package.name
    for package in importlib.metadata.distributions()
    if any(line.startswith("verifiers") for line in package.requires or ())
  }
  return sorted(module for module, packages in modules.items() if needs & set(packages))
