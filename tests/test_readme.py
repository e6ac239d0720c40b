"""The code, links, names and defaults in README.md and the guides of docs/."""

import inspect
import pathlib
import re

import pytest

from jaxrl_llm import objectives
from jaxrl_llm.cli.new import FILES
from jaxrl_llm.models.presets import LOCAL, PRESETS
from jaxrl_llm.text_types import Completion

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATHS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PATHS}
README = PAGES["README.md"]
NEW_PROJECT = FILES.values()


def code_of(page):
  """Returns the only block of Python on a page."""
  (code,) = re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL)
  return code


def test_every_block_of_python_is_run_here():
  guides = {f"docs/{name}.md" for name in ("conversations", "models", "sampler", "serving")}
  assert {page for page, text in PAGES.items() if "```python" in text} == {"README.md", *guides}


@pytest.mark.slow
def test_the_code_of_models_runs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code = code_of("docs/models.md")
  scope: dict = {}
  exec(code, scope)
  assert scope["logits"].shape == (1, 3, 512) and (tmp_path / "exported" / "model.safetensors").exists()
  sizes = len(set(PRESETS) - set(LOCAL))
  assert f"{sizes} published sizes" in code


@pytest.mark.slow
def test_the_code_of_the_sampler_runs():
  scope: dict = {}
  exec(code_of("docs/sampler.md"), scope)
  lengths, rollouts = scope["lengths"], scope["rollouts"]
  assert rollouts.tokens.shape == rollouts.logprobs.shape == (12, 32)
  assert all(1 <= length <= limit for length, limit in zip(lengths.tolist(), range(20, 32), strict=True)) and max(lengths) > 19


@pytest.mark.slow
def test_the_code_of_the_engine_runs(capsys):
  scope: dict = {}
  exec(code_of("docs/serving.md"), scope)
  assert len(scope["again"].tokens) == 20 and "Piece(tokens=" in capsys.readouterr().out


def test_the_game_of_conversations_is_won_by_the_later_letter():
  scope: dict = {}
  exec(code_of("docs/conversations.md"), scope)
  game = scope["later_letter"]()
  state, first = game.step(game.reset({}), Completion("xb", (), 2, True))
  assert not first.done and first.text == " b "
  assert [game.step(state, Completion(text, (), 1, True))[1].reward for text in "abc"] == [-1, 0, 1]


@pytest.mark.slow
def test_the_code_of_objectives_runs():
  scope: dict = {}
  exec(code_of("README.md"), scope)
  assert scope["grads"].shape == (2, 3)
  assert float(scope["loss"]) != 0


def test_the_setting_that_the_readme_calls_an_error_is_one():
  with pytest.raises(ValueError, match="tau_pos"):
    objectives.make("gspo", tau_pos=1.0)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_exists(page):
  links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]) if not link.startswith(("http://", "https://"))]
  missing = [path for path, _, _ in links if path and not ((ROOT / page).parent / path).exists()]
  assert not missing
  for path, _, heading in links:
    if heading:
      text = ((ROOT / page).parent / path).read_text() if path else PAGES[page]
      anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}
      assert heading in anchors, (path, heading)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_module_that_a_page_names_exists(page):
  flags, names = r"--(?:config|sweep)=((?:configs|experiments)/[\w/]+\.py)", r"`((?:jaxrl_llm|configs|experiments|tests)/[\w./]*)`"
  named = re.findall(f"{flags}|{names}", PAGES[page])
  # A new project has files of its own, which stand in its template.
  missing = [path for path in map("".join, named) if not (ROOT / path).exists() and path not in NEW_PROJECT]
  assert not missing
  modules = re.findall(r"python3? -m ((?:jaxrl_llm|experiments)[\w.]*)", PAGES[page])
  files = [ROOT / name.replace(".", "/") for name in modules]
  assert not [str(file) for file in files if not (file.with_suffix(".py").exists() or (file / "__main__.py").exists())]


def test_every_guide_is_named():
  assert all(page in README for page in PAGES if page != "README.md"), "CONTRIBUTING.md too"


# Settings whose defaults the gate's column shows, in order, by the beginning of its text.
SHOWN = {
  "none": (),
  "any": (),
  "hard clip": ("clip_low", "clip_high"),
  "weight 1 if A ≥ 0, else at most": ("ratio_cap",),
  "soft": ("tau_pos", "tau_neg"),
  "capped weight, 1 +": ("clip_high",),
  "geometric clip": ("log_clip_low", "log_clip_high"),
  "gamma weight": ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
  "ball": ("delta_low", "delta_high"),
  "prefix budget": ("budget", "delta"),
  "Gaussian": ("sigma", "alpha", "beta"),
  "quadratic pull": ("pull",),
  "without a share": ("cov_share", "cov_low", "cov_high", "clip_low", "clip_high"),
  "pull of": ("cov_kl_coef", "cov_share"),
}


def test_the_number_of_objectives_in_the_first_sentence_is_that_of_the_table():
  rows = set(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| [^|]+ \|$", README, flags=re.MULTILINE)) - {"custom"}
  named, word = re.search(r"(PPO, [-\w\s,.]+) and (\w+) more objectives are rows", README).groups()
  count = len(rows) - len(named.split(","))
  words = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()
  assert words.index(word) + 10 == count, f"{count} more objectives than {named}"
  # Ways to imitate are no RL objectives, and `custom` is any.
  assert rows == set(objectives.OBJECTIVES) - {"custom", "sft"}


def test_the_table_of_objectives_holds_the_defaults():
  rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", README, flags=re.MULTILINE))
  assert set(rows) <= set(objectives.OBJECTIVES) and len(rows) >= 24
  for name, gate in rows.items():
    defaults = {key: p.default for key, p in inspect.signature(objectives.OBJECTIVES[name]).parameters.items()}
    (kind,) = (kind for kind in SHOWN if gate.startswith(kind))
    shown = tuple(float(x) for x in re.findall(r"\d[\d.]*(?:e-\d)?", gate.removeprefix(kind)))
    assert shown == tuple(defaults[key] for key in SHOWN[kind]), name
