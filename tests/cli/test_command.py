"""The console script: which commands there are, what each runs, and how fast it answers."""

import importlib.util
import json
import pathlib
import runpy
import subprocess
import sys
import tomllib

import pytest

from jaxrl_llm import __version__
from jaxrl_llm.cli.__main__ import COMMANDS, help_text, main
from tests.runs import ROOT

LOADED = "import sys, json; from jaxrl_llm.cli.__main__ import main; main({}); print(json.dumps(sorted(sys.modules)))"


def test_the_wheel_installs_it():
  scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
  assert scripts == {"jaxrl-llm": "jaxrl_llm.cli.__main__:main"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_a_module(name):
  assert importlib.util.find_spec(COMMANDS[name].module) is not None
  assert f"  {name} " in help_text()


def test_help_lists_the_commands(capsys):
  assert main(["jaxrl-llm", "--help"]) == 0
  assert capsys.readouterr().out.strip() == help_text()
  assert all(len(line) <= 100 for line in help_text().splitlines())


def test_without_a_command_it_is_bad_input(capsys):
  assert main(["jaxrl-llm"]) == 2
  assert "usage: jaxrl-llm COMMAND" in capsys.readouterr().out


def test_the_version(capsys):
  assert main(["jaxrl-llm", "--version"]) == 0 and capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(("word", "hint"), [("trian", "did you mean jaxrl-llm train?"), ("zzz", "expected one of new, train")])
def test_an_unknown_command_is_one_line(word, hint, capsys):
  assert main(["jaxrl-llm", word]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: jaxrl-llm: found {word!r}, expected one of") and hint in line


@pytest.mark.parametrize("argv", [["jaxrl-llm", "--help"], ["jaxrl-llm", "new", "my_project"], ["jaxrl-llm", "trian"]])
def test_it_starts_without_jax(argv, tmp_path):
  """What it imports is what its start takes: no library but Python's own."""
  command = [sys.executable, "-c", LOADED.format(argv)]
  result = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
  loaded = json.loads(result.stdout.splitlines()[-1])
  assert "jaxrl_llm.cli.__main__" in loaded
  assert not {"jax", "numpy", "flax", "absl", "ml_collections"} & set(loaded)


@pytest.mark.parametrize(("name", "module"), [("train", "main"), ("evaluate", "evaluate"), ("serve", "serve")])
def test_a_command_is_the_code_of_its_module(name, module, capsys):
  assert main(["jaxrl-llm", name, "--help"]) == 0
  by_script = capsys.readouterr().out
  result = subprocess.run([sys.executable, "-m", f"jaxrl_llm.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
  flags = [word for word in result.stdout.split() if word.startswith("--")]
  assert flags and flags == [word for word in by_script.split() if word.startswith("--")]


def test_the_status_of_a_command_is_passed_on(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert main(["jaxrl-llm", "train", "--config=configs/gspo.py"]) == 2
  assert "found no file 'configs/gspo.py'" in capsys.readouterr().err


def test_the_current_folder_is_on_the_path(tmp_path, monkeypatch):
  """As with `python -m`: otherwise a project's own rewards would not be found."""
  (tmp_path / "own_module_of_a_project.py").write_text("")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
  assert importlib.util.find_spec("own_module_of_a_project") is None
  monkeypatch.setattr(runpy, "run_module", lambda *args, **options: None)
  assert main(["jaxrl-llm", "new"]) == 0
  assert importlib.util.find_spec("own_module_of_a_project") is not None


def test_launch_needs_a_checkout(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert main(["jaxrl-llm", "launch", "--config=configs/gspo.py"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: jaxrl-llm launch: found no experiments/launch in ") and "expected a checkout" in line


def test_launch_in_a_checkout_is_its_launcher(monkeypatch):
  calls = []
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(subprocess, "call", lambda command: calls.append(command) or 7)
  assert main(["jaxrl-llm", "launch", "--config=x"]) == 7
  assert calls == [[sys.executable, "-m", "experiments.launch", "--config=x"]]
  assert pathlib.Path(ROOT, "experiments", "launch", "__main__.py").is_file()
