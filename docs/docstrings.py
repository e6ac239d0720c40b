"""What the site reads differently in a docstring: sections "Example", and equations.

A section "Example" is code, as "Examples" is. A paragraph of equations in Unicode becomes MathML, a
line for each of its lines, which browsers show without a script.
"""

import html
import re
from collections.abc import Iterator

import griffe

FUNCTIONS = {"KL", "JSD", "Var", "clip", "cos", "exp", "log", "max", "min", "sech", "sg"}
"""Words that are set as parts of an equation; all others are set as prose."""

LIMITS = {"Σ", "max", "min"}
"""What has its index below it."""

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"

_EQUATION = re.compile(r"(?![A-Z][a-z]+ )(\w+: )?[^\s=]+( [^\s=.]+)? (=|:=|←) ")
_MATHS = re.compile(r"[^\W\d_a-zA-Z]|[·√−²|]|_[a-z{]")
_TOKEN = re.compile(
  r"""(?P<space>\s+)
    | (?P<prose>`[^`]*`|"[^"]*"|[A-Za-z]+'s\b|\b[a-z]+-[a-z]{3,}|(?<=[ ])a(?=[ ][a-z]{2}))
    | (?P<number>\d+(?:\.\d+)?(?:e[-−]?\d+)?|½)
    | (?P<name>[A-Za-z]{2,}\d?(?:_[A-Za-z]\w+)+)
    | (?P<word>[A-Za-z]{2,}\d?)
    | (?P<sum>Σ)
    | (?P<letter>[^\W\d_][\u0302\u0303]?\d?|∂)
    | (?P<sign>:=|.)""",
  re.VERBOSE,
)
_SCRIPT = re.compile(r"(?P<kind>[_^])(?:\{(?P<group>[^{}]*)\}|(?P<short>\w+))|(?P<square>[²ⱼ⁼])")
_SCRIPTS = {"²": ("^", "2"), "ⱼ": ("_", "j"), "⁼": ("^", "=")}
_SIGNS = {"infix": ":=+−-·/<>≤≥≠∈←→", "opening": "([{⌊⌈,;"}


class Examples(griffe.Extension):
  """Extension of griffe, named in `mkdocs.yml`."""

  def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
    """Gives the section the name that griffe knows, and sets equations."""
    if obj.docstring:
      text = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
      obj.docstring.value = "\n\n".join(block(part) if is_equation(part) else part for part in text.split("\n\n"))


def is_equation(paragraph: str) -> bool:
  """Returns whether a paragraph consists of equations: it begins as one and is no sentence."""
  first = paragraph.partition("\n")[0]
  return bool(_EQUATION.match(first) and _MATHS.search(first)) and not paragraph.endswith((".", ":")) and ">>>" not in paragraph


def block(paragraph: str) -> str:
  """Formats a paragraph of equations as HTML, each of its lines by itself."""
  lines = "".join(f"<div>{mathml(line)}</div>" for line in paragraph.split("\n"))
  return f'<div class="equation">{lines}</div>'


def mathml(line: str) -> str:
  """Formats an equation in Unicode as MathML."""
  return f'<math displaystyle="true" alttext="{html.escape(line.strip())}">{"".join(_elements(line))}</math>'


def _elements(text: str) -> Iterator[str]:
  """Yields the elements of an equation, from left to right."""
  at, before = 0, ""
  while at < len(text):
    token = _TOKEN.match(text, at)
    kind, shown, at = token.lastgroup, token[0], token.end()
    if kind == "space":
      after = _TOKEN.match(text, at)
      if len(shown) > 1:
        yield _gap(4)
      elif before in ("word", "prose") or (before != "infix" and after and after.lastgroup in ("word", "prose")):
        yield _gap(1)
      continue
    element = _element(kind, shown, prefix=before in ("", "infix", "opening"))
    # The index of `keep_t` is one letter; `clip_low` is one name.
    scripts = {}
    while script := _SCRIPT.match(text, at):
      sort, inside = _SCRIPTS[script["square"]] if script["square"] else (script["kind"], script["group"] or script["short"])
      scripts[sort], at = f"<mrow>{''.join(_elements(inside))}</mrow>", script.end()
    yield _scripted(element, scripts, below=shown in LIMITS)
    before = next((sort for sort, signs in _SIGNS.items() if kind == "sign" and shown in signs), kind)


def _element(kind: str, shown: str, *, prefix: bool) -> str:
  """Formats a token; `prefix` says whether a minus before it would be a sign."""
  escaped = html.escape(shown.strip("`"))
  if kind == "number":
    return f"<mn>{escaped}</mn>"
  if kind == "prose" or (kind == "word" and shown not in FUNCTIONS):
    return f"<mtext>{escaped}</mtext>"
  if kind == "sum":
    return "<mo>∑</mo>"
  if kind == "sign":
    form = ' form="prefix"' if shown in "−-" and prefix else ""
    fence = ' stretchy="false"' if shown in "()[]{}|‖⌊⌋⌈⌉" else ""
    close = ' lspace="0" rspace="0"' if shown in "|‖/'" else ""
    return f"<mo{form}{fence}{close}>{escaped.replace('-', '−')}</mo>"
  return f"<mi>{escaped}</mi>"


def _gap(width: int) -> str:
  """Returns spaces that a browser keeps, and a search and a copied equation too."""
  return f"<mtext>{width * NO_BREAK_SPACE}</mtext>"


def _scripted(element: str, scripts: dict[str, str], *, below: bool) -> str:
  """Adds an index and an exponent to an element."""
  match scripts:
    case {"_": index, "^": exponent}:
      return f"<msubsup>{element}{index}{exponent}</msubsup>"
    case {"_": index}:
      return f"<munder>{element}{index}</munder>" if below else f"<msub>{element}{index}</msub>"
    case {"^": exponent}:
      return f"<msup>{element}{exponent}</msup>"
  return element
