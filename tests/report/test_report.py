"""The page of a run: its data, its notes on omissions, and its safety against model output."""

import base64
import hashlib
import html
import itertools
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from jaxrl_llm import report
from jaxrl_llm.report import data as report_limits
from jaxrl_llm.report import page as report_page
from jaxrl_llm.report import report_data, write_figure, write_report
from jaxrl_llm.report.__main__ import main
from jaxrl_llm.workdir.metrics import MetricWriter, SampleWriter
from tests.serve.browser import HAS_CHROMIUM, drawn

HOSTILE = "</script><script>alert(1)</script><!--<script> <img src=x onerror=alert(2)> {{data}} \x1b[31m \u2028 \ud800"


class Page(HTMLParser):
  """The tags, attributes, and texts of style and script elements that an HTML parser sees."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.raw = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag in ("script", "style"):
      self.raw.append([tag, dict(attrs), ""])

  def handle_data(self, data):
    if self.cdata_elem:  # Inside a style or script element.
      self.raw[-1][2] += data

  @property
  def data(self):
    return json.loads(next(text for _, attrs, text in self.raw if attrs.get("id") == "data"))


def make_run(workdir, steps=6, **extra):
  workdir.mkdir(parents=True, exist_ok=True)
  with MetricWriter(workdir, tensorboard=False) as writer, SampleWriter(workdir) as samples:
    for step in range(1, 4):
      writer.write(step, "warm_start", {"actor/loss": 1 / step})
    writer.write(0, "eval", {"eval/accuracy": 0.3, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.4})
    for step in range(1, steps + 1):
      writer.write(step, "rl", {
        "critic/rewards/mean": step / 10, "actor/entropy": 1 / 3, "ratio/mean": 1.0, "ratio/p99": 1.2, "actor/pg_clipfrac": 0.01,
        "timing_s/rollout": 2.0, "rollout/tokens_sha256": "ab", "actor/grad_norm": math.nan, "perf/max_memory_allocated_gb": step,
      } | extra)  # fmt: skip
      samples.write(step, "rl", [{
        "prompt": "1 + 2 =", "response": HOSTILE, "answer": "3", "reward": float(step % 2), "advantage": 0.5, "num_tokens": 2,
        "stopped": True, "level": 1, "token_ids": [5, 6], "logprobs": [-0.123456789, -2.0], "tokens": ["</script>", "3"],
        "log_ratio": [0.01, -0.25], "gate_weight": [1.01, 0.0], "entropy": [0.5, 1.5],
      }])  # fmt: skip
    writer.write(steps, "eval", {"eval/accuracy": 0.8, "eval/accuracy_low": 0.7, "eval/accuracy_high": 0.9, "timing_s/eval": 1.5})
  config = {"num_steps": 80, "objective": {"name": "gspo", "clip_low": 3e-4, "tau_pos": None}, "task": {"name": HOSTILE}}
  (workdir / "config.json").write_text(json.dumps(config | {"limit": math.inf}))
  (workdir / "summary.json").write_text(
    json.dumps({"status": "done", "accuracy_final": 0.8125, "versions": {"jax": "0.10.2"}, "command": HOSTILE})
  )
  return workdir


def assert_self_contained(text):
  """Checks that a page needs no network and parses no HTML."""
  # A name that is never fetched.
  assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
  assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\bfetch\(|@import|url\(", text)


def test_model_output_stays_data(tmp_path):
  text = write_report(make_run(tmp_path)).read_text("utf-8")
  page = Page(text)
  assert_self_contained(text)
  assert [tag for tag, _ in page.elements].count("script") == 2 and "alert(1)</script" not in text
  assert "img" not in [tag for tag, _ in page.elements]
  # The escaping loses nothing, not even {{data}}.
  assert page.data["samples"][0]["response"] == HOSTILE
  assert page.data["samples"][0]["tokens"] == ["</script>", "3"]
  assert report_page.embed_json(HOSTILE).isascii()


def test_only_the_pages_own_script_and_style_may_run(tmp_path):
  page = Page(write_report(make_run(tmp_path)).read_text("utf-8"))
  policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy")
  (style,) = [text for tag, _, text in page.raw if tag == "style"]
  (script,) = [text for tag, attrs, text in page.raw if tag == "script" and "type" not in attrs]
  for kind, text in (("script", script), ("style", style)):
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert f"{kind}-src 'sha256-{digest}';" in policy
  assert "default-src 'none'" in policy and "unsafe" not in policy


@pytest.mark.parametrize("present", [names for n in range(1, 5) for names in itertools.combinations(report.SOURCES, n)], ids="+".join)
def test_any_part_of_a_run_makes_a_page(tmp_path, present):
  make_run(tmp_path)
  for name in set(report.SOURCES) - set(present):
    (tmp_path / name).unlink()
  data = Page(write_report(tmp_path).read_text("utf-8")).data
  assert bool(data["phases"]) == ("metrics.jsonl" in present) and bool(data["samples"]) == ("samples.jsonl" in present)
  assert bool(data["config"]) == ("config.json" in present) and bool(data["versions"]) == ("summary.json" in present)


def test_incomplete_files_of_a_running_job_are_read_as_far_as_they_go(tmp_path):
  make_run(tmp_path)
  for name in report.SOURCES:
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-5])
  data = report_data(tmp_path)
  assert len(data["samples"]) == 5 and len(data["phases"]["rl"]["step"]) == 6 and data["phases"]["eval"]["step"] == [0]
  assert data["config"] == {} and data["header"]["status"] == "no summary yet"


def test_header_takes_the_summary_and_falls_back_on_the_rows_and_config_is_flat(tmp_path):
  data = report_data(make_run(tmp_path))
  header, config = data["header"], data["config"]
  assert (header["status"], header["accuracy_start"], header["accuracy_final"]) == ("done", 0.3, 0.8125)
  assert (header["objective"], header["num_steps"], header["planned_steps"], header["peak_memory_gb"]) == ("gspo", 6, 80, 6)
  # Its numbers need not be finite.
  assert config["objective.clip_low"] == 3e-4 and config["objective.tau_pos"] is None and config["limit"] is None


def test_columns_keep_gaps_and_drop_values_that_are_no_numbers(tmp_path):
  rl = report_data(make_run(tmp_path))["phases"]["rl"]
  assert rl["actor/entropy"] == [0.333333] * 6 and rl["step"] == [1, 2, 3, 4, 5, 6]
  assert "rollout/tokens_sha256" not in rl and "phase" not in rl and "actor/grad_norm" not in rl
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    writer.write(7, "rl", {"actor/loss": 1.5})
  rl = report_data(tmp_path)["phases"]["rl"]
  assert rl["actor/loss"] == [None] * 6 + [1.5] and rl["actor/entropy"][-1] is None


def test_large_runs_are_thinned_and_the_page_says_so(tmp_path, monkeypatch):
  monkeypatch.setattr(report_limits, "MAX_ROWS", 30)
  monkeypatch.setattr(report_limits, "MAX_SAMPLES", 50)
  monkeypatch.setattr(report_limits, "MAX_TOKENS", 40)
  monkeypatch.setattr(report_limits, "MAX_CHARS", 10)
  data = report_data(make_run(tmp_path, steps=100))
  assert data["phases"]["rl"]["step"] == list(range(4, 101, 4))[-25:] and len(data["samples"]) == 50
  for name in ("tokens", "log_ratio", "gate_weight", "entropy"):
    assert sum(name in row for row in data["samples"]) == 20  # Two tokens each, of at most 40.
  assert len(data["notes"]) == 4 and "one of every 4 rows, 100 in all" in data["notes"][0] and "50 of 100 rollouts" in data["notes"][1]
  assert {row["step"] % 2 for row in data["samples"]} == {0, 1} and data == report_data(tmp_path)
  assert all("more characters" in row["response"] for row in data["samples"])


def test_pictures_of_rollouts_are_bounded_data(tmp_path, monkeypatch):
  monkeypatch.setattr(report_limits, "MAX_PICTURES", 60)
  make_run(tmp_path)
  address = "data:image/png;base64,AAAA"
  with SampleWriter(tmp_path) as samples:
    samples.write(7, "rl", [{"prompt": "<image>?", "response": "1", "images": [address, "https://example.com/a.png", 7]}] * 3)
    samples.write(8, "rl", [{"prompt": "<image>?", "response": "1", "images": "data:image/png"}])
  data = report_data(tmp_path)
  # An address has 26 characters.
  assert [row["images"] for row in data["samples"] if "images" in row] == [[address]] * 2
  assert data["notes"] == ["2 of 3 rollouts with pictures show them; samples.jsonl has all of them."]


@pytest.mark.slow
def test_two_thousand_rows_and_rollouts_make_a_small_page(tmp_path):
  row = json.dumps({"step": 0, "phase": "rl"} | {f"metric/{i}": 0.123456789012345 for i in range(45)})
  (tmp_path / "metrics.jsonl").write_text("".join(row.replace('"step": 0', f'"step": {i}') + "\n" for i in range(2000)))
  sample = {"phase": "rl", "prompt": "p" * 40, "response": "r" * 80, "reward": 1.0, "token_ids": [7] * 40, "logprobs": [-0.123456789] * 40}
  (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"step": i} | sample) + "\n" for i in range(2000)))
  assert write_report(tmp_path).stat().st_size < 4e6 and report_data(tmp_path)["notes"] == []


def test_a_page_is_replaced_in_one_step(tmp_path, monkeypatch):
  make_run(tmp_path)
  before = write_report(tmp_path).read_bytes()
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    writer.write(7, "rl", {"actor/loss": 1.5})
  monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
  with pytest.raises(OSError, match="killed here"):
    write_report(tmp_path)
  assert (tmp_path / "report.html").read_bytes() == before


def test_command_line(tmp_path, capsys):
  for name in ("run", "foreign"):
    (tmp_path / name).mkdir()
  make_run(tmp_path / "run")
  assert main([str(tmp_path / "run")]) == 0
  assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
  for name in ("missing", "foreign"):
    assert main([str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and name in said.err
  assert list((tmp_path / "foreign").iterdir()) == []


def test_module_runs_as_a_command(tmp_path):
  done = subprocess.run([sys.executable, "-m", "jaxrl_llm.report", str(tmp_path / "missing")], capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_the_figure_draws_the_gate_if_there_is_one(tmp_path):
  pytest.importorskip("matplotlib")
  for name, extra, expected, other in (
    ("clip", {}, "Clip fraction", "Soft gate"),
    ("gate", {"sapo/gate_pos": 0.9}, "Soft gate", "Clip fraction"),
  ):
    workdir = tmp_path / name
    workdir.mkdir()
    drawing = write_figure(make_run(workdir, **extra), workdir / "figure.svg").read_text()
    # This run has no response lengths.
    assert expected in drawing and other not in drawing and drawing.count("no data") == 1
  drawing = write_figure(workdir, workdir / "figure.pdf").read_bytes()
  assert b"/FontFile2" in drawing and b"/Type3" not in drawing
  assert write_figure(workdir, workdir / "figure.png").read_bytes().startswith(b"\x89PNG")
  with pytest.raises(FileNotFoundError, match="no metrics"):
    write_figure(tmp_path, tmp_path / "none.png")


@pytest.mark.skipif(not HAS_CHROMIUM, reason="needs chromium")
def test_a_browser_draws_it(tmp_path):
  shown = drawn(write_report(make_run(tmp_path)), tmp_path)
  titles = re.findall(r"<h3>([^<]+)", shown)
  assert {"Held-out accuracy", "Reward", "Entropy", "Clip fraction", "Importance ratio", "Time per step", "Warm-start loss"} <= set(titles)
  # They have no data, and so no chart.
  assert not {"SAPO gate", "KL divergence", "Learning rate", "Gradient norm", "Throughput"} & set(titles)
  assert shown.count('class="line') >= 7 and "30.0% → 81.3%" in shown and "6 of 6 rollouts, 50.0% correct" in shown
  assert '<option value="largest log-ratio">' in shown and '<option value="most gated tokens">' in shown
  assert "eval<b>1.5</b>" in shown  # From the evaluation's own row, added to the step before it.
  assert html.escape("</script><script>alert(1)</script>", quote=False) in shown and "<img" not in shown
