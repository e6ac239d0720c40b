"""Sources of the notebooks, and the rule that they hold no logic."""

import ast
import pathlib
from collections.abc import Sequence

from jaxrl_llm.messages import did_you_mean

HERE = pathlib.Path(__file__).resolve().parent

ROOT = HERE.parents[1]

NAMES = (
  "00_grpo_in_one_page", "01_objectives", "02_read_a_run", "03_gspo_vs_grpo_vs_sapo", "04_moe_routing_replay",
  "05_add_your_objective", "06_learning_from_a_teacher", "07_one_collapse", "08_why_ratios_collapse",
)  # fmt: skip
"""All notebooks, in reading order."""

LIVE_NAMES = ("03_gspo_vs_grpo_vs_sapo",)
"""Notebooks that read checked-in logs, or train with `--live`."""

OWN_FUNCTIONS = {
  "00_grpo_in_one_page": {"reinforce", "logprobs", "rollout", "loss"},
  "05_add_your_objective": {"quadratic_pull"},
}
"""Functions that a notebook may define, because it teaches how to write them.

Their bodies must be free of branches and loops.
"""

_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match, ast.IfExp, ast.Lambda)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MAX_STATEMENTS = 8


def chosen(names: Sequence[str]) -> list[str]:
  """Resolves names of notebooks; no names means all notebooks.

  Args:
    names: Full names or their first characters, such as "03".

  Returns:
    Full names, in the order of the lectures.

  Raises:
    ValueError: If a name matches no notebook or several.

  Example:
    >>> chosen(["03", "01_objectives"])
    ['01_objectives', '03_gspo_vs_grpo_vs_sapo']
    >>> chosen(["3_gspo"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: unknown notebook '3_gspo' (did you mean '03_gspo_vs_grpo_vs_sapo'?); known: ...
  """
  matches = set()
  for given in names:
    name = pathlib.PurePath(given).name.removesuffix(".py").removesuffix(".ipynb")
    fitting = [known for known in NAMES if known == name] or [known for known in NAMES if name and known.startswith(name)]
    if len(fitting) != 1:
      hint = "" if fitting else did_you_mean(name, NAMES, " (did you mean {!r}?)", cutoff=0.3)
      problem = "several notebooks begin with" if fitting else "unknown notebook"
      raise ValueError(f"{problem} {given!r}{hint}; known: {', '.join(NAMES)}")
    matches.update(fitting)
  return [name for name in NAMES if not names or name in matches]


def found_logic(code: str, *, allowed: frozenset[str] | set[str] = frozenset()) -> list[str]:
  """Lists the logic in a cell that belongs in a module.

  Definitions, loops, branches and cells of more than eight statements count as logic. A
  comprehension without a condition does not.

  Args:
    code: Code of one cell.
    allowed: Names of functions that the cell may define, with assignments and returns only.

  Returns:
    One line per finding.

  Example:
    >>> found_logic("import math\\nmath.pi")
    []
    >>> found_logic("for i in range(3):\\n  print(i)")
    ['line 1: For']
    >>> found_logic("def f(x):\\n  y = x\\n  return y", allowed={"f"})
    []
  """
  tree = ast.parse(code)
  problems = []
  for node in ast.walk(tree):
    own = isinstance(node, ast.FunctionDef) and node.name in allowed
    if isinstance(node, _BRANCHES) or (isinstance(node, _DEFINITIONS) and not own):
      problems.append(f"line {node.lineno}: {type(node).__name__}")
    if isinstance(node, ast.comprehension) and node.ifs:
      problems.append(f"line {node.target.lineno}: a comprehension with a condition")
    if own:
      straight = (ast.Assign, ast.Return, ast.Expr, ast.FunctionDef)
      problems += [f"line {x.lineno}: {type(x).__name__} in {node.name}" for x in node.body if not isinstance(x, straight)]
  statements = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
  if len(statements) > _MAX_STATEMENTS:
    problems.append(f"{len(statements)} statements, expected at most {_MAX_STATEMENTS} in a cell")
  return problems
