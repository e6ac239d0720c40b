"""New projects: their files, their names, and that nothing is ever overwritten."""

import re
import subprocess
import sys

import pytest

from jaxrl_llm.cli import new
from jaxrl_llm.cli.new import FILES, TEMPLATE, write_project
from jaxrl_llm.config import command_line
from tests.runs import ROOT

WRITTEN = {".gitignore", "README.md", "configs/own.py", "problems.jsonl", "problems.py", "rewards.py", "test_own.py"}


def files(folder):
  return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_project_has_its_name_everywhere(tmp_path):
  project = write_project("own", tmp_path)
  assert project == tmp_path / "own" and files(project) == WRITTEN
  assert [path.name for path in tmp_path.iterdir()] == ["own"], "no temporary folder is left"
  assert not [path for path in project.rglob("*.*") if path.is_file() and "my_project" in path.read_text()]


def test_every_file_of_the_template_is_written():
  assert {path.name for path in TEMPLATE.iterdir() if path.is_file()} == set(FILES)


def test_the_tests_of_a_project_pass_at_once(tmp_path):
  project = write_project("own", tmp_path)
  command = [sys.executable, "-m", "unittest"]
  result = subprocess.run(command, cwd=project, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}, capture_output=True, text=True)
  assert result.returncode == 0 and "Ran 4 tests" in result.stderr, result.stderr


@pytest.mark.parametrize("break_it", ["problems.py", "rewards.py", "problems.jsonl", "configs/own.py"])
def test_the_tests_of_a_project_see_a_mistake(tmp_path, break_it):
  mistakes = {
    "problems.py": ("int(largest)", "int(digits[0])"),
    "rewards.py": ("<= 2)", "<= 2 or True)"),
    "problems.jsonl": ('"answer": ', '"answer": 1'),
    "configs/own.py": ("num_prompts = 32", "num_prompts = 33"),
  }
  project = write_project("own", tmp_path)
  path, (right, wrong) = project / break_it, mistakes[break_it]
  assert right in (text := path.read_text())
  path.write_text(text.replace(right, wrong))
  result = subprocess.run([sys.executable, "-m", "unittest"], cwd=project, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
  assert result.returncode != 0 and "FAILED" in result.stderr


@pytest.mark.parametrize("argument", ["", ":tiny"])
def test_the_config_of_a_project_loads(tmp_path, argument):
  config = command_line.load(f"{write_project('own', tmp_path)}/configs/own.py{argument}")
  assert config.task.path == "problems.jsonl" and config.objective.name == "gspo"


# Arguments and parts of the one line, by case.
REFUSED = {
  "no name": ([], ["found no name", "jaxrl-llm new my_project"]),
  "two names": (["one", "two"], ["found 'one two'", "the name of a project"]),
  "a dash": (["my-project"], ["found 'my-project'", "letters, digits and underscores", "for instance my_project"]),
  "a path": (["a/b"], ["found 'a/b'", "for instance a_b"]),
  "upwards": (["../x"], ["found '../x'", "for instance x"]),
  "a digit first": (["1st"], ["found '1st'", "for instance st"]),
  "nothing but signs": (["..."], ["found '...'", "for instance my_project"]),
  "empty": ([""], ["found ''", "for instance my_project"]),
  "no ASCII": (["naïve"], ["for instance na_ve"]),
  "a folder": (["taken"], ["found a folder 'taken' here", "for instance taken_3"]),
  "a file": (["taken_2"], ["found a file 'taken_2' here", "for instance taken_2_2"]),
  "a dead link": (["dead"], ["found a file 'dead' here", "for instance dead_2"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_line_and_changes_nothing(case, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "taken").mkdir()
  (tmp_path / "taken" / "problems.py").write_text("mine")
  (tmp_path / "taken_2").write_text("mine")
  (tmp_path / "dead").symlink_to("nowhere")
  before = sorted(tmp_path.rglob("*"))
  args, parts = REFUSED[case]
  assert new.main(["new", *args]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: jaxrl-llm new: ") and all(part in line for part in parts), line
  assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "taken" / "problems.py").read_text() == "mine"


def test_a_failure_leaves_nothing(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)

  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(new.runpy, "run_path", full)
  assert new.main(["new", "own"]) == 2
  assert "No space left on device" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_commands_that_it_prints_are_those_of_the_guide(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert new.main(["new", "my_project"]) == 0
  guide, project = (ROOT / "docs" / "install.md").read_text(), (tmp_path / "my_project" / "README.md").read_text()
  printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
  assert len(printed) == 2 and all(line in guide.splitlines() for line in printed)
  (commands,) = re.findall(r"```sh\n(.*?)```", project, flags=re.DOTALL)
  assert all(re.sub(r"\s+#.*", "", line) in guide for line in commands.splitlines())
