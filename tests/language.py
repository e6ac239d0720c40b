"""Departures from the house's language, as far as a pattern can see them.

`python tests/language.py [PATH ...]` prints each of them and the counts by rule. It does not know
whether a sentence is clear.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLACES = ("README.md", "CONTRIBUTING.md", "configs", "docs", "experiments", "jaxrl_llm", "tests")
COLUMNS = 100

PINNED = re.compile(r"experiments/(.*/rules|studies/forecast/protocol)\.py$|LEADERBOARD\.md$")
"""Rules and protocols, whose hashes a study's results record, and pages that are made."""

NO_NOUN = frozenset(
  "as at both by either for from has have how in is it its likewise of on only or same see since so such than that "
  "then there to until when where which who whom whose with without".split()
)
RIDDLE = re.compile(r"\b(any|every|no|some)body\b|\bwho(m|so|se)?ever\b|\blikewise\b", re.IGNORECASE)
EMPTY_NAMES = frozenset({"found", "this"})

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Examples?|References|Notes?):$")
ENTRY = re.compile(r"  \*{0,2}\w[\w*, .]*: +(\S+)")
VERB = re.compile(r"[A-Z][a-z-]*s[,.:]?$")
UNBREAKABLE = re.compile(r"\s*(# (\||\$\$)|[|<>]|!?\[.*\]\(\S*\)\S*$|(\d\.|[-*#])?\s*\S{60})")

RULES = {
  "entry": "an entry of Args or Attributes that is no noun phrase of its own, beginning with a capital",
  "verb": "a function's docstring that does not begin with a verb in the third person",
  "riddle": "a person who stands for an argument, or `likewise`",
  "name": "a variable whose name does not say what it holds",
  "width": f"prose beyond column {COLUMNS}",
}


class Remark(NamedTuple):
  """One departure from a rule.

  Attributes:
    rule: Key of `RULES`.
    line: Number of the line, from 1.
    text: The words that depart from it.
  """

  rule: str
  line: int
  text: str


def files(places: Sequence[pathlib.Path]) -> Iterator[pathlib.Path]:
  """Yields the Python and Markdown files at or below some paths."""
  for place in places:
    for path in [place] if place.is_file() else sorted(place.rglob("*")):
      if path.suffix in (".py", ".md") and path != pathlib.Path(__file__) and not PINNED.search(path.as_posix()):
        yield path


def remarks(path: pathlib.Path) -> list[Remark]:
  """Returns a file's departures from the rules, by line."""
  text = path.read_text(encoding="utf-8")
  unsorted = _of_python(text) if path.suffix == ".py" else _of_markdown(text)
  return sorted(unsorted, key=lambda remark: remark.line)


def _of_python(text: str) -> Iterator[Remark]:
  tree = ast.parse(text)
  for node in ast.walk(tree):
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
      yield from _of_docstring(node)
    for name in _bound_names(node):
      if name in EMPTY_NAMES:
        yield Remark("name", node.lineno, name)
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    is_docstring = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
    if token.type == tokenize.COMMENT or is_docstring:
      first = token.start[1] if token.type == tokenize.COMMENT else 0
      for offset, line in enumerate(token.string.splitlines()):
        number = token.start[0] + offset
        line = " " * (token.start[1] if offset == 0 else 0) + line
        if len(line) > COLUMNS and "noqa" not in line and "fmt:" not in line and not UNBREAKABLE.match(line[first:]):
          yield Remark("width", number, line.strip())
        yield from _riddles(number, line)
    elif token.type == tokenize.STRING:
      yield from _riddles(token.start[0], token.string)


def _bound_names(node: ast.AST) -> list[str]:
  if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
    return [node.id]
  return [node.arg] if isinstance(node, ast.arg) else []


def _of_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[Remark]:
  constant = node.body[0].value
  lines = ast.get_docstring(node).splitlines()
  is_property = any(ast.unparse(decorator).endswith("property") for decorator in getattr(node, "decorator_list", ()))
  is_fixture = any("fixture" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))
  is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
  if isinstance(node, ast.FunctionDef) and not (is_property or is_fixture or is_test):
    words = lines[0].split()
    if not VERB.match(words[0]):
      yield Remark("verb", constant.lineno, lines[0])
  section = ""
  for number, line in enumerate(lines, constant.lineno):
    if match := SECTION.match(line):
      section = match[1]
    elif line and not line.startswith(" "):
      section = ""
    elif section in ("Args", "Attributes") and (match := ENTRY.match(line)):
      word = match[1].strip("(,.;:")
      if word.lower() in NO_NOUN or word[:1].islower():
        yield Remark("entry", number, line.strip())


def _of_markdown(text: str) -> Iterator[Remark]:
  in_code = False
  for number, line in enumerate(text.splitlines(), 1):
    if line.lstrip().startswith("```"):
      in_code = not in_code
    elif not in_code:
      if len(line) > COLUMNS and not line.startswith("#") and not UNBREAKABLE.match(line):
        yield Remark("width", number, line.strip())
      yield from _riddles(number, line)


def _riddles(number: int, line: str) -> Iterator[Remark]:
  for match in RIDDLE.finditer(line):
    yield Remark("riddle", number, match[0])


def main(argv: Sequence[str]) -> int:
  """Prints the remarks on the paths of a command line. Returns the exit status, 1 if there are any."""
  counts = Counter()
  for path in files([pathlib.Path(arg).resolve() for arg in argv] or [ROOT / place for place in PLACES]):
    for rule, line, text in remarks(path):
      counts[rule] += 1
      print(f"{path.relative_to(ROOT)}:{line}: {rule}: {text}")
  for rule, meaning in RULES.items():
    print(f"{counts[rule]:5} {rule}: {meaning}")
  return int(bool(counts))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
