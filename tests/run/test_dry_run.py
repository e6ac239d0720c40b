"""The memory estimate of `--dry_run`."""

import pytest

from jaxrl_llm.run import dry_run
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


def test_a_run_that_does_not_fit_comes_with_advice(monkeypatch):
  monkeypatch.setattr(dry_run, "memory_limit", lambda device, num_sharing: 1_000_000)
  monkeypatch.setattr(
    dry_run, "advice", lambda config, vocab_size, **kwargs: ["  --config.model.remat=full: saves 1.0 of 9.0 MB"]
  )
  text = "\n".join(lines_of({}))
  assert "the peak exceeds the 0.00 GB of a device; what would lower it most:\n  --config.model.remat=full" in text
  monkeypatch.setattr(dry_run, "memory_limit", lambda device, num_sharing: None)
  assert "exceeds" not in "\n".join(lines_of({}))


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
