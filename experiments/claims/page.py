"""Page of all claims, made from the studies' `results.json` alone."""

import importlib.util
import json
import os
import pathlib
from collections import Counter
from collections.abc import Mapping

from experiments import judging, provenance
from experiments.claims.claim import CLAIMS, Claim, folder_of
from experiments.judging import described

HERE = pathlib.Path(__file__).parent
NOT_RUN = "not yet run"

HEAD = """\
# Claims of the papers, tried

Verdicts and numbers on this page are computed from the studies' `results.json` by
`python -m experiments.claims --page`. The wording of claims, rules and remarks is ours.

```sh
python -m experiments.claims E20                          # run, judge, draw
python -m experiments.claims E20 --smoke --folder=/tmp/x  # show in a minute that it runs
python -m experiments.claims --judge                      # judge all stored rows again
```

| verdict | meaning |
| --- | --- |
| reproduced | the 95 % interval lies on the claim's side of the bound |
| contradicted | the interval lies on the other side |
| inconclusive | the interval contains the bound: these few small runs could not tell |
| mechanism not engaged | what the claim is about did not happen in the run, so nothing could have decided |
| identity verified | algebra, checked in floating point: no experiment |

All results are about small models on small tasks, and say nothing about larger ones. The verdict
of a claim is the verdict of its one confirmatory rule. It counts as reproduced or contradicted only
if its p-value is below 0.05 after Holm's correction over all confirmatory rules that have a p-value
({family} of them). All other rules are exploratory. They are not corrected, and are counted below
the verdict. Intervals and p-values are Student's over paired seeds. "Would find" is the true
distance from the bound that these seeds would have found with a probability of 80 %: an
inconclusive verdict excludes nothing smaller. A trial has collapsed if its held-out accuracy stays
below half of its own peak over the last quarter of training. This misses policies that fall from a
start that is their peak; studies after these use another endpoint (`judging.fell`), by which one
exploratory verdict here would differ. Jumps of the gradient are described where they occur and
decide nothing.

{noise}

{trust}

{counts}

| | claim | source | figure | verdict | decided by | rules before the run | took |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""

TRUST = """\
"Rules before the run" says whether the history shows that the rules are older than the run:
`results.json` names the commit at which the run began, that commit contains exactly these rules,
and it is older than the run. Results from before 2026-11-25 name no commit. Some of their
confirmatory rules were changed on 2026-11-25, when the results were known (the studies' `rules.py`
say which and why). On those seeds the rules describe; only fresh seeds can confirm."""


def write() -> pathlib.Path:
  """Writes the page and returns its path."""
  path = HERE / "README.md"
  path.write_text(text())
  return path


def text() -> str:
  """Composes the page."""
  all_results = {name: results_of(claim) for name, claim in CLAIMS.items()}
  adjusted = holm(all_results)
  main = {name: main_verdict(claim, all_results[name]) for name, claim in CLAIMS.items()}
  counts = Counter(headline(row["verdict"], adjusted.get(name)) for name, row in main.items() if row)
  head = HEAD.format(
    family=len(adjusted),
    noise=noise(all_results["E20"]),
    trust=TRUST,
    counts=f"**Of {len(CLAIMS)} claims: {', '.join(f'{counts[name]} {name}' for name in judging.VERDICTS if counts[name])}.**",
  )
  return head + "".join(row(claim, all_results[name], adjusted.get(name)) for name, claim in CLAIMS.items())


def results_of(claim: Claim) -> dict:
  """Reads the results of a claim's study; {} if it has not finished."""
  path = folder_of(claim) / "results.json"
  return json.loads(path.read_text()) if path.exists() else {}


def main_verdict(claim: Claim, results: Mapping) -> Mapping:
  """Returns the row of a claim's confirmatory rule, or {} if its study has not finished."""
  rules = rules_of(claim, results)
  return rules[main_rule(claim, rules)] if rules else {}


def holm(all_results: Mapping[str, Mapping]) -> dict[str, float]:
  """Computes Holm's p-values of the confirmatory rules whose mechanism was engaged, by claim."""
  rows = {name: main_verdict(CLAIMS[name], results) for name, results in all_results.items()}
  return judging.holm({name: row["p"] for name, row in rows.items() if row.get("p") is not None and row["verdict"] != judging.NOT_ENGAGED})


def noise(results: Mapping) -> str:
  """Describes the differences between arms that have the same gradient."""
  verdict = results.get("verdicts", {}).get("E20, A/A")
  if not verdict:
    return "An A/A comparison has not run yet."
  return (
    f"**A/A.** Objectives with one gradient on fresh data end up to {100 * verdict['largest']:.1f} points of accuracy apart in one\n"
    f"seed of E20; the root mean square over {verdict['pairs']} pairs is {100 * verdict['rms']:.1f}. Rounding alone causes this, and\n"
    "pairing seeds does not remove it."
  )


def row(claim: Claim, results: Mapping, adjusted: float | None = None) -> str:
  """Formats a claim as a line of the table; `adjusted` is the p-value after Holm."""
  rules = rules_of(claim, results)
  study = os.path.relpath(folder_of(claim), HERE)
  link = f"[{claim.name}]({study})" if folder_of(claim).exists() else claim.name
  if not rules:
    return f"| {link} | {claim.says} | {claim.source} | | {NOT_RUN} | | | |\n"
  main = main_rule(claim, rules)
  verdict = f"**{headline(rules[main]['verdict'], adjusted)}**"
  if headline(rules[main]["verdict"], adjusted) != rules[main]["verdict"]:
    verdict += f", {rules[main]['verdict']} if it were the only one"
  if others := Counter(other["verdict"] for name, other in rules.items() if name != main):
    verdict += f"<br>of {sum(others.values())} others: " + ", ".join(f"{others[name]} {name}" for name in judging.VERDICTS if others[name])
  figure = folder_of(claim) / claim.figure
  shown = os.path.relpath(figure, HERE)
  picture = f'<a href="{shown}"><img src="{shown}" width="160" alt="{claim.name}"></a>' if figure.exists() else ""
  corrected = f"; after Holm p = {adjusted:.2g}" if adjusted is not None else ""
  decided = f"{main}: {described(rules[main])}{corrected}" + (f"; {claim.note}" if claim.note else "")
  cells = (link, claim.says, claim.source, picture, verdict, escaped(decided), trusted(claim, results), took(results))
  return f"| {' | '.join(cells)} |\n"


def headline(verdict: str, adjusted: float | None) -> str:
  """Returns the verdict of a confirmatory rule as a member of its family.

  A verdict that is not significant after Holm is inconclusive.
  """
  decided = verdict in (judging.REPRODUCED, judging.CONTRADICTED)
  return judging.INCONCLUSIVE if decided and adjusted is not None and adjusted >= judging.ALPHA else verdict


def rules_of(claim: Claim, results: Mapping) -> dict[str, dict]:
  """Returns the verdicts of a claim's rules: "E2" and "E2, name", but not "E20".

  Calibrations are left out, since they are no verdicts.
  """
  verdicts = results.get("verdicts", {})
  of_claim = {name: verdict for name, verdict in verdicts.items() if name.split(",")[0] == claim.name}
  return {name: verdict for name, verdict in of_claim.items() if verdict["verdict"] != judging.CALIBRATION}


def main_rule(claim: Claim, rules: Mapping[str, Mapping]) -> str:
  """Returns the name of the rule that decides a claim.

  Raises:
    KeyError: If the study has no such rule.
  """
  if claim.main_rule not in rules:
    raise KeyError(f"{claim.name}: main_rule: found {claim.main_rule!r}, expected one of {', '.join(rules)}")
  return claim.main_rule


def trusted(claim: Claim, results: Mapping) -> str:
  """Formats when a claim's run began, at which commit, and whether its rules have changed since.

  A second run decides its claim, so its record counts.
  """
  recorded = results.get("second", results).get("provenance")
  if not recorded:
    return "not recorded"
  file = pathlib.Path(importlib.util.find_spec(f"{claim.study}.rules").origin)
  since = "" if provenance.hash_of(file.read_bytes()) == recorded["rules"] else ", changed since"
  return f"{recorded['commit'][:8]}, {recorded['started'][:16].replace('T', ' ')}{since}"


BEGIN, END = "<!-- verdicts: written by `python -m experiments.claims --judge` -->", "<!-- end of verdicts -->"


def table(verdicts: Mapping[str, Mapping]) -> str:
  """Formats all verdicts of a study as a table between `BEGIN` and `END`."""
  rows = "".join(f"| {escaped(name)} | {row['verdict']} | {escaped(described(row))} |\n" for name, row in verdicts.items())
  return f"{BEGIN}\n| rule | verdict | measured |\n| --- | --- | --- |\n{rows}{END}"


def with_table(text: str, verdicts: Mapping[str, Mapping]) -> str:
  """Replaces the table of verdicts in a study's page.

  Raises:
    ValueError: If the page does not have exactly one table to replace.
  """
  if text.count(BEGIN) != 1 or text.count(END) != 1:
    raise ValueError(f"found no table of verdicts, expected one between {BEGIN!r} and {END!r}")
  return text[: text.index(BEGIN)] + table(verdicts) + text[text.index(END) + len(END) :]


def took(results: Mapping) -> str:
  """Formats how long a study ran."""
  for name, words in (("processor_seconds", "of a core"), ("wall_seconds", "on 2 shared cores")):
    if name in results:
      return f"{results[name] + results.get('second', {}).get(name, 0):.0f} s {words}"
  return "not recorded"


def escaped(text: str) -> str:
  """Escapes text so that it does not end a cell of a table."""
  return text.replace("|", "\\|").replace("\n", " ")
