"""Settings of the entries that a config names: what its open sections may hold.

The signature of an objective, an estimator, a task says which settings it has, with their types and
defaults. Its room has rules for their ranges, and its docstring the meaning of each.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jaxrl_llm.config import alarms, renamed
from jaxrl_llm.config.fields import FIELDS, OPEN, Field, describe_fields, flatten, is_open, open_sections, table_of
from jaxrl_llm.messages import Problem, problem_of, shown
from jaxrl_llm.settings.signature import Setting, settings_of, unread
from jaxrl_llm.settings.values import ABOVE_ZERO, COUNT, LINES, OPTIONS, holds, one_of

Values = Mapping[str, Any]
"""Values of a config by path."""


OF_CONVERSATIONS = ("max_turns", "max_turn_tokens", "timeout_s")
"""Settings of `config.environment` that all environments have; `Rules` takes them."""


def _of_objective(values: Values) -> dict[str, Setting]:
  from jaxrl_llm.objectives import factory

  make = factory(values["objective.name"])
  return settings_of(make, getattr(make, "rules", {}))


def _of_estimator(values: Values) -> dict[str, Setting]:
  from jaxrl_llm.advantages.estimators import ESTIMATORS, RULES, factory

  name = values["advantage.estimator"]
  return settings_of(factory(name), RULES if name in ESTIMATORS else {})


def _of_corrections(values: Values) -> dict[str, Setting]:
  return renamed.CORRECTIONS


def _of_task(values: Values) -> dict[str, Setting]:
  from jaxrl_llm import tasks
  from jaxrl_llm.config.check import OF_TOKENIZERS
  from jaxrl_llm.pretrained.tokenizer import load_tokenizer

  of_tokenizer = settings_of(load_tokenizer, {"chat_options": OPTIONS, "special_tokens": one_of("text", "tokens"), "system": LINES})
  own = settings_of(tasks.factory(values["task.name"]), tasks.RULES)
  return own | {name: of_tokenizer[name] for name in OF_TOKENIZERS}


def _of_environment(values: Values) -> dict[str, Setting]:
  if values["environment.name"] is None:
    return {}
  from jaxrl_llm.rollouts import environments
  from jaxrl_llm.rollouts.rules import Rules

  of_rules = settings_of(Rules, {"max_turns": COUNT, "max_turn_tokens": COUNT, "timeout_s": ABOVE_ZERO})
  return {name: of_rules[name] for name in OF_CONVERSATIONS} | environments.settings_of(values["environment.name"])


def _of_sandbox(values: Values) -> dict[str, Setting]:
  from jaxrl_llm.rewards.sandbox.grades import settings_of_backend

  return settings_of_backend(values["sandbox.backend"])


def _of_alarms(values: Values) -> dict[str, Setting]:
  return settings_of(alarms.AlarmLimits, alarms.RULES)


_SETTINGS: dict[str, Callable[[Values], dict[str, Setting]]] = {
  "objective": _of_objective,
  "advantage": _of_estimator,
  "correction": _of_corrections,
  "task": _of_task,
  "environment": _of_environment,
  "sandbox": _of_sandbox,
  "alarms": _of_alarms,
}


def settings(section: str, config: Values | ConfigDict) -> dict[str, Setting]:
  """Returns the settings of the entry that an open section names.

  Args:
    section: Key of `fields.OPEN`.
    config: Config, by section or by path; missing fields have their defaults.

  Raises:
    ValueError: If there is no such entry. One line.

  Example:
    >>> list(settings("advantage", {"advantage.estimator": "pass_at_k"}))
    ['pass_k', 'normalize_std']
  """
  return _SETTINGS[section]({path: field.default for path, field in FIELDS.items()} | flatten(config))


def values_of(section: str, config: Values | ConfigDict) -> dict[str, Any]:
  """Returns the settings of the entry that a section names, as the config has them or by default.

  Example:
    >>> values_of("advantage", {"advantage": {"estimator": "pass_at_k", "pass_k": 4}})
    {'pass_k': 4, 'normalize_std': True}
  """
  values, known = flatten(config), settings(section, config)
  pick = lambda x, default: default if x is None else x
  return {name: pick(values.get(f"{section}.{name}"), x.default) for name, x in known.items()}


def paths(config: ConfigDict) -> list[str]:
  """Returns the paths of all settings that the open sections of a config may have."""
  known = []
  for section in open_sections(table_of(config)):
    with contextlib.suppress(ImportError, ValueError):  # The checks report what does not exist.
      known += [f"{section}.{name}" for name in settings(section, config)]
  return known


def entry(section: str, config: Values | ConfigDict) -> str:
  """Returns an entry's name for messages, as in `objective gspo`."""
  noun = OPEN[section] if OPEN[section] in ("estimator", "backend") else section
  return f"{noun} {flatten(config).get(f'{section}.{OPEN[section]}', '')}".rstrip()


def problems(config: ConfigDict) -> Iterator[Problem | str]:
  """Yields what is wrong with the settings of the open sections, each by itself.

  An entry that does not exist is a problem here only if it has settings.
  """
  values = flatten(config)
  for section in OPEN:
    given = [path for path in values if path.startswith(f"{section}.") and is_open(path)]
    try:
      known = settings(section, values) if given else {}
    except (ImportError, ValueError) as error:
      problem = problem_of(error)
      yield problem.with_prefix("config") if isinstance(problem, Problem) else f"config.{section}: {problem}"
      continue
    for path in given:
      name, value = path.partition(".")[2], values[path]
      if name not in known:
        yield from [] if value is None else [unread(f"config.{path}", value, known, entry(section, values))]
      elif not (value is None and (OPEN[section] or known[name].check.optional)) and not holds(known[name].check, value):
        yield Problem(f"config.{path}", shown(value), known[name].check.words)


def admit(config: ConfigDict, path: str, text: str) -> str:
  """Makes room in a config for a setting of an open section, with the type of the setting.

  Args:
    config: Config to change in place.
    path: Path of the setting.
    text: Value that the user wrote, for the message.

  Returns:
    Legal values of the setting, in words.

  Raises:
    ValueError: If the entry does not have the setting, or there is no such entry. One line.
  """
  section, _, name = path.partition(".")
  known, own = settings(section, config), config[section]
  if name not in known:
    raise ValueError(unread(path, text, known, entry(section, config)))
  kind, value = known[name].check.type, own.get(name)
  if name not in own or own.get_type(name) is not kind:
    drop(config, path)
    value = float(value) if kind is float and isinstance(value, int) else value
    own[name] = FieldReference(value if isinstance(value, kind) else None, field_type=kind)
  return known[name].check.words


def drop(config: ConfigDict, path: str) -> None:
  """Removes a setting of an open section, if it is there: it has its default again."""
  section, _, name = path.partition(".")
  if name in config[section]:
    del config[section][name]


def describe(prefix: str, config: ConfigDict) -> str:
  """Describes the fields of a config with a prefix, and the settings of the entries that it names.

  Without a prefix, an unnamed objective and all other entries are left out: no jax is imported.

  Raises:
    ValueError: If no field has the prefix. One line.
  """
  table, rows, start = table_of(config), {}, prefix.removeprefix("config.")
  for section in open_sections(table):
    if not (start or config.objective.name) or not f"{section}.".startswith(start[: len(section) + 1]):
      continue
    with contextlib.suppress(ImportError, ValueError):  # No entry is named, or none of the name is.
      rows |= {path: _row(x, entry(section, config)) for path, x in _described(section, config).items()}
  return describe_fields(prefix, {**table, **rows})


def _described(section: str, config: ConfigDict) -> dict[str, Setting]:
  if section != "correction":
    return {f"{section}.{name}": x for name, x in settings(section, config).items()}
  from jaxrl_llm.objectives.corrected import CORRECTIONS, parse_term, settings_by_name

  names = dict.fromkeys((*CORRECTIONS, *(parse_term(text)[0] for text in config.correction.terms)))
  return {f"correction.terms {name}:{key}": x for name in names for key, x in settings_by_name(name).items()}


def _row(setting: Setting, entry: str) -> Field:
  return Field(setting.default, setting.check, setting.sentence or f"A setting of {entry}.")
