"""The documentation as a site: no dead link, and a page for every public module."""

import html
import pathlib
import re
import subprocess
import sys
import urllib.parse
import xml.etree.ElementTree

import numpy as np
import pytest

from jaxrl_llm import objectives

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "docs"))
import objective_pages  # noqa: E402 (a file of the site, and no package)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  folder = tmp_path_factory.mktemp("site")
  assert "mkdocs build" in (ROOT / "README.md").read_text()
  # `strict` in mkdocs.yml: a link or an anchor that leads nowhere fails the build.
  command = [sys.executable, "-m", "mkdocs", "build", f"--site-dir={folder}"]
  built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
  assert built.returncode == 0, built.stdout + built.stderr
  return folder


def text(path):
  """Returns what a reader sees."""
  return html.unescape(re.sub(r"<[^>]+>", "", path.read_text()))


def test_every_public_module_has_a_page(site):
  paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "jaxrl_llm").rglob("*.py")]
  public = [path for path in paths if (path.name == "__init__" or not path.name.startswith("_")) and "template" not in path.parts]
  modules = {".".join(part for part in path.parts if part != "__init__") for path in public}
  assert len(modules) > 150
  assert not [module for module in sorted(modules) if not (site / "api" / f"{module}.html").is_file()]
  index = (site / "api" / "index.html").read_text()
  assert not [module for module in sorted(modules) if f'href="{module}.html"' not in index]


def test_a_page_has_equation_arguments_example_and_paper(site):
  sapo = text(site / "api" / "jaxrl_llm.objectives.sapo.html")
  for words in ("(4/τ)·σ(τ(rt−1))·Ai", "tau_neg", "arXiv:2511.20347", ">>>", "Note"):
    assert words in sapo, words
  assert "Number of samples per prompt (G)." in text(site / "api" / "jaxrl_llm.decoding.sampler.sampler.html")


def test_equations_of_docstrings_keep_their_lines_and_are_mathml(site):
  page = (site / "api" / "jaxrl_llm.objectives.gspo.html").read_text()
  (block,) = re.findall(r'<div class="equation">(.*?)</math></div></div>', page)
  lines = [html.unescape(line) for line in re.findall(r'<div><math displaystyle="true" alttext="([^"]*)">', block)]
  assert lines == [line.strip() for line in objectives.gspo.__doc__.splitlines()[2:4]]
  assert "<munder><mo>∑</mo><mrow><mi>i</mi></mrow></munder>" in block and "<mi>clip_low</mi>" in block
  pages = [path.read_text() for path in (site / "api").glob("jaxrl_llm.objectives.*.html")]
  assert sum(page.count('<div class="equation">') for page in pages) > 35
  for formula in {formula for page in pages for formula in re.findall(r"<math.*?</math>", page)}:
    xml.etree.ElementTree.fromstring(formula)


def test_every_objective_has_a_page_with_what_is_stored_of_it(site):
  for name in objectives.OBJECTIVES:
    page = (site / "objectives" / f"{name}.html").read_text()
    assert page.count("<polyline") == (0 if name in objective_pages.WITHOUT_CURVE else 2), name
    assert f'href="{name}.html"' in (site / "objectives" / "index.html").read_text()
  gspo = text(site / "objectives" / "gspo.html")
  assert "--config=configs/gspo.py" in gspo and "Its band was guessed" in gspo and "70.3 %" in gspo and "Tuned equally" in gspo


def test_curves_are_those_of_the_equations():
  ratios, grpo = objective_pages.curves("grpo")[1]
  np.testing.assert_allclose(grpo, [ratio if ratio < 1.2 else 0 for ratio in ratios], rtol=1e-5)
  ratios, negative = objective_pages.curves("grpo")[-1]
  np.testing.assert_allclose(negative, [ratio if ratio > 0.8 else 0 for ratio in ratios], rtol=1e-5)
  for sign, tau in ((1, 1.0), (-1, 1.05)):
    ratios, sapo = objective_pages.curves("sapo")[sign]
    gates = 1 / (1 + np.exp(-tau * (np.array(ratios) - 1)))
    np.testing.assert_allclose(sapo, 4 * gates * (1 - gates) * ratios, rtol=1e-5)


def test_examples_are_code(site):
  """Griffe knows a section "Examples"; the house's is called "Example"."""
  page = (site / "api" / "jaxrl_llm.learner.packing.html").read_text()
  assert "gp" in re.search(r'<span class="([^"]*)">&gt;&gt;&gt;', page)[1]


def test_every_link_between_pages_leads_somewhere(site):
  """A strict build checks the links of Markdown; here are those of notebooks and the API too."""
  # The page of a server's errors has the addresses of a server.
  pages = {path: path.read_text() for path in site.rglob("*.html") if path != site / "404.html"}
  anchors = {path: set(re.findall(r'\s(?:id|name)="([^"]+)"', page)) for path, page in pages.items()}
  dead, followed = set(), 0
  for path, page in pages.items():
    for link in set(re.findall(r'<a\s[^>]*?href="([^"]*)"', page)):
      target, _, anchor = html.unescape(link).partition("#")
      if ":" in target:
        continue
      at, followed = ((path.parent / urllib.parse.unquote(target)).resolve() if target else path), followed + 1
      if not at.is_file() or (anchor and at in anchors and urllib.parse.unquote(anchor) not in anchors[at]):
        dead.add((path.relative_to(site).as_posix(), link))
  assert followed > 10_000 and not dead


def test_lectures_lead_to_each_other(site):
  page = (site / "experiments" / "notebooks" / "01_objectives.html").read_text()
  links = re.findall(r'<a\s[^>]*?href="([^"]*)"', page)
  assert "02_read_a_run.html" in links and "../ablations/ratio_lab/index.html" in links


def test_every_guide_and_lecture_is_in_the_navigation():
  named = (ROOT / "mkdocs.yml").read_text()
  pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "experiments" / "notebooks").glob("0*.ipynb")]
  assert not [path.name for path in pages if f": {path.relative_to(ROOT).as_posix()}\n" not in named]


def test_the_equations_of_notebooks_need_no_script(site):
  page = (site / "experiments" / "notebooks" / "01_objectives.html").read_text()
  assert page.count("<math ") > 20
  assert "\\frac" not in re.sub(r"<(pre|script)\b.*?</\1>", "", page, flags=re.DOTALL)


def test_the_first_page_has_a_path_for_each_reader(site):
  page = text(site / "index.html")
  for reader in ("run an experiment", "compare objectives", "bring my task", "use one GPU or a pod", "read the code"):
    assert reader in page, reader


def test_no_page_shows_where_it_was_made(site):
  names = (str(ROOT), str(pathlib.Path.home()))
  assert not [path.name for path in site.rglob("*.html") if any(name in path.read_text() for name in names)]


def test_no_page_fetches_anything_from_elsewhere(site):
  fetched = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="https?://|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="https?://')
  assert not {path.name: match[0] for path in site.rglob("*.html") if (match := fetched.search(path.read_text()))}
