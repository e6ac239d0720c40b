"""The width of the reports' tables in a real browser: none scrolls sideways at 1,280 pixels."""

import json

import pytest

from jaxrl_llm.report import write_report
from jaxrl_llm.report.comparison.page import load_arms, write_comparison
from tests.report.comparison.test_comparison import make_run as make_member
from tests.report.test_report import make_run
from tests.serve.browser import HAS_CHROMIUM, browsing

pytestmark = pytest.mark.skipif(not HAS_CHROMIUM, reason="needs chromium")

LONG = "a" * 180
WIDER = """[...document.querySelectorAll("table")].flatMap((table) => {
  const boxes = [table.parentElement, document.documentElement];
  const wide = boxes.filter((box) => box.scrollWidth > box.clientWidth);
  return wide.map((box) => [box.tagName, box.className, box.scrollWidth, box.clientWidth]);
})"""
"""Boxes of tables that are wider than their place."""
BROKEN = """
[...document.querySelectorAll("table.wide .whole, table.wide td b, table.wide td small")]
  .filter((cell) => cell.getClientRects().length > 1).map((cell) => cell.textContent)"""
"""Numbers that are broken in two."""


def shown(path, tmp_path):
  """Returns what is too wide and what is broken at 1,280 pixels, and the number of tables."""
  with browsing("about:blank", tmp_path) as browser:
    browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=path.as_uri())
    browser.wait("document.readyState === 'complete' && document.querySelector('table') !== null")
    assert browser.run("innerWidth") == 1280
    return browser.run(WIDER), browser.run(BROKEN), browser.run("document.querySelectorAll('table').length")


def test_the_page_of_a_run_with_long_texts(tmp_path):
  run = make_run(tmp_path / "run")
  config = json.loads((run / "config.json").read_text())
  (run / "config.json").write_text(json.dumps(config | {"model": {"path": LONG, "x" * 120: LONG}}))
  summary = json.loads((run / "summary.json").read_text())
  (run / "summary.json").write_text(json.dumps(summary | {"status": LONG, "command": LONG, "versions": {"package": LONG}}))
  assert shown(write_report(run), tmp_path) == ([], [], 2)


@pytest.mark.parametrize("arms, seeds", [(1, 1), (2, 3), (5, 1), (14, 2)])
def test_the_page_of_several_runs(tmp_path, arms, seeds):
  folder = tmp_path / "sweep"
  for arm in range(arms):
    for seed in range(seeds):
      run = make_member(folder / f"{LONG}-{arm}-{seed}", seed=seed,  status="it ran out of memory: " + LONG if arm == 1 else "finished",
        clip_low=0.1 + arm, file=f"{LONG}{arm}", number=-1.2345678e-11 * arm)  # fmt: skip
      alarms = {"no_signal": 12, "entropy_collapse": 3, "grad_norm_spike": 4, "loss_spike": 100}
      summary = json.loads((run / "summary.json").read_text())
      (run / "summary.json").write_text(json.dumps(summary | {"alarms": alarms, "tokens": 123_456_789}))
  page = write_comparison(*load_arms([folder]), tmp_path / "comparison.html")
  assert shown(page, tmp_path) == ([], [], 2 if arms == 1 else 3)
