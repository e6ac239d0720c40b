"""The commands of AGENTS.md, all of them run, and its schemas."""

import json
import re
import shlex
import subprocess
import sys

import jsonschema
import pytest

from tests.runs import ROOT, environment

PAGE = (ROOT / "AGENTS.md").read_text()
# The arena as its own tests train it, on a bed of a small size.
SMALL = """
from experiments.arena import __main__ as arena
from experiments.claims import bed as beds
from experiments.studies.forecast import protocol
protocol.sizes = lambda length: beds.SMOKE._replace(digits=(length, length))
arena.CELL = protocol.Cell(8, beds.SMOKE.updates)
arena.main()
"""
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "schemas").glob("*.json")}


@pytest.mark.slow
def test_every_command_runs(tmp_path):
  """In a copy of the repository whose folders are links, so that nothing is written to it."""
  for path in ROOT.iterdir():
    if not path.name.startswith(".") and path.name != "runs":
      (tmp_path / path.name).symlink_to(path)
  (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
  (tmp_path / "mine.py").write_text(code)
  lines = "".join(re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)).splitlines()
  assert len(lines) > 8
  for line in lines:
    program, *arguments = shlex.split(line, comments=True)
    assert program == "python", line
    if arguments[:2] == ["-m", "experiments.arena"]:
      arguments[:2] = ["-c", SMALL]
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment(), text=True, capture_output=True)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
  assert (tmp_path / "runs" / "comparison.html").is_file()
  assert_files_follow_their_schemas(tmp_path / "runs" / "other")


def test_every_schema_is_named_and_valid():
  assert {f"docs/schemas/{name}.json" for name in SCHEMAS} == set(re.findall(r"docs/schemas/\w+\.json", PAGE))
  for schema in SCHEMAS.values():
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
  ("name", "row"),
  [
    ("metrics", {"step": 1, "phase": "r1"}),
    ("metrics", {"step": 1, "phase": "rl", "actor/loss": "0.1"}),
    ("metrics", {"phase": "rl"}),
    ("samples", {"step": 1, "phase": "rl", "prompt": "x"}),
    ("summary", {"status": "finished", "acuracy_final": 1.0}),
  ],
)
def test_another_row_does_not_follow_its_schema(name, row):
  with pytest.raises(jsonschema.ValidationError):
    jsonschema.validate(row, SCHEMAS[name])


def assert_files_follow_their_schemas(workdir):
  """Asserts that the files of a run follow the schemas, and that these name nothing else."""
  for name in ("metrics", "samples"):
    rows = [json.loads(line) for line in (workdir / f"{name}.jsonl").read_text().splitlines()]
    for row in rows:
      jsonschema.validate(row, SCHEMAS[name])
    if name == "metrics":
      # Of clips, SAPO has none; a number that is not finite is not to be expected.
      absent = SCHEMAS[name]["properties"].keys() - set().union(*rows)
      assert absent <= {"nonfinite", "actor/pg_clipfrac"}
  jsonschema.validate(json.loads((workdir / "summary.json").read_text()), SCHEMAS["summary"])
