"""Tests of the arena: whole entries on tiny sizes, and what is refused."""

import json

import numpy as np
import pytest

from experiments.arena import __main__ as arena
from experiments.claims import bed as beds
from experiments.studies.forecast import protocol
from jaxrl_llm import objectives

FILE = """
from jaxrl_llm import objectives
def objective(*, factor, length):
  return objectives.make("sapo", tau_pos=SHARPNESS)
"""


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
  """Shrinks the bed, and removes what is entered from the registry after each test."""
  monkeypatch.setattr(objectives, "OBJECTIVES", dict(objectives.OBJECTIVES))
  monkeypatch.setattr(protocol, "sizes", lambda length: beds.SMOKE._replace(digits=(length, length)))
  monkeypatch.setattr(arena, "NUM_SEEDS", 3)
  monkeypatch.setattr(arena, "CELL", protocol.Cell(8, beds.SMOKE.updates))
  monkeypatch.setattr(arena.compilation_cache, "cache_compilations", lambda: None)


def entry_file(tmp_path, sharpness=2.0, name="mine"):
  path = tmp_path / f"{name}.py"
  path.write_text(FILE.replace("SHARPNESS", str(sharpness)))
  return path


def enter(tmp_path, path, *flags):
  arena.main([f"--folder={tmp_path}", f"--enter={path}", *flags])
  return [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]


def test_an_entry_has_a_row_with_the_differences_of_paired_seeds(tmp_path, capsys):
  (row,) = enter(tmp_path, entry_file(tmp_path))
  areas = row["areas"]
  assert set(areas) == {"", *arena.RIVALS} and {len(own) for own in areas.values()} == {3}
  for name, gap in row["gaps"].items():
    assert gap["mean"] == pytest.approx(
      np.mean([areas[""][seed] - areas[name][seed] for seed in areas[""]]), abs=1e-3
    )
  line = arena.line_of(row)
  assert capsys.readouterr().out.splitlines()[-1] == line and line in (tmp_path / "BOARD.md").read_text()


def test_seeds_follow_from_code_and_rate_and_a_score_is_not_drawn_twice(tmp_path):
  path = entry_file(tmp_path)
  enter(tmp_path, path)
  with pytest.raises(
    SystemExit,
    match="--enter: found 'mine', whose code has its row with the rate .*a score is not drawn twice",
  ):
    enter(tmp_path, path)
  with pytest.raises(SystemExit, match="--name: found 'mine', expected another name"):
    enter(tmp_path, path, "--rate=1e-3")
  *_, other = enter(tmp_path, entry_file(tmp_path, 2.5, "other"))
  first, *_, third = enter(tmp_path, path, "--rate=1e-3", "--name=faster")
  seeds = [set(row["areas"][""]) for row in (first, other, third)]
  assert not (seeds[0] & seeds[1] or seeds[0] & seeds[2])
  practised = set(arena.PRACTICE) | set(protocol.SEEDS) | set(protocol.TUNING_SEEDS)
  assert not practised & set(range(10_000, 1_000_000)) and all(
    int(seed) >= 10_000 for own in seeds for seed in own
  )


def test_practice_stores_nothing(tmp_path, capsys):
  arena.main([f"--folder={tmp_path}", f"--practise={entry_file(tmp_path)}", "--seeds", "7", "8"])
  assert "seed 7: mine" in capsys.readouterr().out and not (tmp_path / "scores.jsonl").exists()


def test_a_seed_whose_imitation_fails_is_replaced(tmp_path, monkeypatch):
  entered = arena.entry.enter(str(entry_file(tmp_path)))
  train = arena.trial.train

  def failing(sizes, seed, arm):
    if seed == 1:
      raise beds.StartFailed
    return train(sizes, seed, arm)

  monkeypatch.setattr(arena.trial, "train", failing)
  score = arena.measure(entered, 1e-3, [0, 1, 2, 3], 2)
  assert list(score.areas[""]) == list(score.areas["grpo"]) == [0, 2] and score.failed == (1,)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (
      ["--enter=MINE", "--seeds", "3", "4"],
      "--seeds: found 3 4, expected none with --enter: you have seen them",
    ),
    (["--enter=grpo", "--estimator=opo"], "--enter: found 'opo', expected a file or a module of your own"),
    (["--enter=MINE", "--rate=0"], "--rate: found 0, expected a number above 0"),
    (["--practise=absent.py"], "--enter: found no file absent.py"),
  ],
)
def test_what_is_refused(flags, message, tmp_path):
  path = entry_file(tmp_path)
  with pytest.raises(SystemExit, match=f"^error: {message}"):
    arena.main([f"--folder={tmp_path}", *(flag.replace("MINE", str(path)) for flag in flags)])
