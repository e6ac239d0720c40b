"""Trials drawn by random search or TPE, through Optuna; `ask` and `tell` also serve notebooks.

  space = {"learner.learning_rate": hyper.log_uniform(1e-5, 1e-3)}
  search = open_search(Path("runs/search"), space, kind="tpe")
  row = ask(search)  # An id and {"learner.learning_rate": 0.000231}.
  tell(search, row, my_training(row.overrides))  # Larger is better; None for a failure.

The study is the file `study.jsonl` in the folder: another `open_search` continues it.

References:
  Algorithms for hyper-parameter optimization (TPE), NeurIPS 2011; Optuna, arXiv:1907.10902, 2019.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.launch import hyper, local, rows, running, trial
from experiments.launch.rows import Row, SweepError
from experiments.launch.status import FAILED, FINISHED, STOPPED, WAITING, Status
from experiments.launch.trial import Trial
from jaxrl_llm.config import command_line
from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.workdir import claim

_DIGITS = 4  # Significant digits of a drawn number, so that it is short to read and to type.
_DRAWS = 50  # Draws in vain after which a space counts as exhausted.
_LATER = "drawn before, or impossible"


class Search(NamedTuple):
  """Search and its settings.

  Attributes:
    study: Study of Optuna.
    space: Distribution (`hyper.Uniform` or `hyper.Choice`) or fixed value of each field.
    kind: Kind of the search, "random" | "tpe".
    seed: Seed of the draws.
  """

  study: Any
  space: Mapping[str, Any]
  kind: str
  seed: int


def open_search(folder: Path, space: Mapping[str, Any], *, kind: str = "random", seed: int = 0) -> Search:
  """Opens the search of a folder, or begins one.

  Args:
    folder: Folder of `study.jsonl`.
    space: Distribution or fixed value of each field.
    kind: Kind of the search, "random" | "tpe".
    seed: Seed of the draws. The n-th draw depends on it, on n and, for TPE, on the results that it
      was told.

  Raises:
    ImportError: If Optuna is not installed.
    SweepError: If the space has nothing to draw or the kind is unknown.
  """
  optuna = _optuna()
  if kind not in ("random", "tpe"):
    raise SweepError(f"--search: found {kind!r}, expected random or tpe")
  if not isinstance(space, Mapping) or not any(
    isinstance(each, hyper.Uniform | hyper.Choice) for each in space.values()
  ):
    raise SweepError(
      'space: found nothing to draw, expected fields with distributions, as in {"seed": h.choice((0, 1))}'
    )
  folder.mkdir(parents=True, exist_ok=True)
  backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.jsonl"))
  storage = optuna.storages.JournalStorage(backend)
  study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
  return Search(study, {field.removeprefix("config."): value for field, value in space.items()}, kind, seed)


def ask(search: Search) -> Row:
  """Draws a row that was not drawn before.

  Raises:
    SweepError: If the space has no further row, or has changed since the search began.
  """
  optuna = _optuna()
  seen = {one.user_attrs.get("row") for one in search.study.get_trials(deepcopy=False)}
  for _ in range(_DRAWS):
    # The samplers' seeds are below 2**32.
    seed = (search.seed * 1_000_003 + len(search.study.get_trials(deepcopy=False))) % 2**32
    # A new sampler for each draw, so that the n-th draw is the same after a relaunch.
    samplers = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    search.study.sampler = samplers[search.kind](seed=seed)
    try:
      drawn = search.study.ask(_distributions(search.space))
    except ValueError as error:
      raise SweepError(
        f"space: it differs from the space with which this folder's search began ({error}); choose another --folder"
      ) from error
    row = _row(search.space, drawn.params)
    if row.id not in seen:
      drawn.set_user_attr("row", row.id)
      return row
    search.study.tell(drawn, state=optuna.trial.TrialState.FAIL)
  raise SweepError(
    f"space: {_DRAWS} draws in a row were {_LATER}; the space has no more rows than these {len(seen - {None})}"
  )


def tell(search: Search, row: Row, value: float | None) -> None:
  """Tells a search the result of a row; a row that already has a result is ignored.

  Args:
    search: Search that drew the row.
    row: Row from `ask`.
    value: Value of the metric, larger is better; None or a non-finite value for a failure.
  """
  optuna = _optuna()
  for one in search.study.get_trials(deepcopy=False):
    if one.user_attrs.get("row") == row.id and not one.state.is_finished():
      if value is None or not math.isfinite(value):
        search.study.tell(one.number, state=optuna.trial.TrialState.FAIL)
      else:
        search.study.tell(one.number, value)


def asked(search: Search) -> list[tuple[Row, bool]]:
  """Returns all rows drawn so far, in order, and whether the search was told each one's result."""
  drawn_rows = []
  for one in search.study.get_trials(deepcopy=False):
    if "row" in one.user_attrs:
      # The row keeps its id even if the fixed values of the space have changed since.
      drawn_rows.append((_row(search.space, one.params)._replace(id=one.user_attrs["row"]), one.state.is_finished()))
  return drawn_rows


def _optuna() -> Any:
  try:
    import optuna
    import optuna.storages.journal
  except ImportError as error:
    raise ImportError(f'--search needs Optuna: pip install "jaxrl-llm[sweeps]" ({error})') from error
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
  return optuna


def _distributions(space: Mapping[str, Any]) -> dict[str, Any]:
  distributions, optuna_distributions = {}, _optuna().distributions
  for field, each in space.items():
    if isinstance(each, hyper.Choice):
      distributions[field] = optuna_distributions.CategoricalDistribution(
        [rows.value_text(value) for value in each.values]
      )
    elif isinstance(each, hyper.Uniform) and each.whole:
      distributions[field] = optuna_distributions.IntDistribution(int(each.low), int(each.high))
    elif isinstance(each, hyper.Uniform):
      distributions[field] = optuna_distributions.FloatDistribution(each.low, each.high, log=each.log)
  return distributions


def _row(space: Mapping[str, Any], drawn: Mapping[str, Any]) -> Row:
  overrides = {}
  for field, each in space.items():
    value = drawn.get(field, each)
    if isinstance(each, hyper.Choice):
      value = next(one for one in each.values if rows.value_text(one) == value)
    elif isinstance(value, float) and isinstance(each, hyper.Uniform):
      value = float(f"{value:.{_DIGITS}g}")
    overrides[field] = value
  return rows.make_row(overrides)


def read_space(path: str) -> dict[str, Any]:
  """Returns the result of a file's `space(h)`.

  Raises:
    SweepError: If the file or its `space` is missing, raises an exception or returns no dict.
  """
  function = rows.load_file(path).get("space")
  if not callable(function):
    raise SweepError(
      f"--sweep={path}: found no space(h), expected one with --search; see experiments/sweeps/learning_rate.py"
    )
  space = rows.call(path, lambda: function(hyper))
  if not isinstance(space, dict):
    raise SweepError(
      f"--sweep={path}: space returned a {type(space).__name__}, expected a dict of distributions by field"
    )
  return space


def metric_of(workdir: Path, name: str) -> float | None:
  """Returns a number in a finished run's summary.json, or None if there is none.

  The result of a stopped run is None, although its summary has an accuracy as well.

  Raises:
    SweepError: If the summary has no entry of that name.
  """
  if not claim.is_finished(workdir):
    return None
  try:
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None
  is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
  if name not in summary:  # Otherwise the whole search would learn from nothing.
    there = [field for field, value in summary.items() if is_number(value)]
    hint = did_you_mean(name, there, ", did you mean {}?")
    raise SweepError(
      f"--metric: found {name!r}, expected a number of {workdir / 'summary.json'}{hint} "
      f"(there are: {', '.join(there)})"
    )
  return float(summary[name]) if is_number(summary[name]) else None


def launch(request: Any) -> int:
  """Draws and runs trials until there are `num_trials` of them.

  Args:
    request: Request of the user.

  Returns:
    The exit status.

  Raises:
    SweepError: If the space has fields or values that the config does not accept.
  """
  space, sweep = read_space(request.file), request.sweep
  local.check(request.options, request.max_parallel)
  _check_space(request, space)
  if request.dry_run:
    for field, each in space.items():
      print(f"config.{field}: {_in_words(each)}")
    print(
      f"{request.num_trials} trial(s) by {request.search} for the largest {request.metric}, in {sweep.folder}; "
      "nothing was started"
    )
    return 0
  with trial.claimed(sweep):
    trial.record(sweep, [])  # Refuses the folder of another sweep.
    search = open_search(sweep.folder, space, kind=request.search, seed=request.search_seed)
    known = [(trial.make_trial(sweep, row), is_told) for row, is_told in asked(search)]
    trials = [one for one, _ in known]
    _tell_old(request, search, known)
    again = [one for one, is_told in known if not is_told and metric_of(Path(one.workdir), request.metric) is None]
    if trials:
      print(f"{len(trials)} trials were drawn before; {len(again)} of them are not finished and continue")

    def source() -> Iterator[Trial]:
      yield from again
      while len(trials) < request.num_trials:
        try:
          row = _ask_possible(request, search)
        except SweepError as error:
          print(f"note: {error}")
          return
        trials.append(trial.make_trial(sweep, row))
        trial.record(sweep, [one.row for one in trials])
        yield trials[-1]

    def told(one: Trial, at: Status) -> None:
      if at.state in (FINISHED, FAILED):
        tell(search, one.row, metric_of(Path(one.workdir), request.metric) if at.state == FINISHED else None)

    complete = running.work(request, lambda: trials, source(), told=told)
    # A failed trial is a result, from which the search has learned.
    code = running.finish(request, trials, complete=complete, retried=(STOPPED, WAITING))
    _print_best(request, search)
    return code


def _tell_old(request: Any, search: Search, known: list[tuple[Trial, bool]]) -> None:
  """Tells the search about trials that finished while no launcher was running."""
  for one, is_told in known:
    if not is_told and (value := metric_of(Path(one.workdir), request.metric)) is not None:
      tell(search, one.row, value)


def _check_space(request: Any, space: Mapping[str, Any]) -> None:
  """Refuses fields and values that no draw could make valid."""
  ends: dict[str, tuple[Any, ...]] = {}
  for field, each in space.items():
    is_range = isinstance(each, hyper.Uniform)
    number = int if is_range and each.whole else float
    ends[field] = (
      each.values if isinstance(each, hyper.Choice) else (number(each.low), number(each.high)) if is_range else (each,)
    )
  wrong = {}
  for field, values in ends.items():
    for value in values:
      row = rows.make_row({field: value})
      try:
        command_line.override(command_line.load(request.sweep.config), rows.overrides_of(request.sweep.base, row))
      except command_line.UsageError as error:
        wrong |= dict.fromkeys(str(error).splitlines())
  if wrong:
    raise SweepError("\n".join(wrong))


def _ask_possible(request: Any, search: Search) -> Row:
  """Draws rows until the settings of one are valid together; the others are told as failures."""
  line = ""
  for _ in range(_DRAWS):
    row = ask(search)
    try:
      rows.check_rows(request.sweep.config, request.sweep.base, [row])
    except SweepError as error:
      tell(search, row, None)
      line = str(error).splitlines()[0]
      print(f"note: a drawn row was refused, {rows.shown(row.overrides)}: {line}")
      continue
    return row
  raise SweepError(f"space: {_DRAWS} draws in a row were impossible, the last: {line}")


def _print_best(request: Any, search: Search) -> None:
  finished = [one for one in search.study.get_trials(deepcopy=False) if one.value is not None]
  if not finished:
    return print(f"no trial has a {request.metric}")
  best = max(finished, key=lambda one: one.value)
  row = _row(search.space, best.params)
  print(f"best {request.metric}: {best.value:.6g}, {best.user_attrs['row']} ({rows.shown(row.overrides)})")


def _in_words(each: Any) -> str:
  if isinstance(each, hyper.Choice):
    return f"one of {', '.join(map(rows.value_text, each.values))}"
  if isinstance(each, hyper.Uniform):
    return (
      f"{'whole numbers' if each.whole else 'numbers'} from {each.low:g} to {each.high:g}"
      f"{', on a logarithmic scale' if each.log else ''}"
    )
  return f"{each!r}"
