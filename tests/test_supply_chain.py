"""Safety of a run: no pickle, no network by default, no leaked secret, no HTML from a model."""

import ast
import json
import pathlib
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from jaxrl_llm.config import check
from jaxrl_llm.models import preset
from jaxrl_llm.models.files.hf_folder import open_hf_folder
from jaxrl_llm.report import write_report
from jaxrl_llm.workdir.metrics import MetricWriter, SampleWriter
from tests.runs import ROOT, VARIED, environment, flags, tiny_config

PACKAGE = ROOT / "jaxrl_llm"

# Allowed calls and imports that can execute the contents of a file, by source file, with the
# reasons.
ALLOWED = {
  "rewards/sandbox/asker.py": {"exec"},  # The program under test, inside the sandbox.
  "rewards/sandbox/prelude.py": {"exec"},  # The same.
  # The chat program of the installed package verifiers, which has it as a text.
  "rollouts/environments/hub/program.py": {"exec"},
  # Reads a pipe of its own parent process, since json would slow the start.
  "rewards/sandbox/launcher.py": {"marshal"},
  "rewards/sandbox/local.py": {"marshal"},  # The parent.
  # An unpickler without classes, for one text of LiveCodeBench.
  "tasks/sets/program_tests.py": {"pickle"},
  # The examples of the dataset that the parent sends to its workers.
  "rewards/workers/jobs.py": {"pickle"},
  "rewards/workers/process.py": {"pickle"},  # The same; it reads no pickle.
  # The worker, which reads a pipe of its own parent process.
  "rewards/workers/worker.py": {"pickle", "pickle.load", "pickle.loads"},
}
MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch")
BUILTINS = ("eval", "exec")
CALLS = ("yaml.load", "yaml.unsafe_load", "builtins.eval", "builtins.exec", "torch.load", "pickle.load", "pickle.loads")


def dangers(source):
  """Returns the dangerous modules, builtins and methods in a source."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name.partition(".")[0] for alias in node.names} & set(MODULES)
    elif isinstance(node, ast.ImportFrom) and not node.level:
      names |= {(node.module or "").partition(".")[0]} & set(MODULES)
    elif isinstance(node, ast.Call):
      of = node.func
      name = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
      owner = of.value.id if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) else ""
      if isinstance(of, ast.Name) and name in BUILTINS:
        names.add(name)
      if f"{owner}.{name}" in CALLS:
        names.add(f"{owner}.{name}")
      if any(x.arg == "allow_pickle" and not (isinstance(x.value, ast.Constant) and x.value.value is False) for x in node.keywords):
        names.add("allow_pickle")
      if any(x.arg == "trust_remote_code" and not (isinstance(x.value, ast.Constant) and not x.value.value) for x in node.keywords):
        names.add("trust_remote_code")
  return names


@pytest.mark.parametrize(
  ("source", "names"),
  [
    ("import pickle", {"pickle"}), ("pickle.loads(x)", {"pickle.loads"}), ("pickle.dumps(x)", set()),
    ("from marshal import loads", {"marshal"}), ("eval('1')", {"eval"}), ("re.compile(x)", set()),
    ("np.load(f, allow_pickle=True)", {"allow_pickle"}), ("np.load(f, allow_pickle=False)", set()), ("yaml.load(f)", {"yaml.load"}),
    ("def f():\n  import torch\n  torch.load(x)", {"torch", "torch.load"}), ("model.eval()", set()), ("ast.literal_eval(x)", set()),
  ],
)  # fmt: skip
def test_the_check_detects_every_danger(source, names):
  assert dangers(source) == names


def test_only_listed_files_can_execute_what_they_read():
  files = sorted(PACKAGE.rglob("*.py"))
  assert len(files) > 100
  names_by_file = {path.relative_to(PACKAGE).as_posix(): dangers(path.read_text("utf-8")) for path in files}
  assert {name: what for name, what in names_by_file.items() if what} == ALLOWED


# Every connection out of the process is printed, and fails the run.
OFFLINE = """
import runpy, socket, sys

def refuse(event, args):
  if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
    address = args[1] if event != "socket.getaddrinfo" else (args[0],)
    host = address[0] if isinstance(address, tuple) else None
    if host not in (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname()):
      print(f"NETWORK {event} {address}", file=sys.stderr, flush=True)
      raise PermissionError(f"{event} {address}")

sys.addaudithook(refuse)
if sys.argv[1] == "check":
  socket.create_connection(("192.0.2.1", 80), timeout=1)
sys.argv = ["jaxrl_llm.main", *sys.argv[1:]]
runpy.run_module("jaxrl_llm.main", run_name="__main__", alter_sys=True)
"""

SECRETS = {
  "HF_TOKEN": "hf_QkZxTestOnlyNotARealToken0001",
  "WANDB_API_KEY": "0123456789abcdefTESTONLY0123456789abcdef",
  "AWS_SECRET_ACCESS_KEY": "TESTONLY/wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
  "SOME_PASSWORD": "correct-horse-battery-staple-42",
}


def offline(*args):
  command = [sys.executable, "-c", OFFLINE, *args]
  env = environment() | SECRETS
  env.pop("HF_HUB_OFFLINE", None)  # The run stays offline even without this setting.
  return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_the_network_guard_works():
  done = offline("check")
  assert done.returncode and "NETWORK socket." in done.stderr and "192.0.2.1" in done.stderr


@pytest.mark.slow
def test_a_run_uses_no_network_and_leaks_no_secret(tmp_path):
  short = VARIED | {"warm_start.num_steps": 0, "num_steps": 2, "eval.every": 2, "eval.num_prompts": 8, "checkpoint.every": 2}
  done = offline("--config=configs/gspo.py:tiny", f"--workdir={tmp_path / 'run'}", *flags(short))
  assert done.returncode == 0 and "NETWORK" not in done.stderr, done.stderr[-2000:]
  files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
  assert {"report.html", "summary.json", "metrics.jsonl", "samples.jsonl", "config.json"} <= {path.name for path in files}
  leaks = [(name, path) for path in files for name, value in SECRETS.items() if value.encode() in path.read_bytes()]
  assert not leaks and not any(value in done.stdout + done.stderr for value in SECRETS.values())


HOSTILE = [
  "<script>alert(1)</script>", "</script><script>alert(2)</script>", "<!-- <script>", "--> <b>", "]]>", "&lt;script&gt;&amp;", "\"'`",
  "{{data}}", "\u2028\u2029", "\x00\x1b[31m\ud800", "</ScRiPt\t\n>", "<img src=x onerror=alert(3)>",
]  # fmt: skip


class Elements(HTMLParser):
  """The elements of a page, and the texts of its scripts."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.scripts, self.texts = [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag == "script":
      self.scripts.append(dict(attrs))
      self.texts.append("")

  def handle_data(self, data):
    if self.cdata_elem == "script":
      self.texts[-1] += data


def test_text_of_a_model_or_a_dataset_stays_text_in_the_report(tmp_path):
  plain, hostile = tmp_path / "plain", tmp_path / "hostile"
  for workdir, texts in ((plain, ["a"] * len(HOSTILE)), (hostile, HOSTILE)):
    workdir.mkdir()
    with MetricWriter(workdir, tensorboard=False) as writer, SampleWriter(workdir) as samples:
      for step, text in enumerate(texts, 1):
        writer.write(step, "rl", {"critic/rewards/mean": 0.5, "note": text})
        row = {"prompt": text, "response": text, "answer": text, "reward": 1.0, "level": text, "tokens": [text], "logprobs": [-1.0]}
        samples.write(step, "rl", [row | {"token_ids": [1], "num_tokens": 1, "stopped": True, "advantage": 0.0}])
    text = " ".join(texts)
    (workdir / "summary.json").write_text(json.dumps({"status": text, "command": text, "versions": {text: text}, "alarms": {text: 1}}))
    (workdir / "config.json").write_text(json.dumps({"task": {"name": text}}))
  pages = [write_report(workdir).read_text("utf-8") for workdir in (plain, hostile)]
  expected, elements = map(Elements, pages)
  assert elements.tags == expected.tags
  assert elements.scripts == expected.scripts == [{"type": "application/json", "id": "data"}, {}]
  assert elements.texts[1] == expected.texts[1]
  shown = json.loads(elements.texts[0])
  assert [row["response"] for row in shown["samples"]] == HOSTILE
  assert "alert(" not in pages[1].replace(elements.texts[0], "")
  assert shown["header"]["alarms"] == {" ".join(HOSTILE): 1}


@pytest.mark.parametrize("name", ["weights.bin", "weights.pt", "weights.pkl", "weights.ckpt"])
def test_weights_in_files_that_can_run_code_are_refused(name, tmp_path):
  (tmp_path / name).write_bytes(b"\x80\x02cos\nsystem\n(S'touch owned'\ntR.")
  (line,) = check.config_problems(tiny_config(overrides={"model.path": str(tmp_path / name)}))
  assert name in line and "expected a folder with config.json and model.safetensors, or a .gguf file" in line
  assert not pathlib.Path("owned").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_folders_of_such_files_are_refused(name, tmp_path):
  (tmp_path / name).write_bytes(b"\x80\x02cos\nsystem\n(S'touch owned'\ntR.")
  with pytest.raises(ValueError, match="found .* expected .*model.safetensors"):
    open_hf_folder(tmp_path, config=preset("nano", vocab_size=264))
  assert not pathlib.Path("owned").exists()
