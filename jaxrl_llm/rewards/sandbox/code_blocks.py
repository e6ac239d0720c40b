"""The program in a response: blocks of code as CommonMark has them, and the one that is meant."""

import functools
import re
import textwrap
from typing import Any

_PYTHON = re.compile(r"[\s{.]*(?:lang(?:uage)?-)?(?:i?py(?:thon)?|pypy)[\d.]*(?![\w.+#-])", re.IGNORECASE)
_RUN = re.compile(r"`{3,}|~{3,}")
_MAX_REPAIRS = 32  # Each one parses the text again.


def extract_code(text: str, *, wanted: re.Pattern[str] | None = None) -> str | None:
  """Returns the program in a response, or None if there is no block of code that may be one.

  The program is the last block marked Python (`python`, `py`, `python3.11`, `{.python}`, `python
  title=...`), or else the last one without a mark. Blocks in other languages, interactive sessions
  (`pycon`), empty blocks and the reasoning before `</think>` do not count. A block that is still
  open at the end does.

  Blocks are those of CommonMark, except for what models write. A line in a block that ends with its
  fence ends the block (`print(1)` and a fence behind it). A line in a block that begins with its
  fence, with more behind it, opens the next one. A program keeps its indentation if its fence has
  more. If no block of CommonMark will do, fences may also be indented by four spaces or more, or
  hold lines that leave their list item. Lines of HTML, such as `<answer>`, are plain lines.

  Args:
    text: Response.
    wanted: Pattern of a program that the tests can run. A block that has it is preferred to all
      others: examples of its use often follow the program.

  Example:
    >>> extract_code("So:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```")
    'print(1)'
    >>> extract_code("```py\\ndef f(): ...\\n```\\n```py\\nprint(f())\\n```", wanted=re.compile("def f"))
    'def f(): ...'
  """
  text = text.rpartition("</think>")[2]
  if "```" not in text and "~~~" not in text:
    return None
  best: tuple[bool, bool, str | None] = (False, False, None)
  for parser in _parsers():
    hits = lambda code: wanted is None or wanted.search(code) is not None
    blocks = [(hits(code), is_python, code) for code, is_python in _blocks(text, parser)]
    # Of equals, `max` returns the first.
    best = max([best, *reversed(blocks)], key=lambda each: (each[2] is not None, *each[:2]))
    if best[0] and best[1]:
      break
  return best[2]


@functools.cache
def _parsers() -> list[Any]:
  """Returns parsers of blocks alone: that of CommonMark, and one that knows fences only."""
  from markdown_it import MarkdownIt  # Imported late: no other reward needs it.

  rules = ["code", "fence", "blockquote", "hr", "list", "heading"]
  parsers = [MarkdownIt("zero").enable(rules), MarkdownIt("zero").enable("fence")]
  for parser in parsers:
    parser.core.ruler.enableOnly(["normalize", "block"])
  return parsers


def _blocks(text: str, parser: Any) -> list[tuple[str, bool]]:
  """Returns the code of each block that may be a program, and whether it is marked Python."""
  lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
  for _ in range(_MAX_REPAIRS):
    fences = [token for token in parser.parse("\n".join(lines)) if token.type == "fence"]
    if not any(_end_block(lines, fence) for fence in fences):
      break
  blocks = []
  for fence in fences:
    code, is_python = _content(lines, fence), _PYTHON.match(fence.info) is not None
    if code.strip() and (is_python or not fence.info.strip()):
      blocks.append((code, is_python))
  return blocks


def _content(lines: list[str], fence: Any) -> str:
  """Returns the content of a block, whose lines may be less indented than its fence."""
  first, content = fence.map[0], fence.content.removesuffix("\n")
  inside = lines[first + 1 : first + 2 + content.count("\n")]
  indentation = lines[first].partition(fence.markup)[0]
  if (
    content
    and indentation.isspace()
    and not all(line.startswith(indentation) for line in inside if line.strip())
  ):
    # CommonMark would take what it can from each line, and break the program.
    return textwrap.dedent("\n".join(inside))
  return content


def _end_block(lines: list[str], fence: Any) -> bool:
  """Ends a block at the first line that shows it should have ended; returns whether one does.

  The missing fence is added to the lines of the text.
  """
  first, markup = fence.map[0], fence.markup
  if markup not in fence.content:
    return False
  # The fence lies as deep in lists and quotes as the one that opened the block.
  closing = re.sub(r"[^>\s]", " ", lines[first].partition(markup)[0]) + markup
  for i, line in enumerate(fence.content.split("\n"), first + 1):
    if markup not in line:
      continue
    words = line.strip()
    behind = words.lstrip(markup[0])
    if words.startswith(markup) and behind and markup[0] not in behind and len(line) - len(line.lstrip()) < 4:
      lines[i:i] = [closing]
      return True
    # Code of Markdown within a line has a fence on both sides.
    if words.endswith(markup) and behind and len(_RUN.findall(words)) % 2:
      lines[i : i + 1] = [lines[i].rstrip().rstrip(markup[0]), closing]
      return True
  return False
