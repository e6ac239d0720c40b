"""Commands take a workdir in a bucket: bad input is one line, runs have the bits of local ones."""

import shutil
import sys
import threading
import time

import pytest

from experiments.launch import status
from experiments.launch.trial import Trial
from experiments.reliability import emulated_bucket
from experiments.reliability.attempts import Job, attempt, mismatches
from jaxrl_llm import evaluate, main
from jaxrl_llm.report import __main__ as report
from jaxrl_llm.workdir.bucket.address import mirror_of, parse
from jaxrl_llm.workdir.bucket.copies import localize
from jaxrl_llm.workdir.bucket.store import Store
from tests.workdir.bucket.runs import running

CONFIG = "--config=configs/gspo.py:tiny"


def lines(capsys, program, *flags):
  assert program.main([program.__name__, *flags]) == 2
  errors = capsys.readouterr().err.splitlines()
  assert all(line.startswith("error: ") for line in errors)
  return errors


@pytest.mark.parametrize("storage", ["s3", "gs"], indirect=True)
def test_a_bucket_that_does_not_exist_is_one_line(storage, place, capsys):
  (line,) = lines(capsys, main, CONFIG, f"--workdir={place.scheme}://no-bucket/run")
  assert line == (
    f"error: --workdir={place.scheme}://no-bucket/run: found no bucket 'no-bucket', expected an existing one; "
    "make it, or correct the name"
  )


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_no_access_is_one_line(storage, place, capsys):
  storage.weather.status = 403
  (line,) = lines(capsys, main, CONFIG, f"--workdir={place}")
  assert line.startswith(f"error: --workdir={place}: access denied, expected credentials that may read and write there (403")


@pytest.mark.parametrize("text", ["ftp://bucket/run", "gs://bucket"])
def test_an_address_that_is_none_is_one_line(text, capsys):
  (line,) = lines(capsys, main, CONFIG, f"--workdir={text}")
  assert line.startswith("error: --workdir: found ") and "expected a folder, or gs://BUCKET/RUN or s3://BUCKET/RUN" in line


def test_several_processes_are_refused(monkeypatch, capsys):
  monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
  (line,) = lines(capsys, main, CONFIG, "--workdir=gs://bucket/run")
  assert "found several processes, expected one; several need a folder that they share" in line


def test_a_missing_library_is_one_line(monkeypatch, tmp_path, capsys):
  monkeypatch.setenv("JAXRL_LLM_MIRRORS", str(tmp_path))
  monkeypatch.setitem(sys.modules, "obstore", None)
  (line,) = lines(capsys, main, CONFIG, "--workdir=s3://bucket/run")
  assert line == "error: --workdir=s3://bucket/run needs obstore: pip install 'jaxrl-llm[bucket]'"
  (line,) = lines(capsys, evaluate, "--checkpoint=s3://bucket/run@4")
  assert line == "error: --checkpoint: s3://bucket/run needs obstore: pip install 'jaxrl-llm[bucket]'"


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_run_that_is_not_there_is_one_line(place, capsys):
  (line,) = lines(capsys, evaluate, f"--checkpoint={place}")
  assert line == f"error: --checkpoint: {place}: found no run, expected the --workdir of one, or a folder of them"


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_a_report_is_sent_back_and_a_sweep_is_compared(place, capsys):
  for name in ("a", "b"):
    with running(place._replace(path=f"{place.path}/{name}")) as run:
      run.advance()
  assert report.main([f"{place}/a"]) == 0
  assert capsys.readouterr().out == f"{place}/a/report.html\n"
  assert report.main([str(place)]) == 0
  assert capsys.readouterr().out == f"{place}/comparison.html\n"
  store = Store(place)
  assert b"<html" in store.get("a/report.html")[0] and b"<html" in store.get("comparison.html")[0]
  assert report.main([f"{place}/none"]) == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_the_status_of_a_trial_is_read_from_the_bucket(place):
  with running(place) as run:
    run.advance(2)
  trial = Trial("name", None, str(place), ())
  assert status.look(trial, []).step == 2
  assert status.look(trial._replace(workdir=f"{place}/none"), []).step == 0


@pytest.mark.slow
def test_a_run_without_storage_for_a_while_and_on_a_new_machine_has_the_bits_of_a_local_one(tmp_path):
  flags = (
    CONFIG, "--config.warm_start.num_steps=4", "--config.num_steps=24", "--config.checkpoint.every=4", "--config.eval.every=20",
    "--config.reward.overlong_buffer=16", "--config.log.num_table_rows=0", "--config.log.tensorboard=False",
  )  # fmt: skip
  with emulated_bucket.bucket() as emulated, emulated_bucket.reached(emulated, tmp_path / "mirrors"):
    url = f"{emulated.url}/runs/one"
    golden = Job(flags, tmp_path / "golden", 1, 1, 4, tmp_path / "programs")
    job = golden._replace(url=url, workdir=mirror_of(parse(url)).run)
    assert attempt(golden).statuses == (0,)
    rows = job.workdir / "metrics.jsonl"
    begun = lambda *_: rows.exists() and rows.read_bytes().count(b'"rl"') > 6 and any(Store(parse(url)).names("checkpoints"))
    assert attempt(job, when=begun).statuses == (-9,)
    shutil.rmtree(job.workdir.parents[1])
    threading.Thread(target=fail_after, args=(emulated.weather, rows), daemon=True).start()
    assert attempt(job).statuses == (0,)
    assert emulated.weather.refused and mismatches(golden.workdir, job.workdir) == 0 == mismatches(golden.workdir, localize(url))


def fail_after(weather, rows):
  """Takes the storage away for three seconds once the run has resumed."""
  while not rows.exists():
    time.sleep(0.05)
  weather.gone = True
  time.sleep(3)
  weather.gone = False
