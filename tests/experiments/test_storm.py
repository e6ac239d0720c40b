"""The kill storms: their tables, their refusals, and runs that survive them."""

import json
import random
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest

from experiments.reliability import asynchronous, attempts, storm
from experiments.reliability.attempts import Ended
from experiments.reliability.storm import Strike
from experiments.results import from_json
from jaxrl_llm.rollouts import schedule


def strike(kind, redone, seconds=0.0):
  return Strike(kind, Ended((-9,), True, seconds, 10, 8), redone)


def test_the_table_counts_kinds_and_phases():
  text = storm.table([strike("at random", 3, 0.5), strike("at random", 0), strike("update", 4), strike("rollout", 2)], 0)
  _, _, random_row, phases, everything, _, last = text.splitlines()
  assert random_row == "| SIGKILL at random | 2 | 2 | 3, 1.5 | 0.5 |"
  assert phases.endswith("| 2 | 2 | 4, 3.0 | 0.0 |") and everything == "| all | 4 | 4 | 4, 2.2 | 0.5 |"
  assert last.endswith(": 0")


@pytest.mark.parametrize("argument", ["--kils=3", "--kills=many", "--processes=0", "--minutes=soon", "kills=3", "--kills", "--bucket=ftp"])
def test_a_bad_flag_is_one_line(argument, capsys):
  assert storm.main(["storm", argument]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ")


def test_a_bucket_is_for_one_process_and_for_synchronous_runs(tmp_path, capsys):
  assert storm.read(["--bucket", f"--out={tmp_path / 'new'}"]).bucket == "s3"
  for other in ("--processes=2", "--asynchronous"):
    assert storm.main(["storm", "--bucket=gs", other, f"--out={tmp_path / 'new'}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


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


LEARNER = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "logs").mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text("{}")
path, steps = folder / "metrics.jsonl", int(sys.argv[2])
done = len(path.read_text().splitlines()) // 4 * 4 if path.exists() else 0
kept = path.read_text().splitlines()[:done] if done else []
number = len(list((folder / "logs").iterdir())) + 1
log = folder / "logs" / f"attempt-{number}.log"
log.write_text(f"resumed x at warm-start step 0, RL step {done}" if done else "")
path.write_text("".join(line + chr(10) for line in kept))
for step in range(done, steps):
  time.sleep(0.02)
  if (step + 1) % 4 == 0:
    (folder / "checkpoints" / str(step + 1)).mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    file.write(json.dumps({"step": step + 1, "phase": "rl"}) + chr(10))
(folder / "summary.json").write_text("{}")
"""
SAMPLER = """
import pathlib, sys, time
print("joined", flush=True)
while not (pathlib.Path(sys.argv[1]) / "summary.json").exists():
  time.sleep(0.02)
"""


def play(monkeypatch, tmp_path, *, learner=LEARNER, sampler=SAMPLER, kills=6, num_steps=1000):
  """Runs a storm over a learner and samplers that only pretend."""
  python = [sys.executable, "-S", "-c"]
  monkeypatch.setattr(asynchronous, "learner_command", lambda job, more: [*python, learner, str(job.workdir), str(num_steps)])
  monkeypatch.setattr(asynchronous, "sampler_command", lambda job: [*python, sampler, str(job.workdir)])
  monkeypatch.setattr(attempts, "_REACH_SECONDS", 0.1)
  tmp_path.mkdir(exist_ok=True)
  job = attempts.Job((), tmp_path / "run", 1, 1, 4, tmp_path)
  return asynchronous.storm(job, random.Random(0), kills=kills)


def test_an_asynchronous_storm_kills_and_starts_again_until_the_run_is_finished(monkeypatch, tmp_path):
  cast = play(monkeypatch, tmp_path, num_steps=150)
  assert sorted(death.kind for death in cast.deaths) == ["learner", "learner", "learner while saving", "sampler", "sampler", "sampler"]
  steps = [row["step"] for row in attempts.rows(tmp_path / "run")]
  assert steps == list(range(1, 151)) and len(cast.schedules) == 3
  assert all(0 <= death.redone <= 4 for death in cast.deaths) and not asynchronous.left(tmp_path / "run", 0)


def test_an_asynchronous_storm_ends_with_a_process_that_fails(monkeypatch, tmp_path):
  with pytest.raises(RuntimeError, match="finished before 6 of 6 kills"):
    play(monkeypatch, tmp_path / "short", num_steps=0)
  with pytest.raises(RuntimeError, match="the sampler-[01] ended with status 1"):
    play(monkeypatch, tmp_path / "broken", sampler="raise SystemExit(1)", num_steps=100)
  assert not asynchronous.left(tmp_path / "broken" / "run", 0)


@pytest.mark.parametrize(
  ("companion", "status"), [("time.sleep(9)", None), ("sys.exit(1)", -9), ("os.abort()", -9), ("sys.exit(0)", "ended with status 0")]
)
def test_who_loses_a_companion_must_end_by_itself(companion, status, tmp_path):
  lines = f"import os, sys, time; number = os.environ['JAX_PROCESS_ID'] == '0'; time.sleep(9) if number else None; {companion}"
  company = asynchronous.Company(attempts.launch([sys.executable, "-S", "-c", lines], 2, {}, tmp_path / "a.run"), tmp_path / "a.run")
  assert company.is_whole() and company.poll() is None
  company.strike(types.SimpleNamespace(choice=lambda processes: processes[0]))
  try:
    if isinstance(status, str):
      with pytest.raises(RuntimeError, match=status):
        company.wait(5)
    elif status is None:
      with pytest.raises(subprocess.TimeoutExpired):
        company.wait(0.5)
    else:
      assert company.wait(5) == status
  finally:
    company.kill()


def schedule_of(folder, *batches):
  """Makes a folder with a schedule, and metrics that agree: responses of 3 and 5 tokens."""
  folder.mkdir()
  turns = lambda version: ((((version, 3),),), (((version, 2), (version, 3)),))
  lines = [schedule.to_line(schedule.Batch(step, 0, "a", 7, turns(version))) for step, version in batches]
  (folder / schedule.FILE).write_text("".join(f"{line}\n" for line in lines))
  lengths = {"response_length/max": 5.0, "response_length/min": 3.0, "response_length/mean": 4.0}
  rows = [{"step": step + 1, "phase": "rl", **lengths} for step in range(8)]
  (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  return folder


def test_broken_promises_of_an_asynchronous_run_are_found(tmp_path):
  good = schedule_of(tmp_path / "good", (0, 0), (1, 0), (2, 1))
  batches = schedule.read(good)
  assert asynchronous.failures(good, 3, [batches[:1], batches]) == []
  assert asynchronous.ages(batches) == {0: 8, 1: 16}
  assert "expected one for each of 4 steps" in asynchronous.failures(good, 4, [])[0]
  assert "before its end 1 is no longer there" in asynchronous.failures(good, 3, [[batches[1]]])[0]
  old = schedule_of(tmp_path / "old", (0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0))
  assert "tokens that are [5] steps old, expected 0 to 4" in asynchronous.failures(old, 6, [])[0]
  (good / "metrics.jsonl").write_text((good / "metrics.jsonl").read_text().replace("4.0", "4.5", 1))
  talks = shutil.copytree(good, tmp_path / "talks")
  (talks / "metrics.jsonl").write_text((talks / "metrics.jsonl").read_text().replace('"phase"', '"conversation/turns/max": 2, "phase"', 1))
  assert asynchronous.failures(talks, 3, []) == []
  (good / "samplers.json").write_text("{}")
  lengths, address = asynchronous.failures(good, 3, [])
  assert lengths.startswith("step 1: 8 tokens were drawn") and address.startswith("samplers.json: ")


def test_a_repetition_differs_by_batches_but_not_by_how_busy_samplers_were(tmp_path):
  folders = [finished(tmp_path / name) for name in ("first", "again")]
  lines = [schedule.to_line(schedule.Batch(step, 0, "a", 7, ((((step, 3),),),))) for step in range(2)]
  for busy, folder in enumerate(folders):
    (folder / schedule.FILE).write_text("".join(f"{line}\n" for line in lines))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "phase": "rl", "samplers/redone": busy}) + "\n")
  assert asynchronous.differences(*folders) == 0 and asynchronous.redone(folders[1]) == 1
  (folders[1] / schedule.FILE).write_text(f"{lines[0]}\n")
  assert asynchronous.differences(*folders) == 1


def test_a_storm_of_asynchronous_runs_takes_no_flag_that_has_no_effect(capsys):
  assert storm.main(["storm", "--asynchronous", "--minutes=2"]) == 2 and "no effect" in capsys.readouterr().err
  assert storm.main(["storm", "--job=text"]) == 2 and "no effect" in capsys.readouterr().err
  assert storm.main(["storm", "--asynchronous", "--job=song"]) == 2 and "expected one of text" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_an_asynchronous_run_survives_kills_of_either_side(tmp_path, capsys):
  """A few kills; `experiments/LOG.md` records a storm of 25."""
  assert storm.main(["storm", "--asynchronous", "--kills=3", f"--out={tmp_path / 'storm'}"]) == 0, capsys.readouterr().out
  results = from_json((tmp_path / "storm" / "asynchronous.json").read_text())
  assert results["broken"] == [] and set(results["mismatches"].values()) == {0}
