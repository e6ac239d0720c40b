"""Search: draws, relaunches and refusals. The trials are stand-ins, and nothing is trained."""

import json
from pathlib import Path

import pytest

from experiments.launch import hyper, rows, searching
from experiments.launch.rows import SweepError

pytest.importorskip("optuna")

SPACE = {
  "learner.learning_rate": hyper.log_uniform(1e-5, 1e-2),
  "objective.clip_low": hyper.uniform(0.1, 0.3),
  "learner.updates_per_rollout": hyper.integers(1, 4),
  "eval.metrics": hyper.choice((("a", "b"), ("a",))),
  "num_steps": 3,
}


def begin(folder, space=SPACE, **options):
  return searching.open_search(folder, space, **options)


def draw(folder, count, **options):
  search = begin(folder, **options)
  return [searching.ask(search) for _ in range(count)]


def test_rows_are_within_the_space_and_the_command_line_carries_them_exactly(tmp_path):
  drawn = draw(tmp_path, 8)
  for row in drawn:
    overrides = row.overrides
    assert row == rows.make_row(overrides) and list(overrides) == list(SPACE) and overrides["num_steps"] == 3
    assert 0.9e-5 < overrides["learner.learning_rate"] < 1.1e-2 and 0.1 <= overrides["objective.clip_low"] <= 0.3
    assert overrides["learner.updates_per_rollout"] in range(1, 5) and isinstance(overrides["learner.updates_per_rollout"], int)
    assert overrides["eval.metrics"] in (("a", "b"), ("a",))
    assert len(rows.value_text(overrides["objective.clip_low"])) <= 6
  assert len({row.id for row in drawn}) == 8


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_draws_depend_on_the_seed_and_not_on_relaunches(tmp_path, kind):
  at_once = draw(tmp_path / "at once", 4, kind=kind, seed=3)
  bit_by_bit = [draw(tmp_path / "bit by bit", 1, kind=kind, seed=3)[0] for _ in range(4)]
  assert at_once == bit_by_bit != draw(tmp_path / "other", 4, kind=kind, seed=4)


def test_random_draws_do_not_depend_on_results(tmp_path):
  search, drawn = begin(tmp_path / "told"), []
  for value in (1.0, None, 3.0):
    drawn.append(searching.ask(search))
    searching.tell(search, drawn[-1], value)
  assert drawn == draw(tmp_path / "silent", 3)


def test_tpe_draws_more_near_good_results(tmp_path):
  search = begin(tmp_path, {"x": hyper.uniform(0, 1)}, kind="tpe")
  drawn = []
  for _ in range(40):
    drawn.append(searching.ask(search))
    searching.tell(search, drawn[-1], -abs(drawn[-1].overrides["x"] - 0.8))
  late = [abs(row.overrides["x"] - 0.8) for row in drawn[20:]]
  assert sum(late) / len(late) < 0.2  # The mean of random draws is 0.34.


def test_the_next_launcher_knows_rows_that_have_no_result_yet(tmp_path):
  search = begin(tmp_path)
  good, bad, killed = (searching.ask(search) for _ in range(3))
  searching.tell(search, good, 0.5)
  searching.tell(search, bad, float("nan"))
  again = begin(tmp_path)
  assert searching.asked(again) == [(good, True), (bad, True), (killed, False)]
  searching.tell(again, killed, 0.7)
  searching.tell(again, good, 9.9)  # It has a result already, which stays.
  assert [is_told for _, is_told in searching.asked(again)] == [True] * 3 and again.study.best_value == 0.7


def test_no_row_is_drawn_twice_until_a_space_is_exhausted(tmp_path):
  search = begin(tmp_path, {"a": hyper.choice((1, 2)), "b": hyper.choice(("x", "y"))})
  assert len({searching.ask(search).id for _ in range(4)}) == 4
  with pytest.raises(SweepError, match="no more rows than these 4"):
    searching.ask(search)


@pytest.mark.parametrize(
  "text, message",
  [
    ("def sweep(add): pass", "found no space(h), expected one with --search"),
    ("def space(h): return [1]", "space returned a list, expected a dict of distributions by field"),
    ("def space(h): return {'seed': h.choice(())}", "choice: found no values, expected at least one (line 1)"),
    ("def space(h): return {'seed': h.uniform(2, 1)}", "found 2.0 to 1.0, expected the smaller number first (line 1)"),
    ("def space(h): return {'seed': h.integers(1.5, 3)}", "integers: found 1.5 to 3, expected whole numbers (line 1)"),
    ("def space(h): return {'seed': h.uniform(0, 1e999)}", "found 0.0 to inf, expected finite numbers (line 1)"),
    ("def space(h): return {'seed': h.log_uniform(0, 1)}", "log_uniform: found 0 to 1, expected numbers > 0 (line 1)"),
    ("def space(h): return {'seed': h.normal(0, 1)}", "AttributeError"),
  ],
)
def test_a_bad_file_is_refused(tmp_path, text, message):
  (tmp_path / "space.py").write_text(text + "\n")
  with pytest.raises(SweepError) as error:
    searching.read_space(str(tmp_path / "space.py"))
  assert message in str(error.value) and "\n" not in str(error.value)


def test_a_bad_search_is_refused(tmp_path):
  with pytest.raises(SweepError, match="found 'grid', expected random or tpe"):
    begin(tmp_path, kind="grid")
  with pytest.raises(SweepError, match="found nothing to draw"):
    begin(tmp_path, {"seed": 1})
  searching.ask(begin(tmp_path, {"seed": hyper.choice((1, 2))}))
  with pytest.raises(SweepError, match="differs from the space with which this folder's search began"):
    searching.ask(begin(tmp_path, {"seed": hyper.choice((1, 2, 3))}))


def test_the_metric_is_a_number_of_the_summary(tmp_path):
  (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "accuracy_final": 0.5, "seconds": {"rl": 1}}))
  assert searching.metric_of(tmp_path, "accuracy_final") == 0.5
  assert searching.metric_of(tmp_path, "seconds") is None and searching.metric_of(Path("nowhere"), "accuracy_final") is None


@pytest.mark.parametrize("status", ["running", "stopped: SIGTERM"])
def test_a_stopped_run_has_no_result(tmp_path, status):
  # Its summary has an accuracy nevertheless, namely the newest.
  (tmp_path / "summary.json").write_text(json.dumps({"status": status, "accuracy_final": 0.5}))
  assert searching.metric_of(tmp_path, "accuracy_final") is None


def test_a_large_seed_is_accepted(tmp_path):
  assert draw(tmp_path / "1", 1, seed=5000) == draw(tmp_path / "2", 1, seed=5000)


def test_a_misspelt_metric_lists_the_existing_ones(tmp_path):
  (tmp_path / "summary.json").write_text('{"status": "finished", "accuracy_final": 0.5, "num_steps": 3, "objective": "gspo"}')
  (tmp_path / "report.html").write_text("")
  assert searching.metric_of(tmp_path, "accuracy_final") == 0.5
  with pytest.raises(rows.SweepError, match="found 'acuracy_final'.* did you mean accuracy_final. .there are: accuracy_final, num_steps"):
    searching.metric_of(tmp_path, "acuracy_final")
