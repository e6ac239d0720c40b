"""The comparison of runs: their arms, results with intervals, curves, notes, page and figures."""

import json
import re

import numpy as np
import pytest

from jaxrl_llm.report.__main__ import main
from jaxrl_llm.report.comparison import EmptyComparisonError, load_arms, page_data, write_comparison
from jaxrl_llm.report.comparison.arms import arm_names, interval
from jaxrl_llm.report.comparison.curves import curve
from jaxrl_llm.report.comparison.runs import run_series
from jaxrl_llm.report.figures import line_style
from jaxrl_llm.workdir.metrics import MetricWriter
from tests.report.test_report import assert_self_contained
from tests.serve.browser import HAS_CHROMIUM, drawn

HOSTILE = "</script><img src=x onerror=alert(1)>"


def make_run(path, *, seed=0, steps=4, status="finished", final=0.5, every=1, tokens=100.0, planned=None, **settings):
  """Writes the files of a run whose reward is the step plus its seed."""
  path.mkdir(parents=True)
  with MetricWriter(path, tensorboard=False) as writer:
    writer.write(0, "eval", {"eval/accuracy": 0.25})
    for step in range(every, steps + 1, every):
      row = {"critic/rewards/mean": float(step + seed), "timing_s/step": 2.0, "perf/total_num_tokens": 2 * tokens}
      writer.write(step, "rl", row | {"response_length/mean": 10.0, "prompt_length/mean": 10.0, "actor/entropy": 1 / step})
    writer.write(steps, "eval", {"eval/accuracy": final})
  config = {"seed": seed, "num_steps": planned or steps, "objective": {"name": "gspo", "clip_low": 3e-4}, "log": {"samples_every": seed}}
  for name, value in settings.items():
    config["objective"][name] = value
  (path / "config.json").write_text(json.dumps(config))
  (path / "summary.json").write_text(json.dumps({"status": status, "tokens": 1000, "wall_seconds": 60.0, "alarms": {"no_signal": seed}}))
  return path


def make_sweep(folder):
  for clip in (3e-4, 0.2):
    for seed in range(3):
      make_run(folder / f"clip={clip}-seed={seed}", seed=seed, final=0.5 + clip + seed / 10, clip_low=clip)
  return folder


def test_runs_that_differ_in_their_seed_are_one_arm(tmp_path):
  arms, notes = load_arms([make_sweep(tmp_path / "sweep")])
  assert sorted((arm.name, len(arm.runs)) for arm in arms) == [("clip_low=0.2", 3), ("clip_low=3e-4", 3)] and notes == []
  data = page_data(arms)
  assert data["fields"] == [{"field": "objective.clip_low", "values": [arm.config["objective.clip_low"] for arm in arms]}]
  assert data["title"] == "gspo" and [row["seed"] for row in data["arms"][0]["runs"]] == [0, 1, 2]


def test_runs_of_a_sweep_come_in_the_order_of_their_numbers(tmp_path):
  for name in ("trial-10", "trial-9", "m²"):  # A digit for `str.isdigit`, but not for `int`.
    make_run(tmp_path / name)
  assert [run.name for run in load_arms([tmp_path])[0][0].runs] == ["m²", "trial-9", "trial-10"]


def test_results_have_students_interval_and_differences_are_paired_by_seed(tmp_path):
  arms, _ = load_arms([make_sweep(tmp_path / "sweep")])
  first, second = (row["result"] for row in page_data(arms)["arms"])
  half = 4.302653 * 0.1 / 3**0.5  # Student's t with 2 degrees of freedom.
  assert np.allclose([second["final"][key] - second["final"]["mean"] for key in ("low", "high")], [-half, half], atol=1e-6)
  assert np.isclose(abs(second["difference"]["mean"]), 0.1997) and second["difference"]["n"] == 3
  # The differences are equal for all seeds.
  assert np.isclose(second["difference"]["low"], second["difference"]["high"])
  assert first["difference"] is None and first["tokens"] == 1000 and first["steps"] == 4 and first["seconds"] == 60


def test_one_seed_has_no_interval_and_the_page_says_so(tmp_path):
  data = page_data(load_arms([make_run(tmp_path / "a"), make_run(tmp_path / "b", clip_low=0.2)])[0])
  assert data["arms"][0]["result"]["final"] == {"mean": 0.5, "low": None, "high": None, "n": 1}
  assert any("no interval" in note for note in data["notes"])
  assert interval([]) is None


@pytest.mark.parametrize("other", [dict(seed=2), dict(steps=2, planned=4, status="running")], ids=["other seed", "unfinished"])
def test_arms_without_a_finished_pair_of_seeds_have_no_difference(tmp_path, other):
  runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", clip_low=0.2, **other)]
  assert page_data(load_arms(runs)[0])["arms"][1]["result"]["difference"] is None


def test_runs_of_one_seed_count_as_one(tmp_path):
  runs = [make_run(tmp_path / name, final=final) for name, final in (("a", 0.4), ("b", 0.6))]
  data = page_data(load_arms(runs)[0])
  assert data["arms"][0]["result"]["final"] == {"mean": 0.5, "low": None, "high": None, "n": 1}
  assert any("several runs of seed 0" in note for note in data["notes"])


def test_unfinished_and_failed_runs_are_shown_and_not_averaged(tmp_path):
  runs = [make_run(tmp_path / "done", final=0.5), make_run(tmp_path / "cut", seed=1, steps=2, planned=4, status="running", final=0.1)]
  runs += [make_run(tmp_path / "bad", seed=2, status="stopped: not finite", final=0.0)]
  data = page_data(load_arms(runs)[0])
  assert data["arms"][0]["result"]["final"]["mean"] == 0.5 and data["arms"][0]["result"]["counted"] == 1
  shown = [(run["state"], run["status"]) for run in data["arms"][0]["runs"]]
  expected = [("finished", "finished"), ("not finished", "running or killed, step 2 of 4"), ("failed", "stopped: not finite, step 4")]
  assert [(state, status.removesuffix(" of 4") if state == "failed" else status) for state, status in shown] == expected
  assert any("have not finished" in note and "cut" in note and "bad" in note for note in data["notes"])
  alone = page_data(load_arms([runs[1]])[0])["arms"][0]["result"]
  assert alone["so_far"] and alone["final"]["mean"] == 0.1


def test_curves_are_means_over_the_seeds_that_got_there(tmp_path):
  runs = [make_run(tmp_path / "a", seed=0), make_run(tmp_path / "b", seed=2, steps=2, planned=4, status="running")]
  (arm,), _ = load_arms(runs)
  drawn = curve(arm.runs, "critic/rewards/mean", "rl")
  assert drawn.x.tolist() == [1, 2, 3, 4] and drawn.mean.tolist() == [2, 3, 3, 4] and drawn.n.tolist() == [2, 2, 1, 1]
  half = 12.7062 * np.std([1, 3], ddof=1) / 2**0.5
  assert np.allclose(drawn.high[:2] - drawn.mean[:2], half, atol=1e-3) and np.isnan(drawn.low[2:]).all()
  assert curve(arm.runs, "no/such", "rl") is None


def test_curves_measured_at_other_steps_meet_on_a_grid(tmp_path):
  runs = [make_run(tmp_path / "a", steps=6, every=2, planned=6), make_run(tmp_path / "b", seed=1, steps=6, every=3, planned=6)]
  (arm,), _ = load_arms(runs)
  drawn = curve(arm.runs, "critic/rewards/mean", "rl")
  # Interpolated linearly between the points of a run.
  assert drawn.x.tolist() == [3, 4, 6] and np.allclose(drawn.mean, [3.5, 4.5, 6.5])


def test_tokens_and_seconds_add_up_over_the_steps(tmp_path):
  (arm,), _ = load_arms([make_run(tmp_path / "a", tokens=100.0)])
  # Half of all tokens: prompts are not counted.
  assert run_series(arm.runs[0], "actor/entropy", "rl", "tokens")[0].tolist() == [100, 200, 300, 400]
  assert run_series(arm.runs[0], "actor/entropy", "rl", "seconds")[0].tolist() == [2, 4, 6, 8]
  assert run_series(arm.runs[0], "eval/accuracy", "eval", "tokens")[0].tolist() == [0, 400]


def test_arm_names_say_what_differs():
  base = {"objective.name": "gspo", "objective.clip_low": 0.1, "learner.learning_rate": 1e-3, "task.name": "sums", "model.path": "/x/base"}
  assert arm_names([base, base | {"objective.name": "sapo", "objective.clip_low": None}], ["a", "b"]) == ["gspo", "sapo"]
  assert arm_names([base], ["a"]) == ["gspo"] and arm_names([{}, base], ["a", "b"]) == ["a", "gspo"]
  other = base | {"task.name": "mixed", "model.path": "/x/big"}
  assert arm_names([base, other], ["a", "b"]) == ["task.name=sums, model.path=base", "task.name=mixed, model.path=big"]
  many = [{f"section.field_{k}": i for k in range(6)} for i in range(3)]
  # One field distinguishes them.
  assert arm_names(many, ["a", "b", "c"]) == ["field_0=0", "field_0=1", "field_0=2"]
  # Equal in Python, but not the same setting.
  assert arm_names([{"a": 1}, {"a": True}], ["x", "y"]) == ["a=1", "a=True"]
  assert arm_names([{"a": 0.1234567}, {"a": 0.12345678}], ["x", "y"]) == ["a=0.1234567", "a=0.12345678"]
  # No more digits than necessary.
  assert arm_names([{"a": 1 / 3}, {"a": 2 / 3}], ["x", "y"]) == ["a=0.3333", "a=0.6667"]
  assert arm_names([{"model.path": "x/base"}, {"model.path": "y/base"}], ["x", "y"]) == ["model.path=x/base", "model.path=y/base"]


def test_every_missing_part_is_reported_in_a_line(tmp_path):
  make_run(tmp_path / "whole")
  for name in ("config.json", "metrics.jsonl", "summary.json"):
    (make_run(tmp_path / f"no-{name}") / name).unlink()
  broken = make_run(tmp_path / "broken")
  (broken / "config.json").write_text("{")
  (broken / "metrics.jsonl").write_text((broken / "metrics.jsonl").read_text().replace('{"step": 2', '{"st', 1) + '{"step": 5, "pha')
  (tmp_path / "empty").mkdir()
  names = ("whole", "no-config.json", "no-metrics.jsonl", "no-summary.json", "broken", "empty", "nowhere", "whole")
  arms, notes = load_arms([tmp_path / name for name in names])
  said = "\n".join(notes)
  for file in ("config.json", "metrics.jsonl", "summary.json"):
    assert f"no-{file}: {file} is missing" in said
  assert "broken: config.json cannot be read" in said and "broken: 1 lines of metrics.jsonl are not rows" in said
  assert (
    "empty: contains no run" in said
    and "nowhere: found nothing" in said
    and "whole: given more than once, counted once" in said
  )
  assert len(notes) == 8 and sum(len(arm.runs) for arm in arms) == 5
  page_data(arms, notes)


def test_no_run_at_all_is_an_error_with_a_line_each(tmp_path, capsys):
  with pytest.raises(EmptyComparisonError, match="no folder given"):
    load_arms([])
  (tmp_path / "empty").mkdir()
  assert main([str(tmp_path / "empty"), str(tmp_path / "nowhere")]) == 2
  said = capsys.readouterr()
  assert said.out == "" and [line.partition(":")[0] for line in said.err.splitlines()] == ["error", "error"]


def test_the_page_is_self_contained_and_hostile_text_stays_data(tmp_path):
  runs = [make_run(tmp_path / "javascript:alert(1)", name=HOSTILE), make_run(tmp_path / "b")]
  (runs[0] / "report.html").write_text("a page")
  text = write_comparison(*load_arms(runs), tmp_path / "pages" / "page.html", title=HOSTILE).read_text("utf-8")
  assert_self_contained(text)
  assert "<img" not in text
  data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
  # Only the part after its last slash.
  assert data["title"] == HOSTILE and data["arms"][0]["name"].startswith("</script>") is False
  assert data["arms"][0]["runs"][0]["report"] == "../javascript%3Aalert%281%29/report.html"


def test_command_line(tmp_path, capsys):
  sweep = make_sweep(tmp_path / "sweep")
  assert main([str(sweep)]) == 0 and capsys.readouterr().out.strip() == str(sweep / "comparison.html")
  assert main([str(sweep), "--out", str(tmp_path / "x.html"), "--metrics", "actor/entropy"]) == 0
  assert '"group":"Chosen","title":"Entropy"' in (tmp_path / "x.html").read_text()
  capsys.readouterr()
  assert main([str(sweep), "--metrics", "actor/entrpy,zzz"]) == 2
  said = capsys.readouterr().err.splitlines()
  assert len(said) == 2 and "did you mean 'actor/entropy'?" in said[0] and "expected one of" in said[1]


def test_one_run_gets_its_own_page_unless_options_of_a_comparison_are_given(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  runs = [str(make_run(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")]
  assert main(runs[:1]) == 0 and capsys.readouterr().out.strip() == f"{runs[0]}/report.html"
  options = {"--title": "Mine", "--metrics": "actor/entropy", "--out": "own.html", "--x": "tokens", "--width": "column"}
  for arguments in (runs, *([runs[1], *option] for option in options.items())):
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == ("own.html" if "--out" in arguments else "comparison.html")
  assert not (tmp_path / "b" / "report.html").exists()


@pytest.mark.parametrize("ending", ["pdf", "svg", "png"])
def test_figures_of_a_paper(tmp_path, ending):
  pytest.importorskip("matplotlib")
  sweep, path = make_sweep(tmp_path / "sweep"), tmp_path / f"figure.{ending}"
  command = [str(sweep), "--figure", str(path), "--metrics", "eval/accuracy,actor/entropy", "--x", "tokens", "--width", "column"]
  # There is no page without --out.
  assert main(command) == 0 and not (sweep / "comparison.html").exists()
  drawing = path.read_bytes()
  if ending == "pdf":
    # Fonts are embedded as TrueType, not as Type 3, which many venues refuse.
    assert b"/FontFile2" in drawing and b"/Type3" not in drawing and b"/CIDFontType2" in drawing
    assert re.search(rb"/MediaBox \[ 0 0 237\.6 ", drawing)  # 3.3 inches.
  if ending == "svg":
    assert b"<text" not in drawing  # Text is outlines, so that no reader needs the font.
  # The same picture gives the same file.
  assert main(command) == 0 and path.read_bytes() == drawing


def test_lines_of_a_figure_differ_without_colour():
  styles = [line_style(i) for i in range(40)]
  assert len({(style["marker"], style["linestyle"]) for style in styles}) == 40
  assert len({str(style) for style in [line_style(i) for i in range(280)]}) == 280


def test_a_figure_refuses_what_it_cannot_draw(tmp_path, capsys):
  pytest.importorskip("matplotlib")
  run = make_run(tmp_path / "run")
  (run / "metrics.jsonl").write_text('{"step": 1, "phase": "rl", "actor/entropy": 1.0}\n')
  assert main([str(run), "--figure", str(tmp_path / "x.pdf"), "--metrics", "actor/entropy", "--x", "seconds"]) == 2
  assert "use --x=step" in capsys.readouterr().err
  assert main([str(run), "--figure", str(tmp_path / "x.bmp"), "--metrics", "actor/entropy"]) == 2
  assert "expected one of .pdf" in capsys.readouterr().err and not (tmp_path / "x.bmp").exists()


@pytest.mark.skipif(not HAS_CHROMIUM, reason="needs chromium")
def test_a_browser_draws_it(tmp_path):
  shown = drawn(write_comparison(*load_arms([make_sweep(tmp_path / "sweep")]), tmp_path / "page.html"), tmp_path)
  assert {"Held-out accuracy", "Reward", "Entropy"} <= set(re.findall(r"<h3[^>]*>([^<]+)", shown))
  assert shown.count('class="band') >= 6 and "no_signal" not in shown and "no signal × 2" in shown and "6 finished" in shown
