"""Published sets in their published formats: small files with the columns of the originals."""

import functools
import http.server
import io
import json
import pathlib
import shutil
import threading

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks.files import downloads, text_files
from jaxrl_llm.tasks.sets import logic, published
from jaxrl_llm.text_types import Completion
from tests.tasks.written import parquet_bytes

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
GOLD = {"House 1": {"Name": "Bo", "Drink": "tea"}, "House 2": {"Name": "Ada", "Drink": "milk"}}


@pytest.fixture
def load(tmp_path):
  return functools.partial(tasks.make, data_dir=tmp_path / "data")


def as_parquet(folder: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  """Copies a fixture in Parquet, the other format of the originals."""
  for path in folder.rglob("*.jsonl"):
    copy = target / path.relative_to(folder).with_suffix(".parquet")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(parquet_bytes([record for _, record in text_files.read_records(path)]))
  return target


@pytest.fixture(params=["published", "parquet"])
def source(request, tmp_path):
  """Function from a fixture's name to its folder, in both formats of the originals."""
  return lambda name: as_parquet(FIXTURES / name, tmp_path / "parquet") if request.param == "parquet" else FIXTURES / name


def test_gsm8k(load):
  task = load("gsm8k", source=FIXTURES / "gsm8k")
  # The third is also a test problem.
  assert [row["answer"] for row in task.train] == ["60", "1200"]
  assert task.report.dropped == {"duplicate question": 1} and [row["answer"] for row in task.test] == ["10", "5"]
  assert task.demonstrations[1]["response"] == "She saves 250*8=$2000.\nShe has 2000-800=$1200 left.\n#### 1200"
  assert task.rewards == ("final_number",) and task.form_reward == "answer_form"
  assert [row["level"] for row in task.train] == [1, 2] and task.train[0]["prompt"].endswith("\nAnswer with a number after ####.")


def test_math(load):
  task = load("math", source=FIXTURES / "math")
  assert {(row["subject"], row["level"], row["answer"]) for row in task.train} == {("Algebra", 3, "\\frac{7}{2}"), ("Geometry", 0, "1")}
  assert [(row["answer"], row["level"], row["id"]) for row in task.test] == [
    ("81", 1, "test/prealgebra/1.json"),
    ("\\frac{1}{2}", 2, "test/prealgebra/2.json"),
  ]
  assert task.test[0]["prompt"] == "Compute $3^4$.\n\nPlease reason step by step, and put your final answer within \\boxed{}."
  only = load("math_500", source=FIXTURES / "math")
  assert [row["question"] for row in only.test] == [row["question"] for row in task.test] and len(only.train) == 0


@pytest.mark.parametrize("variant", ["dapo_math", "dapo_math_processed"])
def test_dapo_math(load, variant, source):
  task = load("dapo_math", source=source(variant))
  rows = sorted([*task.train, *task.test], key=lambda row: row["question"])
  assert [(row["question"], row["answer"]) for row in rows] == sorted(
    (f"What is the remainder of ${n}^{{10}}$ on division by 7?", str(n**10 % 7)) for n in (3, 5, 8, 11)
  )
  assert task.report.dropped == ({} if "processed" in variant else {"duplicate question": 1})
  _, record = next(text_files.read_records(FIXTURES / "dapo_math" / "dapo-math-17k.jsonl"))
  assert record["prompt"][0]["content"] in [row["prompt"] for row in rows]  # The published prompt.
  assert len(task.test) >= 1 and task.rewards == ("maths",)


COMPETITIONS = {"aime24": ["024", "015"], "aime25": ["7", "15"], "hmmt25": ["\\frac{1}{2}", "42"]}


@pytest.mark.parametrize("name", COMPETITIONS)
def test_competitions(load, name, tmp_path):
  task = load(name, source=FIXTURES / name)
  assert [row["answer"] for row in task.test] == COMPETITIONS[name] and len(task.train) == len(task.demonstrations) == 0
  again = load(name, source=as_parquet(FIXTURES / name, tmp_path / "parquet"))
  assert [row["question"] for row in again.test] == [row["question"] for row in task.test]


def test_livecodebench(load):
  task = load("livecodebench", source=FIXTURES / "livecodebench")
  stdin, call = task.test
  assert json.loads(stdin["tests"]) == {
    "kind": "stdin",
    "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "-4 9\n", "output": "5\n"}],
  }
  assert json.loads(call["tests"]) == {
    "kind": "call",
    "function": "double",
    "cases": [{"input": "4", "output": "8"}, {"input": "-1", "output": "-2"}],
  }
  assert (stdin["level"], stdin["date"], call["level"], call["date"]) == (1, "2024-05-04", 3, "2025-01-11")
  assert "reads from standard input" in stdin["prompt"] and call["prompt"].endswith("def double(self, n: int) -> int:\n```")
  later = load("livecodebench", source=FIXTURES / "livecodebench", after="2025-01-01", bad_rows="error")
  assert [row["id"] for row in later.test] == ["9001"] and later.report.dropped == {"outside task.after and task.before": 1}
  both = load("livecodebench", source=FIXTURES / "livecodebench", after="2024-05-04", before="2025-01-11")
  assert len(both.test) == 2  # Both days are included.
  for limits, words in {("2025-1-1", None): "task.after: found '2025-1-1'", ("2025-02-01", "2025-01-01"): "up to task.before"}.items():
    with pytest.raises(ValueError, match=words):
      load("livecodebench", source=FIXTURES / "livecodebench", after=limits[0], before=limits[1])


def test_codeforces(load, source):
  task = load("codeforces", source=source("codeforces"))
  assert [(row["id"], row["level"]) for row in task.train] == [("9001/A", 900), ("9002/A", 0)] and task.test[0]["level"] == 1500
  assert json.loads(task.train[0]["tests"]) == {
    "kind": "stdin",
    "cases": [{"input": "2 1\n", "output": "1 2\n"}, {"input": "5 4\n", "output": "4 5\n"}],
    "seconds": 2.0,
    "megabytes": 256.0,
  }
  assert "Example input\n2 1\n\nExample output\n1 2" in task.train[0]["prompt"] and "Note\nNumbers may repeat." in task.train[1]["prompt"]
  assert sum(task.report.dropped.values()) == len(task.report.dropped) == 4


def test_zebralogic(load, source):
  folder = source("zebralogic")
  grid, choice = load("zebralogic", source=folder), load("zebralogic", source=folder, mode="mc")
  (row,) = grid.test
  assert json.loads(row["answer"]) == GOLD
  assert grid.report.dropped == {"solution is hidden": 1} and row["level"] == 2
  assert row["prompt"].endswith('{"House 1": {"Name": "?", "Drink": "?"}, "House 2": {"Name": "?", "Drink": "?"}}')
  (row,) = choice.test
  assert row["answer"] == "B" and choice.rewards == ("choice",) and "A) Ada\nB) Bo" in row["prompt"]
  with pytest.raises(ValueError, match="task.mode: found 'cells', expected one of grid, mc"):
    load("zebralogic", source=folder, mode="cells")


@pytest.mark.parametrize(
  "text, right",
  [
    (json.dumps(GOLD), 1.0),
    (f"So {{1, 2}}: ```json\n{json.dumps({'reasoning': 'x', 'solution': GOLD}, indent=1)}\n```", 1.0),
    (json.dumps(GOLD).upper(), 1.0),
    (json.dumps(GOLD | {"House 1": {"Name": "Bo"}}), 0.0),
    # As in ZeroEval's evaluator: further keys, lists of one, numbers as text.
    (json.dumps(GOLD | {"House 3": {}}), 1.0),
    (json.dumps(GOLD | {"comment": "done", "House 1": GOLD["House 1"] | {"Pet": "cat"}}), 1.0),
    (json.dumps({"solution": GOLD | {"note": [1, 2]}, "confidence": 0.9}), 1.0),
    (json.dumps({"Solution": {house: {name: [cell] for name, cell in cells.items()} for house, cells in GOLD.items()}}), 1.0),
    (json.dumps(GOLD).replace('"tea"', '[" Tea "]'), 1.0),
    (json.dumps(GOLD).replace("Bo", "Bo\\n").replace("\\n", "\n"), 1.0),
    (json.dumps(GOLD).replace('"tea"', '["tea", "milk"]'), 0.0),
    (json.dumps(GOLD).replace('"tea"', "[]"), 0.0),
    (json.dumps(GOLD).replace('"tea"', "null"), 0.0),
    (json.dumps(GOLD).replace('"tea"', '{"tea": 1}'), 0.0),
    (json.dumps(GOLD | {"house 1 ": GOLD["House 2"]}), 0.0),
    (json.dumps([GOLD["House 1"], GOLD["House 2"]]), 0.0),
    ('{"a": ' * 400 + "1" + "}" * 400, 0.0),
    (json.dumps(GOLD) + " or " + json.dumps(GOLD | {"House 2": {"Name": "Bo", "Drink": "milk"}}), 0.0),
    (json.dumps(GOLD).replace("Ada", "?"), 0.0),
    ("", 0.0),
    ("{" * 50_000, 0.0),
    ('{"House 1": ' * 2000, 0.0),
    ("[]", 0.0),
  ],
)
def test_a_grid_is_judged_as_a_whole(text, right):
  example = {"answer": json.dumps(GOLD)}
  assert logic.zebra_grid(Completion(text=text, token_ids=(), num_tokens=1, stopped=True), example) == right
  assert logic.zebra_grid(Completion(text=text, token_ids=(), num_tokens=1, stopped=False), example) == 0.0


def test_every_set_names_its_missing_files(load, tmp_path):
  """No test has a network."""
  for name in published.SETS:
    with pytest.raises(ValueError, match=rf"^task {name}.*: found no file .* and no way to download it .*put it there") as caught:
      load(name)
    message = str(caught.value)
    assert "\n" not in message and "or set task.source to the folder that has it; published as https://" in message
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"^task.source: found no .* in .*empty, expected the files of .*published as https://"):
      load(name, source=tmp_path / "empty")


@pytest.fixture
def server(tmp_path):
  """Local hub that serves files and lists of files."""
  folder = tmp_path / "served"
  shutil.copytree(FIXTURES / "gsm8k", folder / "datasets/me/set/resolve/main/data")

  class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
      del args

    def do_GET(self):
      if "/api/" not in self.path:
        return super().do_GET()
      listed = [{"type": "file", "path": f"data/{name}.jsonl"} for name in ("train", "test")] + [{"type": "directory", "path": "data/x"}]
      self.send_response(200)
      self.end_headers()
      self.wfile.write(json.dumps(listed).encode())
      return None

  handler = functools.partial(Handler, directory=str(folder))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/datasets/me/set/resolve/main"
    server.shutdown()


def test_downloads(server, tmp_path):
  files = downloads.Files(("**/t*.jsonl",), (f"{server}/data/t*.jsonl",))
  paths = downloads.obtain("mine", "train", files, source=None, folder=tmp_path / "mine")
  assert [path.name for path in paths] == ["test.jsonl", "train.jsonl"]
  assert paths[1].read_bytes() == (FIXTURES / "gsm8k" / "train.jsonl").read_bytes()
  unreachable = files._replace(urls=("http://127.0.0.1:9/x.jsonl",))
  # The files are downloaded only once.
  assert downloads.obtain("mine", "train", unreachable, source=None, folder=tmp_path / "mine") == paths
  for urls, words in {(f"{server}/data/none.jsonl",): "404", (f"{server}/data/*.csv",): "lists no"}.items():
    with pytest.raises(ValueError, match=words):
      downloads.obtain("mine", "train", files._replace(urls=urls), source=None, folder=tmp_path / "other")
  assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]


def test_a_download_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
  class Response(io.BytesIO):
    """Response that ends too early."""

  response = Response(b"half")
  response.headers = {"Content-Length": "1000"}
  monkeypatch.setattr(downloads, "_open", lambda url: response)
  with pytest.raises(OSError, match="received 4 of 1000 bytes"):
    downloads.download("https://example.org/a.jsonl", tmp_path / "a.jsonl")
  assert list(tmp_path.iterdir()) == []
