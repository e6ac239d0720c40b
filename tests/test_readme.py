"""The code and the tables of README.md and the guides of docs/."""

import pathlib
import re

import pytest

from experiments import entries
from jaxrl_llm import objectives
from jaxrl_llm.advantages.estimators import ESTIMATORS
from jaxrl_llm.models.presets import LOCAL, PRESETS
from jaxrl_llm.objectives.corrected import CORRECTIONS
from jaxrl_llm.text_types import Completion

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATHS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PATHS}
README = PAGES["README.md"]


def code_of(page):
  """Returns the only block of Python on a page."""
  (code,) = re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL)
  return code


def test_every_block_of_python_is_run_here():
  # That of the Tinker API runs in tests/serve/tinker/test_sdk.py, where the SDK is installed.
  guides = {f"docs/{name}.md" for name in ("conversations", "models", "sampler", "serving", "tinker")}
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


def test_every_guide_is_named():
  assert all(page in README for page in PAGES if page != "README.md"), "CONTRIBUTING.md too"


@pytest.mark.parametrize("page", entries.PAGES)
def test_tables_are_made_from_code_and_results(page):
  assert entries.page_with_tables(PAGES[page], entries.PAGES[page]()) == PAGES[page], "python -m experiments.entries"


def test_every_entry_has_a_row_of_its_own():
  tables = entries.tables()
  for kind, registry in (("objectives", objectives.OBJECTIVES), ("estimators", ESTIMATORS), ("corrections", CORRECTIONS)):
    rows = [line.strip("| ").split(" | ") for line in tables[kind].splitlines()[2:]]
    assert [row[0] for row in rows] == [f"`{name}`" for name in registry], kind
    silent = [row[0] for row in rows if not row[1].strip()]
    assert not silent, f"{kind} without a docstring"
  assert "kl_coef=0.04" in tables["objectives"] and "`sft` | SFT: the negative log-likelihood" in tables["objectives"]


def test_the_readme_counts_the_objectives():
  # Ways to imitate are no RL objectives, and `custom` is any.
  count = sum(not objectives.make(name).imitates for name in objectives.OBJECTIVES if name != "custom")
  words = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()
  claims = re.findall(r"(PPO, [-\w\s,.]+) and (\w+) more objectives are rows", README)
  assert claims
  for named, word in claims:
    assert words.index(word) + 10 == count - len(named.split(",")), f"{count} objectives in all, with {named}"
