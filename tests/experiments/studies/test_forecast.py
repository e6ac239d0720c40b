"""Tests of the forecast study.

They cover its protocol, its score on hand-made rankings, its resumption, its leaderboard and a
smoke run.
"""

import json
import re

import numpy as np
import pytest

from experiments import judging, provenance
from experiments.ablations.routing_replay.measures import where
from experiments.claims import study
from experiments.results import from_json, rounded
from experiments.studies.forecast import __main__ as command
from experiments.studies.forecast import board, checks, complete, power, protocol, rules
from experiments.studies.forecast.protocol import Cell
from jaxrl_llm import objectives

PAIRS = json.loads(rules.PUBLISHED.read_text())


def test_every_published_pair_has_a_source_and_can_be_forecast():
  assert len(PAIRS) >= 30 and len({pair["source"].split(",")[0] for pair in PAIRS}) >= 10
  cells = {Cell(row["length"], row["updates"], row["mismatch"]) for row in protocol.main_trials(protocol.OBJECTIVES)}
  for pair in PAIRS:
    assert {pair["winner"], pair["loser"]} <= set(protocol.OBJECTIVES) and pair["winner"] != pair["loser"]
    assert pair["url"].startswith("https://") and pair["quote"] and len(pair["quote"].split()) <= 30
    assert rules.cell_of(pair) in cells
    if pair["winner_value"] is not None and pair["loser_value"] is not None:
      assert pair["winner_value"] > pair["loser_value"]
  assert len({(pair["paper"], frozenset((pair["winner"], pair["loser"]))) for pair in PAIRS}) == len(PAIRS), "one of each paper"


def test_the_tuning_is_the_same_for_all_objectives_and_its_seeds_are_separate():
  trials = protocol.tuning(protocol.OBJECTIVES)
  assert len(trials) == len(protocol.OBJECTIVES) * protocol.DRAWS * len(protocol.TUNING_SEEDS)
  assert {tuple(row[name] for name in command.NAMES) for row in trials} and not set(protocol.TUNING_SEEDS) & set(protocol.SEEDS)
  assert protocol.draws()[0] == (1e-3, 1.0) and len(set(protocol.draws())) == protocol.DRAWS
  for _, factor in protocol.draws():
    for name in protocol.OBJECTIVES:
      for length in protocol.LENGTHS:
        objectives.make(name, **dict(protocol.settings(name, factor, length)))


def test_a_factor_of_one_gives_the_constants_of_the_papers():
  for name in ("dapo", "sapo", "cispo", "gmpo", "vespo", "dppo_tv", "minirl"):
    settings = dict(protocol.settings(name, 1.0, 64))
    assert objectives.make(name, **settings).needs == objectives.make(name).needs
    defaults = objectives.OBJECTIVES[name].__kwdefaults__ or {}
    assert all(defaults.get(key, value) == value for key, value in settings.items()), name


def test_the_draw_with_the_highest_mean_is_chosen_and_all_trials_are_needed():
  best = {name: place % protocol.DRAWS for place, name in enumerate(protocol.OBJECTIVES)}
  rows = [row | {"area": 0.5 + 0.01 * (row["draw"] == best[row["objective"]])} for row in protocol.tuning(protocol.OBJECTIVES)]
  assert protocol.chosen(rows, protocol.OBJECTIVES) == best
  with pytest.raises(ValueError, match="found a tuning with trials missing"):
    protocol.chosen(rows[:-1], protocol.OBJECTIVES)


def ranked(order):
  """Makes mean areas for every condition from a ranking of the objectives, best first."""
  return {
    Cell(64, updates, mismatch): {name: 1.0 - 0.01 * place for place, name in enumerate(order)}
    for updates in protocol.UPDATES for mismatch in ("none", "float8")
  }  # fmt: skip


def pair(winner, loser, source="A, table 1", **other):
  """Makes a published comparison."""
  regime = {"updates_per_rollout": 8, "staleness_updates": None, "mismatch_noted": None}
  return {"winner": winner, "loser": loser, "source": source} | regime | other


def test_forecasts_are_scored_against_random_rankings():
  order = protocol.OBJECTIVES
  right = [pair(a, b) for place, a in enumerate(order) for b in order[place + 1 : place + 3]]
  row = rules.forecast(ranked(order), right)
  assert row["verdict"] == "reproduced" and row["share"] == 1 and row["p"] < 0.001 and row["waiting"] == 0
  row = rules.forecast(ranked(order[::-1]), right)
  assert row["verdict"] == "inconclusive" and row["right"] == 0 and row["p"] == 1
  few = rules.forecast(ranked(order), right[:2])
  assert few["share"] == 1 and few["p"] > 0.05 and few["verdict"] == "inconclusive", "two right forecasts of two are no evidence"
  row = rules.forecast(ranked(order), [*right[:3], pair(order[5], order[0], source="B")])
  assert (row["right"], row["of"], row["by_paper"]) == (3, 4, 0.5)


def test_pairs_without_trials_are_waiting_and_ties_are_not_forecast():
  pairs = [pair("grpo", "gspo"), pair("grpo", "sapo", updates_per_rollout=None, staleness_updates=256), pair(None, None)]
  row = rules.forecast({Cell(64, 8): {"grpo": 0.6, "gspo": 0.5}}, pairs)
  assert (row["of"], row["waiting"], row["published_ties"]) == (1, 1, 1)
  assert rules.forecast({}, pairs)["verdict"] == "mechanism not engaged"


def test_objectives_are_compared_with_grpo_after_holm():
  rng, trials = np.random.default_rng(0), []
  for name in ("grpo", "gspo", "sapo", protocol.AGAIN, "dapo", "cispo", "gmpo"):
    for seed in range(8):
      area = 0.5 + 0.1 * (name == "gspo") + 0.004 * rng.standard_normal()
      trials.append({"stage": "main", "objective": name, "seed": seed, "area": area} | Cell(8, 1)._asdict())
  verdicts = rules.judge({"trials": trials})
  assert verdicts["T 8, N 1: gspo above grpo"]["verdict"] == "reproduced" and not verdicts["T 8, N 1: gspo above grpo"]["equal"]
  assert verdicts["T 8, N 1: sapo above grpo"]["verdict"] == "inconclusive" and verdicts["T 8, N 1: sapo above grpo"]["equal"]
  assert all(row["p_holm"] >= row["p"] for name, row in verdicts.items() if "above" in name)
  assert verdicts["FORECAST"]["waiting"] == len(PAIRS)


def test_checks_list_what_fails():
  row = {"length": 8, "right": 0.4, "std_log_rho": 0.2, "clipped": 0.15, "k3": 1e-3}
  good = {"rows": [row, row | {"length": 64, "std_log_rho": 0.6}]}
  assert checks.problems_of(good) == [] and checks.text(good).endswith("all checks pass")
  bad = {"rows": [row | {"clipped": 0.6}, row | {"length": 64, "k3": 1e-5}]}
  assert checks.problems_of(bad) == [
    "8 digits: clipped: found 0.6, expected 0.05 to 0.4",
    "64 digits: k3: found 1e-05, expected 0.0003 to 0.003",
    "std_log_rho: found 0.2 at 64 digits, expected more than at 8",
  ]


def test_the_checked_in_numbers_pass_the_checks():
  assert checks.problems_of(from_json((command.HERE / "checks.json").read_text())) == []


def test_the_rules_and_forecasts_are_older_than_the_first_trial():
  recorded = json.loads((command.HERE / study.STARTED).read_text())
  assert set(recorded["also"]) == {f"experiments/studies/forecast/{name}" for name in ("protocol.py", "published.json")}
  doubt = provenance.doubt(recorded, command.HERE / "rules.py")
  if doubt is None:
    pytest.skip("no git history")
  assert not doubt


def test_the_contrasts_beside_the_staleness_ladder_are_those_of_the_trials():
  """The ladder's page shows seven contrasts, at one learning rate and tuned equally."""
  folder = command.HERE.parents[1] / "claims" / "staleness"
  ladder = where(from_json((folder / "results.json").read_text())["trials"], per_rollout=64)
  tuned = where(study.read_trials(command.HERE / "trials.jsonl"), stage="main", **Cell(8, 64)._asdict())
  names = {"DPPO, TV": "dppo_tv"}

  def contrast(rows, more, less, end):
    more, less = ({row["seed"]: end(row) for row in where(rows, objective=names.get(name, name.lower()))} for name in (more, less))
    at = judging.interval(judging.paired(more, less))
    assert len(more) == len(less) == 24
    return [100 * at[name] for name in ("mean", "low", "high")]

  table = re.findall(r"^\| ([\w, ]+) minus (\w+) \| (.+) \| (.+) \|$", (folder / "README.md").read_text(), flags=re.MULTILINE)
  assert len(table) == 7
  for more, less, one_rate, equally in table:
    numbers = lambda text: [float(x) for x in re.findall(r"[-+][\d.]+", text)]
    end = lambda row: sum(map(int, row["right"])) / len(row["right"]) / row["samples"]
    assert numbers(one_rate) == pytest.approx(contrast(ladder, more, less, end), abs=0.06), (more, less)
    assert numbers(equally) == pytest.approx(contrast(tuned, more, less, lambda row: row["end"]), abs=0.06), (more, less)


@pytest.mark.slow
def test_the_checked_in_results_follow_from_the_trials():
  rows = study.read_trials(command.HERE / "trials.jsonl")
  results = from_json((command.HERE / "results.json").read_text())
  verdicts, withheld = complete.judge(rows)
  assert (results["verdicts"], results["withheld"]) == (rounded(verdicts), withheld)
  assert (command.HERE / board.PAGE).read_text() == board.text(rows)


@pytest.fixture
def three(monkeypatch):
  """A protocol of three objectives, six seeds and three conditions of eight tokens."""
  monkeypatch.setattr(protocol, "OBJECTIVES", ("grpo", "gspo", "sapo"))
  monkeypatch.setattr(protocol, "SEEDS", tuple(range(6)))
  monkeypatch.setattr(protocol, "BLOCKS", ((Cell(8, 1), Cell(8, 8), Cell(64, 8)),))


def main_trials(*cells):
  """Makes the trials of the fixture `three` in some conditions, with GSPO ten points above."""
  means = (("grpo", 0.5, 1e-3), ("gspo", 0.6, 2e-3), ("sapo", 0.51, 1e-3), (protocol.AGAIN, 0.5, 1e-3))
  return [
    {"stage": "main", "objective": name, "seed": seed, "rate": rate, "factor": 1.0, "area": area + 0.001 * ((seed * place) % 3)}
    | cell._asdict()
    for cell in cells for place, (name, area, rate) in enumerate(means) for seed in range(6)
  ]  # fmt: skip


@pytest.mark.usefixtures("three")
def test_the_board_ranks_objectives_with_their_constants_where_gates_act_and_marks_none():
  text = board.text(main_trials(Cell(8, 1), Cell(8, 8)))
  lines = text.partition("| objective |")[2].splitlines()
  assert lines[0] == " rate | width, times the paper's | mean rank | T 8, N 8 (6 seeds) |", "none with one update"
  assert lines[2].startswith("| gspo | 0.002 | 1 | 1.0 | +10.1 [") and "| grpo | 0.001 | 1 | " in text and "| 50.0 % |" in text
  assert "**" not in "".join(lines), "no row shows yet how noisy the tuning is"
  assert lines[-1] == "| explained by the pairs | | | | 99 % |"
  assert board.text([]).endswith("No condition is complete yet.\n")


@pytest.mark.usefixtures("three")
def test_the_score_and_the_board_wait_for_every_trial_of_a_condition(monkeypatch):
  monkeypatch.setattr(rules, "cell_of", lambda pair: Cell(64, 8))
  rows = main_trials(Cell(8, 1), Cell(8, 8), Cell(64, 8))
  verdicts, withheld = complete.judge(rows)
  assert withheld == {} and set(complete.SCORES) <= set(verdicts) and "T 64, N 8: gspo above grpo" in verdicts
  verdicts, withheld = complete.judge(rows[:-1])
  assert not set(complete.SCORES) & set(verdicts) and not [name for name in verdicts if name.startswith("T 64")]
  assert "T 8, N 8: gspo above grpo" in verdicts
  assert withheld == {"FORECAST": "withheld until all trials of the 1 conditions that it uses are done: 23 of 24 are"}
  assert "T 64" not in board.text(rows[:-1]) and "T 64, N 8 (6 seeds)" in board.text(rows)


def test_the_checked_in_score_is_withheld_or_complete():
  results = from_json((command.HERE / "results.json").read_text())
  stored = set(complete.SCORES) & set(results["verdicts"])
  assert stored == (set() if results["withheld"] else set(complete.SCORES))


@pytest.mark.exhaustive  # Compiles two objectives and three samplers.
@pytest.mark.usefixtures("small")
def test_the_command_tunes_trains_resumes_and_refuses_changed_rules(tmp_path, capsys):
  with pytest.raises(SystemExit, match="error: found a tuning with trials missing, expected all: run --stage=tune first"):
    command.main(["--stage=main", f"--folder={tmp_path}"])
  command.main(["--stage=tune", f"--folder={tmp_path}", "--seconds=0"])
  assert "tune: 0 of 8 trials" in capsys.readouterr().out
  command.main(["--stage=tune", f"--folder={tmp_path}"])
  command.main(["--stage=main", f"--folder={tmp_path}"])
  out = capsys.readouterr().out
  assert "tune: 8 of 8 trials\nmain: 12 of 12 trials" in out and "FORECAST: " in out
  assert len(study.read_trials(tmp_path / "trials.jsonl")) == 20
  assert from_json((tmp_path / "results.json").read_text())["verdicts"]["T 4, N 1: gspo above grpo"]["seeds"] == 2
  assert (tmp_path / "figures" / "forecast.png").stat().st_size > 10_000
  board_text = (tmp_path / "LEADERBOARD.md").read_text()
  assert "| grpo | " in board_text and "T 4, N 2, float8 (2 seeds)" in board_text
  command.main(["--stage=main", f"--folder={tmp_path}"])
  assert "area" not in capsys.readouterr().out.partition("tune:")[0], "nothing is left to run"
  started = tmp_path / "started.json"
  started.write_text(json.dumps(json.loads(started.read_text()) | {"rules": "of yesterday"}))
  with pytest.raises(SystemExit, match="rules.py: changed since the study was started at 2"):
    command.main(["--stage=main", f"--folder={tmp_path}"])


@pytest.mark.usefixtures("small")
@pytest.mark.exhaustive
def test_the_checks_run_on_a_small_bed(tmp_path, capsys):
  command.main(["--check", f"--folder={tmp_path}"])
  (row,) = from_json((tmp_path / "checks.json").read_text())["rows"]
  assert set(row) == {"length", "right", "std_log_rho", "clipped", "k3"} and "length 4" in capsys.readouterr().out


def test_the_power_of_the_score_is_that_of_the_readme():
  own, text = power.power(PAIRS), (rules.PUBLISHED.parent / "README.md").read_text()
  assert f"**{own.needed} of the {own.of} must be right**" in text and f"more than about {own.most} (" in text
  shown = " | ".join(f"{share:.0%}".replace("%", " %") for share in own.chances.values())
  assert f"all 46 pairs | {shown} |" in text


def test_strengths_follow_the_pairs():
  chain = power.strengths(np.array([0, 0, 1, 1, 2]), np.array([1, 2, 2, 3, 3]), 4)
  assert list(np.argsort(-chain)) == [0, 1, 2, 3] and abs(chain.mean()) < 1e-9 and chain.std() == pytest.approx(1)
  pairs = [{"winner": winner, "loser": loser} for winner, loser in ("ab", "bc")]
  # A random ranking gets both right in a sixth of all cases, so that no forecaster is noticed.
  assert power.power(pairs).needed == 3 and set(power.power(pairs).chances.values()) == {0.0}
