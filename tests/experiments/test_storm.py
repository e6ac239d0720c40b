"""The kill storm: its table, its refusals, and a run that survives it."""

import json

import numpy as np
import pytest

from experiments.reliability import attempts, storm
from experiments.reliability.attempts import Ended
from experiments.reliability.storm import Strike


def strike(kind, redone, seconds=0.0):
  return Strike(kind, Ended((-9,), True, seconds, 10, 8), redone)


def test_the_table_counts_kinds_and_phases():
  text = storm.table([strike("at random", 3, 0.5), strike("at random", 0), strike("update", 4), strike("rollout", 2)], 0)
  _, _, random_row, phases, everything, _, last = text.splitlines()
  assert random_row == "| SIGKILL at random | 2 | 2 | 3, 1.5 | 0.5 |"
  assert phases.endswith("| 2 | 2 | 4, 3.0 | 0.0 |") and everything == "| all | 4 | 4 | 4, 2.2 | 0.5 |"
  assert last.endswith(": 0")


@pytest.mark.parametrize("argument", ["--kils=3", "--kills=many", "--processes=0", "--minutes=soon", "kills=3", "--kills"])
def test_a_bad_flag_is_one_line(argument, capsys):
  assert storm.main(["storm", argument]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ")


def test_an_existing_folder_is_refused(tmp_path, capsys):
  assert storm.main(["storm", f"--out={tmp_path}"]) == 2 and "exists; choose another" in capsys.readouterr().err


def finished(workdir, *, loss=0.5, tokens="a", weight=1.0):
  """Makes a folder that looks like a finished run's."""
  import orbax.checkpoint as ocp

  workdir.mkdir()
  row = {"step": 1, "phase": "rl", "actor/loss": loss, "rollout/tokens_sha256": tokens, "timing_s/step": np.random.default_rng().random()}
  (workdir / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"step": 2, "ph')
  (workdir / "samples.jsonl").write_text("{}\n")
  with ocp.StandardCheckpointer() as saving:
    saving.save((workdir / "checkpoints" / "4" / "arrays").absolute(), {"state": {"w": np.full(3, weight)}})
  return workdir


def test_mismatches_count_every_bit(tmp_path):
  golden = finished(tmp_path / "golden")
  assert attempts.mismatches(golden, finished(tmp_path / "same")) == 0
  assert attempts.mismatches(golden, finished(tmp_path / "last bit", loss=float(np.nextafter(0.5, 1)))) == 1
  assert attempts.mismatches(golden, finished(tmp_path / "tokens", tokens="b")) == 1
  assert attempts.mismatches(golden, finished(tmp_path / "weight", weight=float(np.nextafter(1.0, 2)))) == 1


@pytest.mark.exhaustive
def test_a_run_survives_kills_at_random_and_one_in_each_phase(tmp_path, capsys):
  """A few kills at random; `experiments/LOG.md` records storms of 25 and more."""
  assert storm.main(["storm", "--kills=4", f"--out={tmp_path / 'storm'}"]) == 0, capsys.readouterr().out
  facts = json.loads((tmp_path / "storm" / "storm.json").read_text())
  kinds = [x["kind"] for x in facts["strikes"]]
  assert facts["mismatches"] == 0 and set(kinds) >= set(storm.PHASES) and len(kinds) == 4 + 3 + len(storm.PHASES)
  assert max(x["redone"] for x in facts["strikes"]) <= 4
  assert max(x["ended"]["seconds"] for x in facts["strikes"]) < 10
