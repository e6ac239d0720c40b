"""The log of each attempt."""

import sys

import pytest

from jaxrl_llm.run.observe.progress import Progress
from jaxrl_llm.workdir import logs


def lines(path):
  return [line.split(" ", 2)[2] for line in path.read_text().splitlines()]


def test_a_log_holds_shown_lines_and_errors(tmp_path, capsys):
  with logs.logged(tmp_path / "logs", 1, process=0, command="python -m x") as log:
    with Progress(log=log.write) as progress:
      progress.note("data: 3 problems")
      progress.start("rl", 2)
      progress.update(1, {"critic/rewards/mean": 0.5})
    print("error: no", file=sys.stderr)
  assert "error: no" in capsys.readouterr().err, "it is shown as well"
  first, second, *rest, last = lines(tmp_path / "logs" / "attempt-1.log")
  assert first == "attempt 1: python -m x" and second.startswith("process ") and last == "ended"
  assert rest[0] == "data: 3 problems" and rest[1].startswith("RL 1/2 | reward 0.500") and rest[2] == "error: no"


def test_an_unexpected_error_is_logged_with_its_traceback(tmp_path):
  before = sys.stderr
  with pytest.raises(KeyError), logs.logged(tmp_path / "logs", 1, process=2, command=""):
    raise KeyError("gone")
  assert sys.stderr is before
  text = (tmp_path / "logs" / "attempt-1.process-2.log").read_text()
  assert "Traceback" in text and "KeyError: 'gone'" in text


def test_attempts_are_numbered_in_sequence(tmp_path):
  assert logs.number(tmp_path / "logs") == 1
  for number in (1, 2, 11):
    with logs.logged(tmp_path / "logs", number, process=0, command=""):
      pass
  (tmp_path / "logs" / "attempt-99.process-3.log").touch()
  assert logs.number(tmp_path / "logs") == 12


def test_an_unwritable_log_ends_nothing(tmp_path, capsys):
  (tmp_path / "logs").write_text("a file")
  with logs.logged(tmp_path / "logs", 1, process=0, command="") as log:
    log.write("x")
    print("error: no", file=sys.stderr)
  assert "error: no" in capsys.readouterr().err
