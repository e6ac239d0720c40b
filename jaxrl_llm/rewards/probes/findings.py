"""What the rewards of probes mean: a table of what earns what, and what looks broken."""

import itertools
import re
import textwrap
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm.rewards.probes import texts
from jaxrl_llm.rewards.probes.table import EPS, Table

_COPIES, _STEPS = (texts.PROMPT, texts.QUESTION), (texts.MORE, texts.LESS, texts.NEXT)
_COMPARE = (
  "compare the answer that the response states with the row's, as final_number, final_text and maths do"
)
_WIDTH = 120  # Columns.
_SPACE = "\N{NO-BREAK SPACE}"


def most(holds: Bool[np.ndarray, " n"]) -> bool:
  """Returns whether something holds for clearly more than half of the problems.

  share > 1/2 + 1/√n

  A wrong answer may be right by chance, as one of two options is for half of the problems. The
  margin is two standard errors, so that fewer than five problems show nothing.

  Example:
    >>> most(np.array([True] * 5)), most(np.array([True] * 4)), most(np.array([True] * 60 + [False] * 40))
    (True, False, False)
  """
  return len(holds) > 0 and float(np.mean(holds)) > 0.5 + len(holds) ** -0.5


def findings(table: Table, *, is_own: bool = True, reads: str | None = None) -> list[str]:
  """Describes what looks broken about a reward, one fault with its likely fix per line.

  A fault that explains others hides them. Strictness alone (one form, spaces, case) is a fault of a
  user's function only: that of a registered reward is documented and has settings.

  Args:
    table: Rewards of the probes.
    is_own: Whether the verifier is a function of the user's own.
    reads: What the verifier reads in a right response, for the message about one that earns
      nothing; None if it reads no answer.

  Returns:
    Lines; empty if nothing looks broken.
  """
  faults = _worthless(table) or [*_wrong_answers(table), *_right_answers(table, is_own, reads)]
  return [*_failures(table), *faults]


def _best(table: Table) -> Float[np.ndarray, " n"]:
  """Returns the most that a right answer to each problem earns in any form."""
  return np.fmax.reduce([table.of(form) for form in (*table.forms, texts.DEMONSTRATION)])


def _failures(table: Table) -> Iterator[str]:
  if not any(np.isfinite(values).any() for values in table.rewards.values()):
    detail = next(iter(table.failures.values())).replace(", completion 0", "")
    yield f"failure: {detail} (on every response): mend the function, whose example is a row of the task"
    return
  by_cause: dict[str, list[str]] = {}
  for kind, detail in table.failures.items():
    # "reward 'own', completion 7: raised: ValueError: bad" -> "reward 'own' raised: ValueError".
    cause = re.sub(r", completion \d+:", "", ": ".join(detail.split(": ")[:3]))
    by_cause.setdefault(cause, []).append(kind)
  for cause, kinds in by_cause.items():
    others = f" and {len(kinds) - 4} other kinds of response" if len(kinds) > 4 else ""
    yield (
      f"failure: {cause} (on {', '.join(map(_name, kinds[:4]))}{others}): return 0 for what cannot be read, "
      "because a response without a reward is not learned from"
    )


def _worthless(table: Table) -> list[str]:
  """Returns the faults that explain all others: what a response says does not matter."""
  values = np.stack(list(table.rewards.values()))
  ranges = np.nanmax(values, axis=0, initial=-np.inf) - np.nanmin(values, axis=0, initial=np.inf)
  level = float(np.nanmean(values)) if np.isfinite(values).any() else np.nan
  if np.isnan(level):
    return []
  if np.all(ranges <= EPS) and abs(level) > EPS:
    return [f"constant: every response earns {level:.4g}, right or wrong: {_COMPARE}"]
  longer = table.of(texts.LONG) - table.of(texts.RANDOM)
  best = _best(table)
  if most((longer > EPS) & (table.of(texts.LONG) > best - EPS)):
    return [
      "length: many random words earn more than few, and no less than the right answer: add a term for the "
      "length to a verifier, with a smaller weight (reward.terms)"
    ]
  empty = table.of(texts.EMPTY)
  if most(empty >= best - EPS) and most(empty > table.least + EPS) and most(best > table.least + EPS):
    return [
      "empty response: it earns as much as the right answer: take less off for length or form, or return 0 "
      "for an empty text"
    ]
  if most(table.as_right(texts.RANDOM)):
    kinds = "random words and whitespace" if most(table.as_right(texts.BLANK)) else "random words"
    return [f"accepts anything: {kinds} earn as much as the right answer: {_COMPARE}"]
  return []


def _wrong_answers(table: Table) -> Iterator[str]:
  """Yields the wrong responses that are rewarded like right ones."""
  copies = [kind for kind in _COPIES if most(table.as_right(kind))]
  if most(table.as_right(texts.OTHER)):
    form = "in a demonstration" if table.form == texts.DEMONSTRATION else f"as {_stated(table.form, table)}"
    also = f" (and so does a {copies[0]})" if copies else ""
    yield (
      f"format only: another problem's answer, written {form}, earns as much as the right one{also}: "
      f"{_COMPARE}"
    )
    return
  if steps := [kind for kind in _STEPS if most(table.as_right(kind))]:
    verb = "earns" if len(steps) == 1 else "earn"
    yield f"off by one: {' and '.join(steps)} {verb} as much as the right answer X: compare for equality"
  if copies:
    yield (
      f"reads the prompt: a {copies[0]} earns as much as the right answer: judge completion.text alone, and "
      "what it states rather than all that it contains"
    )
  if most(table.as_right(texts.CUT)):
    yield (
      "accepts a beginning: the right answer, cut in the middle by the token budget, earns as much as the "
      "whole: compare all of it, and return 0 unless completion.stopped"
    )


def _right_answers(table: Table, is_own: bool, reads: str | None) -> Iterator[str]:
  """Yields the right responses that are not rewarded."""
  best = _best(table)
  known = np.isfinite(best) & np.isfinite(table.nothing)
  earns = (best > table.nothing + EPS)[known]
  if len(earns) and (not np.any(earns) or most(~earns)):
    if not is_own and reads is None:  # It may judge a working, or anything else.
      return
    yield _instead(table, earns, reads or "")
    return
  fails = lambda kind: most(~table.as_right(kind))
  if fails(texts.BEFORE) and most(table.as_right(texts.BEHIND)):
    yield (
      "first number: a solution that ends with the right answer earns nothing if another number stands "
      "before it: read the last number, or what is stated as the answer, as final_number does"
    )
  for where, form in table.shown.items():
    if not np.any(table.more_than_nothing(form)):
      yield (
        f"shown form: {where} state the answer as {_stated(form, table)}, which earns nothing, and the "
        "policy learns it from them: accept it, or change them"
      )
  if texts.DEMONSTRATION in table.rewards and not np.any(table.more_than_nothing(texts.DEMONSTRATION)):
    yield (
      "demonstrations: none earns anything, and a warm start imitates them: accept their form, or leave them "
      "out (task.response_column)"
    )
  if not is_own:
    return
  if spaces := [kind for kind in texts.SPACES if fails(kind)]:
    where = " or ".join(spaces)
    yield f"exact spaces: the right answer earns nothing with a {where}: compare completion.text.strip()"
  if cases := [kind for kind in texts.CASES if fails(kind)]:
    yield (
      f"case: the right answer earns nothing in {' or '.join(cases)}: compare both sides with casefold(), "
      "unless case has a meaning here"
    )


def _instead(table: Table, earns: Bool[np.ndarray, " m"], reads: str) -> str:
  """Returns the fault of a reward that does not pay for right answers, by what it pays for."""
  paid = [kind for kind in table.rewards if most(table.more_than_nothing(kind))]
  if columns := list(filter(_is_column, paid)):
    return (
      f"wrong column: the right answer earns nothing and the {columns[0]} does: read example['answer'], or "
      "name the column of the answers in task.answer_column"
    )
  if steps := [kind for kind in paid if kind in _STEPS]:
    return f"off by one: the right answer X earns nothing and {steps[0]} does: compare for equality"
  if copies := [kind for kind in paid if kind in _COPIES]:
    return (
      f"reads the prompt: the right answer earns nothing and a {copies[0]} does: judge completion.text "
      "against example['answer']"
    )
  if varied := [kind for kind in paid if kind in (*texts.SPACES, *texts.CASES)]:
    fault, how = ("exact spaces", "with a") if varied[0] in texts.SPACES else ("case", "in")
    return f"{fault}: the right answer earns only {how} {varied[0]}: compare both sides without it"
  share = 100 * np.mean(earns)
  earned = f"something in {share:.0f} % of the problems only" if share else "nothing in the forms tried"
  return (
    f"wrong column: the right answer, such as {table.example!r}, earns {earned}{reads}: the reward reads "
    "another column than task.answer_column, or needs another form; show it in demonstrations "
    "(task.response_column)"
  )


def table_lines(table: Table) -> list[str]:
  """Describes what earns what, on average over the problems; equal rewards share a line.

  X stands for the right answer. The verifier's own reward follows in brackets if it differs.
  """
  stated = (*table.forms, texts.DEMONSTRATION)
  varied = (*texts.SPACES, *texts.CASES, texts.EXPLAINED, texts.BEFORE, texts.BEHIND)
  paid = lambda kind: table.form in table.rewards and _value(table, kind) > _value(table, table.form)
  wrong = [
    kind for kind in table.rewards if kind not in (*stated, *varied) and (not _is_column(kind) or paid(kind))
  ]
  blocks = (
    ("right answer X", stated),
    (f"variations of {_name(table.form)}", varied),
    ("wrong or none", wrong),
  )
  lines = []
  for title, kinds in blocks:
    valued = [(*_value(table, kind), _name(kind)) for kind in kinds if kind in table.rewards]
    for text, same in itertools.groupby(sorted(valued, key=lambda each: -each[0]), lambda each: each[1]):
      lines.append((title, text, "  ".join(name.replace(" ", _SPACE) for _, _, name in same)))
      title = ""
  first, second = (max(len(line[column]) for line in lines) for column in (0, 1))
  wrapped = []
  for title, text, names in lines:
    start, margin = f"  {title:<{first}}  {text:>{second}}  ", " " * (first + second + 6)
    wrapped += textwrap.wrap(
      names, _WIDTH, initial_indent=start, subsequent_indent=margin, break_on_hyphens=False
    )
  return [line.replace(_SPACE, " ") for line in wrapped]


def _value(table: Table, kind: str) -> tuple[float, str]:
  rewards, verdicts = table.of(kind), next(iter(table.parts.values()))[kind]
  if not np.isfinite(rewards).any():
    return -np.inf, "fails"
  value, verdict = float(np.nanmean(rewards)), float(np.nanmean(verdicts))
  return value, f"{value:.2f}" + (
    f" ({verdict:.2f})" if not np.allclose(rewards, verdicts, equal_nan=True) else ""
  )


def _name(kind: str) -> str:
  text = kind.replace("{}", "X")
  return text if text == text.strip() else repr(text)


def _is_column(kind: str) -> bool:
  return kind.startswith(texts.COLUMN)


def _stated(form: str, table: Table) -> str:
  return repr(form.replace("{}", table.example))
