"""A plain page of an executed notebook: its texts, code and outputs in one HTML file.

Formulas stay LaTeX. MathJax draws them if the reader has a network.
"""

import base64
import html
import pathlib
import re
from collections.abc import Mapping
from typing import Any

_STYLE = """
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.55 Georgia, serif; color: #1a1a1a; }
pre { background: #f5f6f7; padding: .6rem .8rem; overflow-x: auto; font: 13px/1.4 monospace; }
pre.output { background: none; border-left: 3px solid #d9dde2; }
img { max-width: 100%; } table { border-collapse: collapse; }
td, th { padding: .15rem .6rem; border-bottom: 1px solid #e6e8eb; text-align: left; }
"""

_MATHJAX = "https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-mml-chtml.js"
_BLOCKS = re.compile(r"(\$\$.*?\$\$|```.*?```)", re.DOTALL)


def write(name: str, notebook: Any, folder: pathlib.Path) -> pathlib.Path:
  """Writes FOLDER/NAME.html.

  Args:
    name: Name of the notebook.
    notebook: Executed notebook.
    folder: Folder of the page, created if necessary.
  """
  body = "\n".join(_markdown(cell.source) if cell.cell_type == "markdown" else _code(cell) for cell in notebook.cells)
  math = f"<script>MathJax = {{tex: {{inlineMath: [['$', '$']]}}}};</script><script async src='{_MATHJAX}'></script>"
  page = f"<!doctype html><meta charset='utf-8'><title>{html.escape(name)}</title><style>{_STYLE}</style>{math}\n{body}\n"
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"{name}.html"
  path.write_text(page, encoding="utf-8")
  return path


def _code(cell: Any) -> str:
  """Converts a code cell and its outputs to HTML."""
  return "\n".join([f"<pre>{html.escape(cell.source)}</pre>", *map(_output, cell.outputs)])


def _output(output: Any) -> str:
  """Converts one output of a cell to HTML."""
  if output.output_type == "stream":
    return f"<pre class='output'>{html.escape(output.text)}</pre>"
  data: Mapping[str, str] = output.get("data", {})
  if "image/png" in data:
    png = base64.b64encode(base64.b64decode(data["image/png"])).decode()
    return f"<img alt='{html.escape(data.get('text/plain', ''), quote=True)}' src='data:image/png;base64,{png}'>"
  if "text/markdown" in data:
    return _markdown(data["text/markdown"])
  return f"<pre class='output'>{html.escape(data.get('text/plain', ''))}</pre>"


def _markdown(text: str) -> str:
  """Converts Markdown to HTML, as far as the notebooks use it.

  It knows headings, paragraphs, lists, tables, code, emphasis and links.
  """
  parts = []
  for block in _BLOCKS.split(text):
    if block.startswith("$$"):
      parts.append(f"<p>{html.escape(block)}</p>")
    elif block.startswith("```"):
      parts.append(f"<pre>{html.escape(block.strip('`').partition(chr(10))[2])}</pre>")
    else:
      parts += [_paragraph(lines) for lines in re.split(r"\n\s*\n", block.strip("\n")) if lines.strip()]
  return "\n".join(parts)


def _paragraph(text: str) -> str:
  """Converts a heading, a list, a table or a paragraph to HTML."""
  lines = text.split("\n")
  if heading := re.match(r"(#+) (.*)", text):
    level = len(heading[1])
    return f"<h{level}>{_inline(heading[2])}</h{level}>" + ("\n" + _paragraph("\n".join(lines[1:])) if lines[1:] else "")
  if lines[0].startswith("|"):
    return _table(lines)
  for tag, mark in (("ul", r"[-*] "), ("ol", r"\d+\. ")):
    if re.match(mark, lines[0]):
      items = re.split(rf"\n(?={mark})", text)
      return f"<{tag}>" + "".join(f"<li>{_inline(re.sub(rf'^{mark}', '', item))}</li>" for item in items) + f"</{tag}>"
  return f"<p>{_inline(text)}</p>"


def _table(lines: list[str]) -> str:
  """Converts the lines of a table to HTML."""
  # A bar after a backslash does not separate cells.
  cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]
  rows = [cells[0], *cells[2:]] if len(cells) > 1 else cells
  tags = ["th"] + ["td"] * (len(rows) - 1)
  return "<table>" + "".join(
    "<tr>" + "".join(f"<{tag}>{_inline(cell)}</{tag}>" for cell in row) + "</tr>" for tag, row in zip(tags, rows, strict=True)
  ) + "</table>"  # fmt: skip


def _inline(text: str) -> str:
  """Converts emphasis, code and links to HTML. Formulas stay as they are."""
  parts = re.split(r"(\$[^$]+\$|`[^`]+`)", text)
  return "".join(_span(part) for part in parts)


def _span(text: str) -> str:
  """Converts a formula, a piece of code or the text between them to HTML."""
  if text.startswith("$") and text.endswith("$") and len(text) > 1:
    return html.escape(text)
  if text.startswith("`") and text.endswith("`") and len(text) > 1:
    return f"<code>{html.escape(text[1:-1])}</code>"
  text = html.escape(text, quote=False).replace("\\|", "|")
  text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
  text = re.sub(r"(?<!\*)\*([^*]+?)\*(?!\*)", r"<i>\1</i>", text)
  return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)
