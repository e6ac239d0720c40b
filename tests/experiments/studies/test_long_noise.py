"""The study of noise on responses of up to 256 tokens: its rules and its command."""

import json

import numpy as np
import pytest

from experiments.claims.bed import StartFailed
from experiments.results import from_json
from experiments.studies.long_noise import __main__ as command
from experiments.studies.long_noise import bed, rules

CLIPS = {"grpo": 0.1, "gspo": 30.0}


def trial(length, seed, *, slope=0.0, std=0.1):
  """Returns a trial in which GRPO's noise over GSPO's grows as T^slope."""
  noise = dict.fromkeys(rules.measured(CLIPS), 1.0) | {"grpo": length**slope * (1 + 0.01 * (seed % 3)), "product": float(length)}
  spread = {"std_token": std, "std_sequence": std / np.sqrt(length) * (1 + 0.01 * (seed % 2)), "std_product": std * np.sqrt(length)}
  return {"length": length, "seed": seed, "objectives": {name: {"inflation": x, "clipped": 0.1} | spread for name, x in noise.items()}}


def trials(**options):
  return [trial(length, seed, **options) for length in rules.LENGTHS for seed in rules.SEEDS]


def test_slopes_are_exponents_of_the_length():
  np.testing.assert_allclose(rules.slopes(trials(slope=0.4), lambda of: np.log(of["grpo"]["inflation"])), 0.4, atol=1e-9)


def test_the_rules_wait_for_all_trials_and_read_the_slopes():
  verdicts = {name: row["verdict"] for name, row in rules.judge(trials(slope=0.4), []).items()}
  assert verdicts[rules.CONFIRMATORY] == verdicts["slope: product ratio"] == verdicts["spread: sequence ratio"] == "reproduced"
  assert rules.judge(trials(slope=-0.4), [])[rules.CONFIRMATORY]["verdict"] == "contradicted"
  still = rules.judge(trials(slope=0.4, std=1e-3), [])
  assert {row["verdict"] for row in still.values()} == {"mechanism not engaged"}
  waits = rules.judge(trials()[:-1], [])
  assert list(waits) == [rules.CONFIRMATORY] and "1 are left" in waits[rules.CONFIRMATORY]["rule"]
  # A seed whose imitation failed is no longer waited for, and counts at no length.
  left_out = rules.judge(trials(slope=0.4)[:-1], [(rules.LENGTHS[-1], rules.SEEDS[-1])])
  assert left_out[rules.CONFIRMATORY]["seeds"] == len(rules.SEEDS) - 1


def test_a_stopped_study_resumes_and_keeps_what_failed(tmp_path, monkeypatch, capsys):
  ran = []

  def run(length, seed, clips):
    assert clips == CLIPS
    if len(ran) == 5:
      raise KeyboardInterrupt
    ran.append((length, seed))
    if seed == rules.SEEDS[1]:
      raise StartFailed(f"seed {seed}: found fewer than 40% right")
    return trial(length, seed)

  calibrated = []
  monkeypatch.setattr(bed, "calibrate", lambda length: calibrated.append(length) or CLIPS)
  monkeypatch.setattr(bed, "run", run)
  with pytest.raises(KeyboardInterrupt):
    command.main([f"--folder={tmp_path}"])
  monkeypatch.setattr(bed, "run", lambda length, seed, clips: ran.append((length, seed)) or trial(length, seed))
  command.main([f"--folder={tmp_path}"])
  assert ran == [(length, seed) for length in rules.LENGTHS for seed in rules.SEEDS] and calibrated == list(rules.LENGTHS)
  assert "it is left out" in (out := capsys.readouterr().out) and rules.CONFIRMATORY in out
  assert (tmp_path / "figures" / "long_noise.png").is_file()
  results = from_json((tmp_path / "results.json").read_text())
  assert results["failed"] == [[16, rules.SEEDS[1]]] and len(results["means"]) == len(rules.LENGTHS) * len(rules.measured(CLIPS))
  lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
  assert sum("clips" in line for line in lines) == 3
