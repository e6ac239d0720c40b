"""`python -m experiments.claims [NAME] [--smoke] [--folder=DIR] [--plot_only] [--format ...]`

Runs the study that tries a claim, such as E20. Without a name, or with --page, it writes the page
of all verdicts, README.md beside this file.

  python -m experiments.claims E20
  python -m experiments.claims E20 --smoke --folder=/tmp/e20
  python -m experiments.claims --judge
  python -m experiments.claims --page

--judge judges the stored rows of all studies again by today's rules, remakes their figures and
tables, and writes the page. Exit code: 0, or 2 for an unknown claim or a bad argument.
"""

import importlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Sequence

from experiments.claims import page
from experiments.claims.claim import CLAIMS
from experiments.results import from_json, rounded, to_json
from jaxrl_llm.messages import did_you_mean

USAGE_ERROR = 2


def main(argv: Sequence[str]) -> int:
  """Runs the command line and returns the exit code."""
  if {"-h", "--help"} & set(argv):
    print(__doc__)
    return 0
  if not argv or list(argv) == ["--page"]:
    print(f"wrote {page.write()}")
    return 0
  if list(argv) == ["--judge"]:
    for study in dict.fromkeys(claim.study for claim in CLAIMS.values()):
      print(f"{study}: {judge(study)}")
    print(f"wrote {page.write()}")
    return 0
  name, rest = argv[0], list(argv[1:])
  if problem := refusal(name, rest):
    print(f"error: {problem}", file=sys.stderr)
    return USAGE_ERROR
  try:
    importlib.import_module(f"{CLAIMS[name.upper()].study}.__main__").main(rest)
  # A study may refuse its arguments: argparse exits with a number, the studies with a line.
  except SystemExit as refused:
    if isinstance(refused.code, str):
      print(refused.code, file=sys.stderr)
      return USAGE_ERROR
    raise
  return 0


def judge(study: str) -> str:
  """Judges a study's stored rows again, and remakes its table and its figures.

  Figures that need more than `results.json` contains are left as they are.

  Returns:
    Number of rules and of changed verdicts, in words.
  """
  folder = pathlib.Path(importlib.util.find_spec(study).origin).parent
  path = folder / "results.json"
  if not path.exists():
    return page.NOT_RUN
  results = from_json(path.read_text())
  verdicts = rounded(importlib.import_module(f"{study}.rules").judge(results))
  changed = [name for name in verdicts | results["verdicts"] if verdicts.get(name) != results["verdicts"].get(name)]
  path.write_text(to_json(results | {"verdicts": verdicts}))
  about = folder / "README.md"
  about.write_text(page.with_table(about.read_text(), verdicts))
  figures = importlib.import_module(f"{study}.figures")
  drawn = importlib.util.find_spec("matplotlib") is not None and "arrays" not in inspect.signature(figures.draw).parameters
  if drawn:
    figures.draw(results | {"verdicts": verdicts}, folder / "figures", ["png"])
  return f"{len(verdicts)} rules, {len(changed)} changed" + ("" if drawn else ", figures not drawn")


def refusal(name: str, rest: Sequence[str]) -> str:
  """Returns what is wrong with a command line, or "". It does not start JAX.

  Example:
    >>> refusal("E99", []).split(", ")[0]
    "claim: found 'E99' (did you mean 'E9'?)"
  """
  if name.upper() not in CLAIMS:
    hint = did_you_mean(name.upper(), CLAIMS, " (did you mean '{}'?)")
    return f"claim: found '{name}'{hint}, expected one of E1 to E21, E23 to E25, or --page for the page of all"
  study = CLAIMS[name.upper()].study
  if importlib.util.find_spec(study) is None or importlib.util.find_spec(f"{study}.__main__") is None:
    return f"{name}: found no package {study}, expected the study that tries the claim"
  # This is checked before hours of training, not after them.
  if importlib.util.find_spec("matplotlib") is None:
    return "the figures need matplotlib: pip install -e '.[logging]'"
  if "--smoke" in rest and not any(word.startswith("--folder") for word in rest):
    return "--smoke: found no --folder, expected --folder=DIR, so that the measured results are not overwritten"
  return ""


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
