"""The memory estimate of `--dry_run`."""

import pytest

from jaxrl_llm import main, train
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import memory
from jaxrl_llm.run.jobs import dry_run
from jaxrl_llm.run.setup import out_of_memory
from tests.runs import quick, tiny_config


def lines_of(overrides: dict, devices: int = 1) -> list[str]:
  with quick(devices):
    return dry_run.describe_run(tiny_config("grpo", overrides)).splitlines()


def test_a_table_shows_what_takes_the_memory():
  lines = lines_of({})
  (start,) = [i for i, line in enumerate(lines) if line == "estimated memory of each device, in MB:"]
  rows = {line.split()[0]: line for line in lines[start + 1 :]}
  assert list(rows) == ["always", "update", "logprobs", "sampling", "peak"]
  for kind in ("weights", "optimizer moments", "frozen reference", "batch"):
    assert kind in rows["always"]
  assert "gradients" in rows["update"] and "key-value cache" in rows["sampling"]


def test_devices_that_only_sample_have_their_own_table():
  lines = lines_of({"mesh.sampler": 4}, devices=8)
  (start,) = [i for i, line in enumerate(lines) if line == "estimated memory of each device that only samples, in MB:"]
  assert "key-value cache" in lines[start + 1] and "weight sync" in "\n".join(lines[:start])


def peak_of(lines: list[str]) -> float:
  """Returns the predicted peak in GB."""
  return next(float(line.split()[1].replace(",", "")) for line in lines if line.startswith("  peak")) / 1e3


def test_a_run_that_cannot_fit_is_a_problem_and_does_not_start(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(out_of_memory, "advice", lambda *args, **options: ["  --config.model.remat=full: saves 1.0 of 9.0 MB"])
  monkeypatch.setattr(hosts, "join_processes", lambda: None)
  peak = peak_of(lines_of({}))
  config = tiny_config("grpo", {"memory_gb": peak / 1.4})
  with quick():
    assert main.dry_run(config) == main.USAGE_ERROR
    out, err = capsys.readouterr()
    assert "estimated memory of each device, in MB:" in out and out.endswith("1 problem(s) found\n")
    words = "error: config.memory_gb: found a predicted peak of 0.0 GB in update on a device of 0.0 GB, expected a run that fits: --config"
    assert err.startswith(words) and err.endswith("; --config.memory_gb=0.1 starts the run in spite of it\n") and err.count("\n") == 1
    with pytest.raises(ValueError, match="^config.memory_gb: found a predicted peak"):
      train.start_run(config, tmp_path)


@pytest.mark.parametrize("of_sampler", [False, True])
@pytest.mark.parametrize(("gigabytes", "words"), [(10.1, None), (8.0, "careful: a predicted peak of 10.0 GB in "), (7.6, "")])
def test_a_prediction_may_be_wrong_by_what_it_has_been(gigabytes, words, of_sampler, monkeypatch):
  monkeypatch.setattr(out_of_memory, "advice", lambda *args, **options: ["  --config.model.remat=full: saves 1.0 of 9.0 MB"])
  large, small = {"weights": 4e9, "rest": 6e9}, {"weights": 1e9}
  estimate = memory.Footprint({}, {"update": small if of_sampler else large}, large if of_sampler else {})
  options = dict(vocab_size=9, open_rows=False)
  lacking = lambda: out_of_memory.shortage(tiny_config("grpo", {"memory_gb": gigabytes}), estimate, mesh_lib.make_mesh(), **options)
  if words == "":
    with pytest.raises(out_of_memory.DoesNotFitError, match="a predicted peak of 10.0 GB in .* on a device of 7.6 GB, expected a run"):
      lacking()
  else:
    assert [line[: len(words or "")] for line in lacking()[:1]] == ([] if words is None else [words])


@pytest.mark.slow
@pytest.mark.parametrize("field", ["model.remat"])
def test_the_estimate_follows_the_settings(field):
  peak = lambda overrides: float(lines_of(overrides)[-1].split()[1].replace(",", ""))
  sizes = {"model.preset": "tiny", "learner.row_tokens": 256}
  assert peak(sizes | {field: "full"}) < peak(sizes | {field: "dots"}) < peak(sizes | {field: "none"})


@pytest.mark.parametrize("top_k", [265, 10**9])
def test_more_tokens_than_the_vocabulary_has_are_refused(top_k):
  with pytest.raises(ValueError, match=f"config.rollout.top_k: found {top_k}, expected at most 264"):
    lines_of({"rollout.top_k": top_k})
