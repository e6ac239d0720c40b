"""Tables of pages that are made from code and results, so that they cannot go stale.

`python -m experiments.entries` writes them between the marks of docs/objectives.md (every
objective, estimator and correction), of README.md (what is measured; `measured.py`) and of
docs/serving.md (clients of others). What an entry does is the first line of its docstring, its
settings are those of its signature, and its papers are those of its section "References".
"""

import inspect
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments import measured
from experiments.clients import table as clients
from jaxrl_llm import advantages
from jaxrl_llm.advantages import estimators
from jaxrl_llm.objectives import OBJECTIVES, make
from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.corrected import CORRECTIONS, settings_by_name
from jaxrl_llm.objectives.gates import unclipped
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.settings.signature import in_words, settings_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- {}: written by `python -m experiments.entries` -->\n", "<!-- end of {} -->"


@algorithm(weights="token_mean")
def bare() -> Slots:
  """Builds an objective with no settings but those that all objectives share."""
  return Slots(ratio=token_ratio, gate=unclipped())


SHARED = settings_of(bare)


def tables() -> dict[str, str]:
  """Returns the tables of entries in Markdown, by what their rows are."""
  return {
    "objectives": _table(("objective", "method and gate", "settings", "log-ratio", "weights", "paper"), map(_objective, OBJECTIVES)),
    "estimators": _table(("estimator", "what it does", "settings", "paper"), map(_estimator, estimators.ESTIMATORS)),
    "corrections": _table(("correction", "what it does", "settings", "paper"), map(_correction, CORRECTIONS)),
  }


def _objective(name: str) -> list[str]:
  """Returns an objective's row; of the settings that all share, it has those of unusual default."""
  factory = OBJECTIVES[name]
  settings = settings_of(factory)
  # The settings of the gate that `custom` is told to use have no sentence of their own.
  own = {key: x for key, x in settings.items() if x.sentence and (key not in SHARED or x.default != SHARED[key].default)}
  weights = own.pop("weights", settings["weights"]).default.replace("_", " ")
  gate = re.sub(r"^Builds (?:the|an?) (.+?) objective", r"\1", summary(factory))
  return [f"`{name}`", gate, _code(in_words(own)), make(name).ratio_level or "none", weights, papers(factory)]


def _estimator(name: str) -> list[str]:
  """Returns an estimator's row, with the papers of the functions of `advantages` that it calls."""
  estimate = estimators.ESTIMATORS[name].estimate
  called = [getattr(advantages, each) for each in estimate.__code__.co_names if each in advantages.__all__]
  cited = dict.fromkeys(filter(None, map(papers, [estimate, *filter(callable, called)])))
  return [f"`{name}`", summary(estimate), _code(in_words(settings_of(estimators.factory(name)))), "; ".join(cited)]


def _correction(name: str) -> list[str]:
  make_corrected = CORRECTIONS[name]
  return [f"`{name}`", summary(make_corrected), _code(in_words(settings_by_name(name))), papers(make_corrected)]


def summary(entry: Callable[..., Any]) -> str:
  """Returns the first line of a docstring, without its full stop."""
  return (entry.__doc__ or "").partition("\n")[0].removesuffix(".")


def papers(entry: Callable[..., Any]) -> str:
  """Returns what a docstring refers to: links to arXiv, or the words of a reference that has none.

  Example:
    >>> papers(OBJECTIVES["sapo"]), papers(OBJECTIVES["custom"])
    ('[2511.20347](https://arxiv.org/abs/2511.20347)', '')
  """
  section = re.search(r"^References:\n((?:  .*\n)*)", inspect.cleandoc(entry.__doc__ or "") + "\n", flags=re.MULTILINE)
  # A reference continues on lines that are indented more.
  references = re.findall(r"^  (\S.*(?:\n    .*)*)", section[1] if section else "", flags=re.MULTILINE)
  return "; ".join(_linked(" ".join(reference.split())) for reference in references)


def _linked(reference: str) -> str:
  numbers = re.findall(r"arXiv:(\d+\.\d+)", reference)
  return "; ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in numbers) or reference.removesuffix(".")


def _code(text: str) -> str:
  return f"`{text}`" if text else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n" for cells in lines)


def page_with_tables(page: str, tables: Mapping[str, str]) -> str:
  """Returns a page with tables between its marks, by name.

  Raises:
    ValueError: If the page does not have exactly one place for each table.
  """
  for name, table in tables.items():
    begin, end = BEGIN.format(name), END.format(name)
    if page.count(begin) != 1 or page.count(end) != 1:
      raise ValueError(f"found no place for the table of {name}, expected one between {begin.strip()!r} and {end!r}")
    before, _, rest = page.partition(begin)
    page = before + begin + "\n" + table + "\n" + end + rest.partition(end)[2]
  return page


PAGES: dict[str, Callable[[], dict[str, str]]] = {
  "README.md": lambda: {"measured": _table(measured.HEAD, measured.rows())},
  "docs/objectives.md": tables,
  "docs/serving.md": lambda: {"clients": _table(clients.HEAD, clients.rows()) + f"\n{clients.in_words()}.\n"},
}
"""Function that makes the tables of each page."""


if __name__ == "__main__":
  for name, make_tables in PAGES.items():
    page = ROOT / name
    page.write_text(page_with_tables(page.read_text(encoding="utf-8"), make_tables()), encoding="utf-8")
