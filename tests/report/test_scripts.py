"""The scripts of the pages without a browser: their syntax and their pure functions."""

import json
import pathlib
import shutil
import subprocess

import pytest

ASSETS = pathlib.Path(__file__).resolve().parents[2] / "jaxrl_llm" / "report" / "assets"

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs node")


def run(code, *scripts):
  """Evaluates an expression after some of the pages' scripts. Returns its value from JSON."""
  text = "\n".join((ASSETS / name).read_text("utf-8") for name in scripts)
  done = subprocess.run(["node", "-"], input=f"{text}\nconsole.log(JSON.stringify({code}));", capture_output=True, text=True, timeout=60)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.js")), ids=lambda path: path.name)
def test_scripts_parse(path):
  assert subprocess.run(["node", "--check", str(path)], capture_output=True, timeout=60).returncode == 0


def test_statistics_of_a_rollouts_tokens():
  row = {"log_ratio": [0.1, -0.4, None], "gate_weight": [1.0, 0, None], "entropy": [1, 2, 3]}
  statistics = run(f"tokenStatistics({json.dumps(row)})", "charts.js", "tokens.js")
  assert statistics == {"reach": 0.4, "silent": 1, "meanEntropy": 2}
  assert run("tokenStatistics({logprobs: [-1]})", "charts.js", "tokens.js") == {"reach": None, "silent": None, "meanEntropy": None}


def test_colours_of_tokens():
  code = """[HEATS.log_ratio.share(-0.2, 0.4), HEATS.gate_weight.share(0, 1),
    HEATS.gate_weight.reach([0, 1.25, 0.9]), heatColor(-0.5, "ratio"), heatColor(2, "ratio"),
    heatColor(0, "ratio"), heatColor(NaN, "surprise"), heatColor(-1, "surprise")]"""
  expected = [-0.5, 0, 0.25, "rgba(var(--low), 0.425)", "rgba(var(--high), 0.850)", *["transparent"] * 3]
  assert run(code, "charts.js", "tokens.js") == expected


def test_numbers_of_a_token_in_words():
  row = {"tokens": ["a", "\n"], "token_ids": [5, 6], "logprobs": [-1, -2], "gate_weight": [0, 1], "entropy": [0.5, None]}
  said = run(f"[0, 1].map((i) => tokenNumbers({json.dumps(row)}, i, 2))", "charts.js", "tokens.js")
  assert said[0] == "token 1 of 2, “a”, id 5, log-probability -1 (p = 0.3679), gate weight 0, entropy 0.5"
  assert said[1] == "token 2 of 2, “↵”, id 6, log-probability -2 (p = 0.1353), gate weight 1"


def test_parts_of_a_loss_are_coloured_by_the_largest_of_the_page():
  row = {"tokens": ["a", "b"], "blame/loss": [2e-7, -1e-7], "blame/share": [2 / 3, 1 / 3], "blame/largest": 4e-7}
  code = f"""((row, heat) => [heat.reach(row["blame/loss"], row), heat.share(row["blame/loss"][1], heat.reach([], row)),
    tokenNumbers(row, 1, 2), Object.keys(SORTS).find((name) => sortable([{{...row, rank: 0}}], name)),
    Object.keys(SORTS).find((name) => sortable([row], name))])({json.dumps(row)}, HEATS["blame/loss"])"""
  reach, share, said, *orders = run(code, "charts.js", "tokens.js", "rollouts.js")
  assert (reach, share) == (4e-7, -0.25) and orders == ["as in the table", "newest first"]
  assert said == "token 2 of 2, “b”, part of the loss -1e-7, 33.3% of the response's |loss|"


def test_filters_and_orders_of_rollouts():
  code = """[within(3, "", ""), within(3, "4", ""), within(3, "", "2"), within(3, "3", "3"),
    sortable([{reach: null}], "largest log-ratio"), sortable([{reach: 0}], "largest log-ratio"),
    sortable([], "longest"), [{reach: 1}, {reach: null}, {reach: 2}].sort(
      SORTS["largest log-ratio"]).map((row) => row.reach)]"""
  assert run(code, "charts.js", "tokens.js", "rollouts.js") == [True, False, False, True, False, True, True, [2, 1, None]]


def test_numbers_as_the_tables_of_a_comparison_write_them():
  code = """[format(0.12345, "%"), format(3e-4), format(12345),
    states([{state: "finished"}, {state: "failed"}, {state: "finished"}]),
    armClass(9), nearest([0, 10, 20], 14)]"""
  assert run(code, "charts.js", "arms.js") == ["12.3%", "3.0e-4", "12.3k", "2 finished, 1 failed", "c1 d4", 1]


def test_the_tokens_of_each_lag_are_stacked_in_the_order_of_the_lags():
  columns = {"step": [1, 2]} | {f"rollout/staleness/tokens/{lag}": x for lag, x in {10: [1, 0], 2: [0, 3], 0: [0, 0]}.items()}
  code = f"""resolvePanel(PANELS.flatMap((group) => group.panels).find((panel) => panel.title === "Tokens by lag"),
    {{rl: {json.dumps(columns)}}}).series"""
  assert run(code, "charts.js", "panels.js") == [{"label": "2", "values": [0, 3]}, {"label": "10", "values": [1, 0]}]
