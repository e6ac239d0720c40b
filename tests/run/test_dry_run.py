"""`--dry_run`: what it says of memory."""

import pytest

from jaxrl_llm.run import dry_run
from tests.runs import quick, tiny_config


def lines_of(overrides: dict, devices: int = 1) -> list[str]:
  with quick(devices):
    return dry_run.describe(tiny_config("grpo", overrides)).splitlines()


def test_a_table_of_what_takes_the_memory():
  lines = lines_of({})
  (start,) = [i for i, line in enumerate(lines) if line == "estimated memory of each device, in MB:"]
  rows = {line.split()[0]: line for line in lines[start + 1 :]}
  assert list(rows) == ["always", "update", "logprobs", "sampling", "peak"]
  for kind in ("weights", "optimizer moments", "frozen reference", "batch"):
    assert kind in rows["always"]
  assert "gradients" in rows["update"] and "key-value cache" in rows["sampling"]


def test_devices_that_only_sample_have_a_table_of_their_own():
  lines = lines_of({"mesh.sampler": 4}, devices=8)
  (start,) = [i for i, line in enumerate(lines) if line == "estimated memory of each device that only samples, in MB:"]
  assert "key-value cache" in lines[start + 1] and "weight sync" in "\n".join(lines[:start])


def test_what_does_not_fit_comes_with_what_would_help(monkeypatch):
  monkeypatch.setattr(dry_run, "memory_limit", lambda device, num_sharing: 1_000_000)
  monkeypatch.setattr(dry_run, "advice", lambda config, vocab_size, **kwargs: ["  --config.model.remat=full: 1.0 MB less of 9.0"])
  text = "\n".join(lines_of({}))
  assert "that is more than the 0.00 GB that a device has; what would lower it most:\n  --config.model.remat=full" in text
  monkeypatch.setattr(dry_run, "memory_limit", lambda device, num_sharing: None)
  assert "more than" not in "\n".join(lines_of({}))


@pytest.mark.parametrize("field", ["model.remat"])
def test_the_prediction_follows_the_settings(field):
  peak = lambda overrides: float(lines_of(overrides)[-1].split()[1].replace(",", ""))
  sizes = {"model.preset": "tiny", "learner.row_tokens": 256}
  assert peak(sizes | {field: "full"}) < peak(sizes | {field: "dots"}) < peak(sizes | {field: "none"})
