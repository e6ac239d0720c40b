"""Entries to the leaderboard: objectives, estimators and corrections of other people.

The objective is a file, an import path with settings, or one of the study's own:

  --enter=mine.py
  --enter='my_module:mine:width=0.3&kind=upper' --scaled width
  --enter=grpo --estimator='my_module:middle:scale=2' --correction='my_module:constant:weight=0.5'

A file defines an objective with one width, and may name its advantages:

  from jaxrl_llm import objectives

  ADVANTAGES = "group"  # Key of experiments.claims.bed.ADVANTAGES.

  def objective(*, factor, length):
    slots = dict(ratio="sequence", gate="soft", weights="sequence_mean")
    return objectives.make("custom", **slots, tau_pos=factor, tau_neg=factor)

An import path names the same function as `--config.objective.name` does in a run; `--scaled` says
which of its settings are its width. The estimator and the correction, of a module or the package,
take settings alike. An entry is tuned with the same draws as all other objectives (the protocol
sets the learning rate, and the factor of the width) and trained on the same seeds. It gets as many
updates, responses and tuning trials as every other row.
"""

import contextlib
import functools
import importlib.util
import inspect
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.claims.bed import ADVANTAGES
from experiments.provenance import hash_of
from experiments.studies.forecast import protocol
from jaxrl_llm import objectives
from jaxrl_llm.advantages import estimators
from jaxrl_llm.messages import Problem, did_you_mean, one_line, shown
from jaxrl_llm.objectives.corrected import corrected, parse_term
from jaxrl_llm.settings import import_path
from jaxrl_llm.settings.signature import Setting, settings_of, unread
from jaxrl_llm.settings.values import holds
from jaxrl_llm.types import Objective

OF_PACKAGE = frozenset(objectives.OBJECTIVES)
NO_CODE = hash_of(b"")[:12]
"""Hash of an entry that the package defines."""

READS = frozenset({"old_logprobs", "sampler_logprobs"})
"""Optional fields of a batch that the bed has."""

MakeFn = Callable[..., Objective]
"""Function `(*, factor, length) -> Objective`."""


class Entry(NamedTuple):
  """Entry to the leaderboard; its objective is in the registry under its name.

  Attributes:
    name: Name of its row and its file of trials.
    advantages: Key of `experiments.claims.bed.ADVANTAGES`, or an estimator with its settings.
    correction: Key of `experiments.claims.bed.CORRECTIONS`, or a correction with its settings.
    outside: Description of what was entered, as the command line names it.
    code: Hash of the files that define it, in hexadecimal.
  """

  name: str
  advantages: str
  correction: str
  outside: str
  code: str


def enter(
  objective: str, *, name: str | None = None, scaled: Sequence[str] = (), estimator: str | None = None, correction: str | None = None
) -> Entry:
  """Checks an entry and registers its objective under the entry's name.

  Args:
    objective: Path of a file, import path MODULE:FUNCTION with settings, or objective of the study.
    name: Name of the entry. None means that of the file or the function.
    scaled: Settings of an import path's objective that the tuning multiplies by its factor.
    estimator: Estimator with its settings; see `parse_term`. None means the objective's own.
    correction: Correction with its settings. None means none.

  Raises:
    ValueError: If something does not exist, is illegal or reads what the bed does not have. One
      line.

  Example:
    >>> entered = enter("sapo", estimator="opo", name="sapo_opo")
    >>> entered.advantages, entered.outside
    ('opo', 'objective `sapo`, estimator `opo`')
    >>> objectives.OBJECTIVES.pop("sapo_opo")(factor=1.0, length=8).needs
    frozenset({'old_logprobs'})
  """
  is_path = ":" in objective and not objective.endswith(".py")
  if scaled and not is_path:
    raise ValueError(Problem("--scaled", " ".join(scaled), f"none, because {objective} scales its own width"))
  named, advantages = parse_term(objective)[0], "group"
  if is_path:
    make = _of_import_path(objective, scaled)
  elif objective in protocol.OBJECTIVES:
    if not (estimator or correction):
      raise ValueError(Problem("--enter", repr(objective), "an --estimator or a --correction beside it, because it has a row already"))
    make = lambda factor, length: objectives.make(objective, **dict(protocol.settings(objective, factor, length)))
    named, advantages = parse_term(estimator or correction)[0], "centred" if objective in protocol.CENTRED else "group"
  else:
    named, (make, advantages) = pathlib.Path(objective).stem, _of_file(pathlib.Path(objective))
  name = name or named.rpartition(":")[2]
  if name in OF_PACKAGE or not re.fullmatch(r"[\w.-]+", name):
    raise ValueError(Problem("--name", repr(name), "letters, digits and _ . -, and no name of an objective of the package"))
  if estimator and estimator not in ADVANTAGES:
    _check_estimator(estimator)
  for length, (_, factor) in itertools.product(protocol.LENGTHS, protocol.draws()):
    with _about("--enter"):
      made = make(factor=factor, length=length)
    with _about("--correction"):
      made = corrected(made, [correction] if correction else [])
    if missing := made.needs - READS:
      lacks = f"an objective without need of {', '.join(sorted(missing))}, which the bed does not have"
      raise ValueError(Problem("--enter", repr(objective), lacks))
  objectives.OBJECTIVES[name] = make
  parts = {"objective": objective, "scaled": " ".join(scaled), "estimator": estimator, "correction": correction}
  about = ", ".join(f"{part} `{text}`" for part, text in parts.items() if text)
  return Entry(name, estimator or advantages, correction or "none", about, _code(objective, estimator, correction))


def check_stored(entry: Entry, rows: Sequence[Mapping]) -> None:
  """Refuses to continue the stored trials of an entry with another one of the same name.

  Raises:
    ValueError: If the stored trials are of other settings or of other code. One line.
  """
  for row in rows:
    if (row["outside"], row["code"]) != (entry.outside, entry.code):
      what = f"with {row['outside']}" if row["outside"] != entry.outside else "of its code before a change"
      raise ValueError(Problem("--name", repr(entry.name), f"another name, because this one has trials {what}"))


def _of_file(path: pathlib.Path) -> tuple[MakeFn, str]:
  """Returns the function of a file and its advantages."""
  if not path.is_file():
    choices = f"a Python file with `objective(*, factor, length)`, MODULE:FUNCTION or one of {', '.join(protocol.OBJECTIVES)}"
    raise ValueError(f"--enter: found no file {path}, expected {choices}{did_you_mean(str(path), protocol.OBJECTIVES)}")
  spec = importlib.util.spec_from_file_location(f"entry_{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except Exception as error:  # A user's file may raise anything.
    raise ValueError(f"--enter: importing {path} raised {one_line(error)}") from error
  make = getattr(module, "objective", None)
  if not callable(make) or set(inspect.signature(make).parameters) != {"factor", "length"}:
    raise ValueError(f"{path}: found no `objective(*, factor, length)`, expected a function that returns an objective")
  advantages = getattr(module, "ADVANTAGES", "group")
  if advantages not in ADVANTAGES:
    hint = did_you_mean(advantages, ADVANTAGES, " (did you mean '{}'?)")
    raise ValueError(f"{path}: ADVANTAGES: found {advantages!r}{hint}, expected one of {', '.join(ADVANTAGES)}")
  of_file = lambda factor, length: import_path.make(functools.partial(make, factor=factor, length=length), {}, Objective, where=str(path))
  return of_file, advantages


def _of_import_path(text: str, scaled: Sequence[str]) -> MakeFn:
  """Returns the function at an import path with its settings, of which the tuning scales some."""
  name, settings = parse_term(text)
  with _about("--enter"):
    own = objectives.factory(name)
  known = settings_of(own, getattr(own, "rules", {}))
  values = {key: setting.default for key, setting in known.items()} | settings
  for key in scaled:
    if key not in known:
      raise ValueError(Problem("--scaled", repr(key), f"settings of objective {name}: {', '.join(known)}{did_you_mean(key, known)}"))
    if known[key].check.type is not float or not holds(known[key].check, values[key]):
      raise ValueError(Problem(f"--scaled.{key}", shown(values[key]), "a number that the tuning can multiply"))
  for _, factor in protocol.draws():
    _check_settings("--enter", settings | {key: values[key] * factor for key in scaled}, known, f"objective {name}")

  def make(*, factor: float, length: int) -> Objective:
    del length
    return objectives.make(name, **settings | {key: values[key] * factor for key in scaled})

  return make


def _check_estimator(text: str) -> None:
  """Raises a ValueError if an estimator cannot be made, or reads what the bed does not have."""
  name, settings = parse_term(text)
  with _about("--estimator"):
    known = settings_of(estimators.factory(name), estimators.RULES if name in estimators.ESTIMATORS else {})
  _check_settings("--estimator", settings, known, f"estimator {name}")
  with _about("--estimator"):
    needs = estimators.make(name, **settings).needs
  if needs:
    lacks = f"an estimator without need of {', '.join(sorted(needs))}, which the bed does not have"
    raise ValueError(Problem("--estimator", repr(text), lacks))


def _check_settings(flag: str, settings: Mapping[str, Any], known: Mapping[str, Setting], entry: str) -> None:
  """Raises a ValueError if an entry does not have a setting, or not with this value."""
  for key, value in settings.items():
    if key not in known:
      raise ValueError(unread(key, value, known, entry).with_prefix(flag))
    if not holds(known[key].check, value):
      raise ValueError(Problem(f"{flag}.{key}", shown(value), known[key].check.words))


@contextlib.contextmanager
def _about(flag: str) -> Iterator[None]:
  """Puts the flag in front of a ValueError's message."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{flag}: {error}") from error


def _code(*texts: str | None) -> str:
  """Returns the hash of the files that define an entry; what the package defines has none."""
  names = [text if text.endswith(".py") else parse_term(text)[0] for text in texts if text]
  modules = [sys.modules[name.partition(":")[0]] for name in names if ":" in name]
  paths = [*(name for name in names if name.endswith(".py")), *(module.__file__ for module in modules)]
  return hash_of(b"".join(pathlib.Path(path).read_bytes() for path in paths))[:12]
