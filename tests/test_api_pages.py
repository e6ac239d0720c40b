"""The pages of the API, as README's command makes them: one for every public module, with what its docstrings say."""

import html
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
  folder = tmp_path_factory.mktemp("api")
  assert "python docs/make_api.py" in (ROOT / "README.md").read_text()
  # In a process of its own: the tests have wrapped every function to check its shapes.
  command = [sys.executable, "docs/make_api.py", f"--out={folder}"]
  subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
  return folder


def text(path):
  """What a reader sees."""
  return html.unescape(re.sub(r"<[^>]+>", "", path.read_text()))


def test_every_public_module_has_a_page(pages):
  modules = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "jaxrl_llm").rglob("*.py") if not path.stem.startswith("_")}
  assert len(modules) > 150
  assert not [str(path) for path in modules if not (pages / path).with_suffix(".html").is_file()]
  rooms = {path.parent.relative_to(ROOT) for path in (ROOT / "jaxrl_llm").rglob("__init__.py")}
  assert not [str(room) for room in rooms if not (pages / room).with_suffix(".html").is_file()]


def test_a_page_has_equation_arguments_example_and_paper(pages):
  page = text(pages / "jaxrl_llm" / "objectives" / "sapo.html")
  for said in ("(4/τ)·σ(τ(r_t − 1))·A_i", "Arguments:", "Raises:", "arXiv:2511.20347", ">>>"):
    assert said in page, said


def test_no_page_shows_where_it_was_made(pages):
  assert not [path.name for path in pages.rglob("*.html") if str(ROOT) in path.read_text() or str(pathlib.Path.home()) in path.read_text()]
