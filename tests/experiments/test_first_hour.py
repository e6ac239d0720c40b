"""Tests of the first hour on a device: its page, its parts, and the whole of it in small."""

import json
from unittest import mock

import numpy as np
import pytest

from experiments.first_hour import __main__ as command
from experiments.first_hour import checks, results, speeds
from experiments.first_hour.results import Result, Row


def test_the_page_counts_what_is_reached_and_names_what_failed():
  rows = [results.at_most("error | of loss", 1e-6, 1e-5), results.share("bandwidth", 0.5, 0.7), results.share("copy", 0.5, None)]
  page = results.page([Result("a", "First", rows, 60.0), Result("b", "Second", [], 0.0, "stopped")], device="cpu", command="c", date="d")
  assert "1 figures as expected, 1 not; parts without a result: b" in page
  assert "| error \\| of loss | 1e-06 | at most 1e-05 | yes |" in page
  assert "| bandwidth | 50.0% | at least 70% | **no** |" in page and "| copy | 50.0% |  |  |" in page and "**stopped**" in page


def test_another_number_than_the_recorded_one_is_seen(tmp_path, monkeypatch):
  recorded = json.loads(checks.GOLDENS.read_text())["nano"]
  changed = recorded | {"losses": [recorded["losses"][0] + 1e-3, recorded["losses"][1]], "tokens": [0, *recorded["tokens"][1:]]}
  (tmp_path / "goldens.json").write_text(json.dumps({"nano": recorded}))
  monkeypatch.setattr(checks, "GOLDENS", tmp_path / "goldens.json")
  monkeypatch.setattr(checks, "MODELS", ("nano",))
  monkeypatch.setattr(checks, "measure", lambda name: changed)
  wrong = {row.what for row in checks.numerics() if not row.is_good}
  assert wrong == {"nano: tokens drawn equal a CPU's", "nano: largest difference of losses from a CPU's"}


@pytest.mark.slow
def test_a_wrong_kernel_is_seen(monkeypatch):
  doubled = lambda q, k, v, rows, mesh, platform: 2 * v.repeat(2, axis=2)
  monkeypatch.setitem(checks.BACKENDS, "chunked", doubled)
  rows = [row for row in checks.kernels(length=128) if row.is_good is False]
  assert [row.what.split(",")[0] for row in rows] == ["attention chunked", "attention chunked"]


@pytest.mark.exhaustive
def test_a_part_that_fails_does_not_stop_the_others(tmp_path, capsys):
  fails = command.PARTS | {"updates": command.PARTS["updates"]._replace(minutes=1e-3)}
  with mock.patch.object(command, "PARTS", fails):
    status = command.main([f"--out={tmp_path}", "--parts=updates,machine"])
  page = (tmp_path / "page.md").read_text()
  assert status == 1 and "stopped after 0.001 minutes" in page and "float32 products" in page
  assert "machine ..." in capsys.readouterr().out


def test_an_unknown_part_is_refused(tmp_path, capsys):
  assert command.main([f"--out={tmp_path}", "--parts=kernel"]) == 2
  assert "--parts: found 'kernel', expected some of machine, " in (errors := capsys.readouterr().err) and "did you mean 'kernels'" in errors


def test_a_failing_run_gives_its_last_line(tmp_path, monkeypatch):
  monkeypatch.setitem(speeds.JOBS, "laptop", {"small": ("configs/gspo.py:tiny", "--config.num_steps=no")})
  with pytest.raises(RuntimeError, match="num_steps"):
    speeds.job(tmp_path, "laptop", size="small")


@pytest.mark.exhaustive
def test_the_hour_in_small(tmp_path):
  parts = [name for name in command.PARTS if name != "smollm2"]
  assert command.main([f"--out={tmp_path}", "--size=small", f"--parts={','.join(parts)}"]) == 0, (tmp_path / "page.md").read_text()
  rows = {name: results.read(tmp_path / f"{name}.json") for name in parts}
  assert all(rows.values())
  figure = next(row for row in rows["updates"] if row.what.endswith("MFU"))
  assert 0 < float(figure.value.rstrip("%")) < 100 and isinstance(figure, Row)
  assert np.all([row.is_good is not False for part in rows.values() for row in part])
