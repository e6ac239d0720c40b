"""The record of a run: the keys of its JSON, and records of other versions."""

import json

import pytest

from jaxrl_llm.workdir.record import Record, record_to_json, resumed

SHARED = (
  "command", "started", "attempts", "resumed_at", "warm_steps", "rl_steps", "tokens", "skipped_steps", "skipped_in_a_row", "failed_saves",
  "nonfinite_dumps", "accuracy_start", "accuracy_final", "seconds", "phase_steps", "peak_memory_gb", "base", "data",
  "data_fingerprint",
)  # fmt: skip
OF_RL = {
  "kl_coef": 0.0, "kl_coef_began": 0.0, "predicted_memory_gb": 0.01, "batch_sizes": {"prompts": 8, "demonstrations": 32},
  "alarms": {"counts": {}},
}  # fmt: skip


@pytest.mark.parametrize("own", [OF_RL, {"batch_pairs": 16}], ids=["RL", "reward model"])
def test_a_checkpoint_holds_the_keys_of_its_job(own):
  record = record_to_json(Record("command", **own))
  assert set(record) == {*SHARED, *own}
  assert json.loads(json.dumps(record)) == record


def test_an_attempt_continues_from_the_saved_record():
  saved = record_to_json(Record("first", rl_steps=3, tokens=700, accuracy_start=0.25, phase_steps={"rl": 3}, **OF_RL))
  record = record_to_json(resumed(Record("second", base="other", **OF_RL | {"kl_coef": 0.5}), saved))
  assert record == saved | {"attempts": 2, "resumed_at": [3]}


def test_an_older_record_lacks_keys_and_a_newer_one_has_more():
  """Missing fields are those of a new run; unknown ones are kept and saved again."""
  saved = {"command": "first", "started": "2026-01-01T00:00:00+00:00", "attempts": 4, "warm_steps": 5, "rl_steps": 6, "moon": [1]}
  record = resumed(Record("second", skipped_steps=0, **OF_RL | {"kl_coef": 0.5}), saved)
  assert (record.command, record.attempts, record.rl_steps, record.kl_coef, record.failed_saves) == ("first", 5, 6, 0.5, 0)
  again = resumed(Record("third"), record_to_json(record))
  assert record_to_json(record)["moon"] == [1] and record_to_json(again)["moon"] == [1]
