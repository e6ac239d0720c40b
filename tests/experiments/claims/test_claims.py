"""The list of claims, its page and its command. No test here runs a study."""

import importlib
import importlib.util
import pathlib
import re
import types

import pytest

from experiments import judging
from experiments.claims import __main__ as command
from experiments.claims import page
from experiments.claims.claim import CLAIMS, folder_of
from experiments.results import from_json, rounded, to_json

INTERVAL = {"mean": 0.03, "low": 0.01, "high": 0.05}


def test_every_claim_is_listed_once():
  assert list(CLAIMS) == [f"E{number}" for number in range(1, 26) if number != 22]
  for claim in CLAIMS.values():
    assert "arXiv:" in claim.source and claim.says.endswith(".") and claim.main_rule.startswith(claim.name), claim.name


def test_the_page_is_up_to_date_with_the_results():
  assert page.text() == (page.HERE / "README.md").read_text(), "run: python -m experiments.claims --page"


def test_the_results_have_the_page_s_counts_of_verdicts():
  (counts,) = re.findall(rf"\*\*Of {len(CLAIMS)} claims: (.*)\.\*\*", page.text())
  assert f"| {counts} |" in (page.HERE.parents[1] / "docs" / "results.md").read_text()


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_a_study_that_has_run_has_its_rule_and_its_figure(claim):
  results = page.results_of(claim)
  if not results:
    assert page.NOT_RUN in page.row(claim, results)
    return
  rules = page.rules_of(claim, results)
  assert page.main_rule(claim, rules) in rules
  assert {rule["verdict"] for rule in rules.values()} <= set(judging.VERDICTS)
  assert (folder_of(claim) / claim.figure).exists()


def test_a_row_names_the_main_verdict_and_counts_the_others():
  claim = CLAIMS["E2"]._replace(main_rule="E2, second")
  verdicts = {
    "E2, first": {"rule": "r", "verdict": "reproduced"},
    "E2, second": {"rule": "r", "verdict": "mechanism not engaged", "interval": INTERVAL, "seeds": 5, "p": 0.012, "finds": 0.02},
    "E2, rate": {"rule": "r", "verdict": "calibration"},
    "E20, another claim": {"rule": "r", "verdict": "contradicted"},
  }
  row = page.row(claim, {"verdicts": verdicts, "processor_seconds": 12.3})
  assert "**mechanism not engaged**<br>of 1 others: 1 reproduced" in row
  assert "E2, second: +0.03 [+0.01, +0.05], 5 seeds, p = 0.012; would find 0.02" in row and "12 s of a core" in row
  assert "| not recorded |" in row, "whether the rules are older than the run"
  with pytest.raises(KeyError, match="E2: main_rule: found 'E2, third', expected one of E2, first, E2, second"):
    page.row(claim._replace(main_rule="E2, third"), {"verdicts": verdicts})


def test_a_confirmatory_rule_has_to_survive_holm():
  claim = CLAIMS["E2"]._replace(main_rule="E2")
  results = {"verdicts": {"E2": {"rule": "r", "verdict": "reproduced", "interval": INTERVAL, "seeds": 5, "p": 0.012, "finds": 0.02}}}
  assert "| **reproduced** |" in page.row(claim, results, 0.03) and "after Holm p = 0.03" in page.row(claim, results, 0.03)
  assert "| **inconclusive**, reproduced if it were the only one |" in page.row(claim, results, 0.2)


# The imitation of eight layers of experts often fails, before any arm is trained.
FEWER_SEEDS = {"experiments.claims.experts": 0.5}


@pytest.mark.parametrize("study", sorted({claim.study for claim in CLAIMS.values()}))
def test_the_stored_verdicts_and_tables_are_those_of_the_current_rules(study):
  folder = folder_of(next(claim for claim in CLAIMS.values() if claim.study == study))
  results = from_json((folder / "results.json").read_text())
  rules = importlib.import_module(f"{study}.rules")
  assert {claim.name: claim.main_rule for claim in CLAIMS.values() if claim.study == study} == rules.CONFIRMATORY
  verdicts = rounded(rules.judge(results))
  assert verdicts == results["verdicts"], "run: python -m experiments.claims --judge"
  planned = getattr(rules, "SEEDS", getattr(rules, "WARM", ()))
  assert set(results.get("seeds", ())) <= set(planned), "a seed whose imitation fails has no trials"
  assert len(results.get("seeds", ())) >= FEWER_SEEDS.get(study, 0.8) * len(planned)
  about = (folder / "README.md").read_text()
  assert page.with_table(about, verdicts) == about, "run: python -m experiments.claims --judge"


def test_a_page_without_markers_for_its_table_is_refused():
  with pytest.raises(ValueError, match="found no table of verdicts, expected one between '<!-- verdicts"):
    page.with_table("# A study", {})


def test_a_study_can_be_judged_and_drawn_again(monkeypatch, tmp_path, capsys):
  """Judging a copy of a study without one of its verdicts restores its results and its page."""
  pytest.importorskip("matplotlib")
  study, folder = "experiments.claims.gate_asymmetry", folder_of(CLAIMS["E15"])
  for name in ("results.json", "README.md"):
    (tmp_path / name).write_text((folder / name).read_text())
  results = from_json((tmp_path / "results.json").read_text())
  results["verdicts"].pop("E15, accuracy above equal, hot rate")
  (tmp_path / "results.json").write_text(to_json(results))
  find = importlib.util.find_spec
  here = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: here if name == study else find(name))
  monkeypatch.setattr(command, "CLAIMS", {"E15": CLAIMS["E15"]})
  monkeypatch.setattr(page, "write", lambda: "a page")
  assert command.main(["--judge"]) == 0
  assert capsys.readouterr().out == f"{study}: {len(results['verdicts']) + 1} rules, 1 changed\nwrote a page\n"
  for name in ("results.json", "README.md"):
    assert (tmp_path / name).read_text() == (folder / name).read_text()
  assert (tmp_path / "figures" / "gate_asymmetry.png").stat().st_size > 10_000


def test_a_claim_with_results_of_another_claim_alone_has_not_run():
  row = page.row(CLAIMS["E2"], {"verdicts": {"E20": {"rule": "r", "verdict": "reproduced"}}})
  assert page.NOT_RUN in row


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["E99"], "error: claim: found 'E99' (did you mean 'E9'?), expected one of E1 to E21, E23 to E25, or --page for the page of all\n"),
    (["staleness"], "error: claim: found 'staleness', expected one of E1 to E21, E23 to E25, or --page for the page of all\n"),
    (["--smoke"], "error: claim: found '--smoke', expected one of E1 to E21, E23 to E25, or --page for the page of all\n"),
    (
      ["e4", "--smoke"],
      "error: --smoke: found no --folder, expected --folder=DIR, so that the measured results are not overwritten\n",
    ),
  ],
)
def test_a_wrong_command_is_refused_in_one_line(words, message, capsys):
  assert command.main(words) == 2
  assert capsys.readouterr().err == message


def test_the_command_passes_the_other_arguments_to_the_study(monkeypatch):
  from experiments.claims.rare_tokens import __main__ as study

  seen = []
  monkeypatch.setattr(study, "main", seen.append)
  assert command.main(["e19", "--plot_only", "--folder=somewhere"]) == 0
  assert seen == [["--plot_only", "--folder=somewhere"]]


def test_an_error_of_a_study_is_a_usage_error_of_the_command(tmp_path, capsys):
  assert command.main(["E15", "--plot_only", f"--folder={tmp_path}"]) == 2
  assert capsys.readouterr().err.endswith(
    "results.json: found no such file, expected the results of a run; run it once without --plot_only\n"
  )


def test_a_missing_study_is_reported(monkeypatch, capsys):
  monkeypatch.setitem(CLAIMS, "E1", CLAIMS["E1"]._replace(study="experiments.claims.nothing"))
  assert command.main(["E1"]) == 2
  assert capsys.readouterr().err == "error: E1: found no package experiments.claims.nothing, expected the study that tries the claim\n"


def test_a_missing_matplotlib_is_reported_before_training(monkeypatch, capsys):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
  assert command.main(["E20"]) == 2
  assert capsys.readouterr().err == "error: the figures need matplotlib: pip install -e '.[logging]'\n"


def test_the_page_is_written_to_the_readme(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(page, "HERE", pathlib.Path(tmp_path))
  monkeypatch.setattr(page, "text", lambda: "all")
  assert command.main([]) == command.main(["--page"]) == 0
  assert (tmp_path / "README.md").read_text() == "all" and "README.md" in capsys.readouterr().out
