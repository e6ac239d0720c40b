"""Installation from a wheel, by the commands of docs/install.md word for word; container files."""

import os
import pathlib
import re
import site
import subprocess
import sys
import tomllib

import pytest

from jaxrl_llm import __version__
from tests.runs import ROOT, environment

GUIDE = (ROOT / "docs" / "install.md").read_text()
BUILD, INSTALL, USE, CONTAINERS = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def shell(text: str, *, folder: pathlib.Path, home: pathlib.Path, **variables: str) -> str:
  """Runs the lines of a shell, as a user types them. Returns what they print."""
  env = environment() | {"HOME": str(home), "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"} | variables
  env.pop("PYTHONPATH", None)
  result = subprocess.run(["bash", "-ec", text], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout + result.stderr


@pytest.mark.slow
def test_from_an_empty_folder_to_an_exported_model(tmp_path):
  """The commands are the guide's; the environment spares them the network and the dependencies.

  The wheel is built by the tests' hatchling. A line in the new environment lends it the tests'
  packages, which come after its own, so that the package is that of the wheel.
  """
  folder, home = tmp_path / "empty", tmp_path / "home"
  folder.mkdir()
  home.mkdir()
  offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
  shell(BUILD, folder=ROOT, home=home, **offline)
  assert [path.name for path in (home / "wheels").iterdir()] == [f"jaxrl_llm-{__version__}-py3-none-any.whl"]
  shell(INSTALL, folder=folder, home=home, **offline)
  (own,) = (folder / ".venv").glob("lib/python*/site-packages")
  (own / "packages_of_the_tests.pth").write_text("\n".join(site.getsitepackages()) + "\n")
  activate = INSTALL.splitlines()[0].partition("&&")[2]
  (line,) = shell(f"{activate}\npython -c 'import jaxrl_llm; print(jaxrl_llm.__file__)'", folder=folder, home=home).splitlines()
  assert pathlib.Path(line).is_relative_to(own), "this would test the checkout and not the wheel"

  printed = shell(f"{activate}\n{USE}", folder=folder, home=home)
  project = folder / "my_project"
  start, final = map(float, re.search(r"accuracy ([\d.]+)% -> ([\d.]+)%", printed).groups())
  assert 50 < start < 90 < final, "the project's own job learns"
  assert "avg@n:n=4" in printed and "OK" in printed
  assert (project / "exported" / "model.safetensors").is_file() and (project / "runs" / "my_project" / "report.html").is_file()
  assert sorted(path.name for path in folder.iterdir()) == [".venv", "my_project"]


def test_the_guide_names_the_wheel_of_this_version():
  assert set(re.findall(r"jaxrl_llm-([\w.]+)-py3", GUIDE)) == {__version__}


def test_the_guide_uses_every_command_of_a_first_day():
  named = {word for line in USE.splitlines() if line.startswith("jaxrl-llm ") for word in line.split()[1:2]}
  assert named == {"new", "train", "evaluate", "report", "export"}


CONTAINER_FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
ORDER = ("FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD")


@pytest.mark.parametrize("path", CONTAINER_FILES, ids=lambda path: path.stem)
def test_a_container_file_agrees_with_the_repository(path):
  """No container is built here: what can be known without that is compared."""
  lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
  words = dict(line.split(maxsplit=1) for line in lines)
  assert tuple(words) == ORDER and len(lines) == len(ORDER), "one instruction each, in this order"
  python = re.fullmatch(r"python:(3\.\d+)-slim", words["FROM"])[1]
  assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
  constraint, extras = re.fullmatch(r'pip install --no-cache-dir --constraint (\S+) --editable "\.\[(.*)\]"', words["RUN"]).groups()
  assert constraint == f"constraints/python{python}.txt" and (ROOT / constraint).is_file()
  assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]) and path.stem in extras.split(",")
  assert words["ENTRYPOINT"] == f'["{next(iter(PROJECT["scripts"]))}"]'
  assert f"-f containers/{path.name} " in CONTAINERS and "Not yet built" in path.read_text()


def test_every_container_file_is_in_the_guide():
  assert len(CONTAINER_FILES) == 2 and CONTAINERS.count(".Dockerfile") == 2
