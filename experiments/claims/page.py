"""The page of all claims, made of the studies' `results.json` and of nothing else."""

import json
import os
import pathlib
from collections import Counter
from collections.abc import Mapping

from experiments.claims.claim import CLAIMS, Claim, folder_of

HERE = pathlib.Path(__file__).parent
NOT_RUN = "not yet run"

HEAD = """\
# Claims of the papers, tried

Made by `python -m experiments.claims --page` from the studies' `results.json`; not written by hand.

```sh
python -m experiments.claims E20                          # runs a study, judges it, draws its figure
python -m experiments.claims E20 --smoke --folder=/tmp/x  # shows in a minute that it runs
python -m experiments.claims --page                       # this page
```

Each study wrote down its rules before it was measured (`rules.py`). A claim is *reproduced*, *not reproduced*, or its *mechanism was not
engaged*: nothing in the run could have decided. "Not reproduced" says that these small models on these small tasks did not show it, and
nothing about larger ones. The verdict is that of the claim's main rule, the counts are those of all its rules. Numbers are means with 95 %
intervals: of the hierarchical bootstrap over seeds and problems or, of a study's other quantities, Student's over the seeds; where both are
given, both had to pass. Seconds are those of the whole study, which may try several claims.

| | claim | source | figure | verdict | decided by | took |
| --- | --- | --- | --- | --- | --- | --- |
"""


def write() -> pathlib.Path:
  """Writes the page; returns its path."""
  path = HERE / "README.md"
  path.write_text(text())
  return path


def text() -> str:
  """The page."""
  return HEAD + "".join(row(claim, results_of(claim)) for claim in CLAIMS.values())


def results_of(claim: Claim) -> dict:
  """What a claim's study wrote, {} if it has not run to its end."""
  path = folder_of(claim) / "results.json"
  return json.loads(path.read_text()) if path.exists() else {}


def row(claim: Claim, results: Mapping) -> str:
  """A line of the table."""
  rules = rules_of(claim, results)
  study = os.path.relpath(folder_of(claim), HERE)
  link = f"[{claim.name}]({study})" if folder_of(claim).exists() else claim.name
  if not rules:
    return f"| {link} | {claim.says} | {claim.source} | | {NOT_RUN} | | |\n"
  main = main_rule(claim, rules)
  counts = Counter(found["verdict"] for found in rules.values())
  verdict = f"**{rules[main]['verdict']}**"
  if len(rules) > 1:
    verdict += f"<br>of {len(rules)} rules: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
  figure = folder_of(claim) / claim.figure
  shown = os.path.relpath(figure, HERE)
  picture = f'<a href="{shown}"><img src="{shown}" width="160" alt="{claim.name}"></a>' if figure.exists() else ""
  decided = f"{main}: {deciding(rules[main])}" + (f"; {claim.note}" if claim.note else "")
  return f"| {link} | {claim.says} | {claim.source} | {picture} | {verdict} | {escaped(decided)} | {took(results)} |\n"


def rules_of(claim: Claim, results: Mapping) -> dict[str, dict]:
  """The verdicts of a claim's rules: "E2" and "E2, name", and not "E20". What is no verdict, such as a calibration, is left out."""
  mine = {name: found for name, found in results.get("verdicts", {}).items() if name.split(",")[0] == claim.name}
  return {name: found for name, found in mine.items() if found["verdict"] != "calibration"}


def main_rule(claim: Claim, rules: Mapping[str, Mapping]) -> str:
  """The name of the rule that decides.

  Raises:
    KeyError: the study has no such rule.
  """
  found = [name for name in rules if name == claim.main_rule] or [name for name in rules if name.startswith(claim.main_rule)]
  if not found:
    raise KeyError(f"{claim.name}: main_rule: found {claim.main_rule!r}, expected one of {', '.join(rules)}")
  return found[0]


def deciding(found: Mapping) -> str:
  """The numbers of a verdict: its interval, or else what it holds.

  Example:
    >>> deciding({"rule": "", "verdict": "", "interval": {"mean": 0.0316, "low": 0.0066, "high": 0.06}, "of": 5})
    '+0.0316 [+0.0066, +0.06]'
    >>> deciding({"rule": "it is", "verdict": "", "passed": 3, "of": 5})
    'passed 3, of 5'
  """
  by_problem, by_seed = found.get("interval"), found.get("over_seeds")
  for value in (by_problem, *found.values()):
    if isinstance(value, Mapping) and {"mean", "low", "high"} <= set(value):
      spread = lambda at: f"[{at['low']:+.3g}, {at['high']:+.3g}]"
      return f"{value['mean']:+.3g} {spread(value)}" + (f", over seeds {spread(by_seed)}" if by_seed and value is by_problem else "")
  numbers = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.items() if isinstance(value, int | float)]
  return ", ".join(numbers) or found["rule"]


def took(results: Mapping) -> str:
  """How long a study ran."""
  for name, words in (("processor_seconds", "of a core"), ("wall_seconds", "on 2 shared cores")):
    if name in results:
      return f"{results[name]:.0f} s {words}"
  return "not recorded"


def escaped(text: str) -> str:
  """Text that does not end a cell of a table."""
  return text.replace("|", "\\|").replace("\n", " ")
