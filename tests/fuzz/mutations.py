"""Random mistakes in a config, made on the command line or in Python, as a hypothesis strategy.

A mutation is a list of edits. A failing test prints it.
"""

import contextlib
import copy
import pathlib
import string
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import strategies as st
from ml_collections import ConfigDict

from jaxrl_llm import main
from jaxrl_llm.config import command_line
from jaxrl_llm.config import fields as fields_lib
from tests.runs import ROOT

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "common"))

# Values that people and programs write by mistake: all types, with the corner cases of each.
VALUES: tuple[Any, ...] = (
  None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, -(2**63), 10**40, 10**400, 0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 1e308,
  float("nan"), float("inf"), float("-inf"), "", " ", "none", "None", "true", "nan", "1", "1e-4", "auto", "größe", "数学", "\u200b",
  "\x00", "a\nb", "\udc80", "x" * 5000, "(", "[0-9", "{question}", "{", "..", "/", "/dev/null", "~", "a=b", "=", "a=nan", "package:",
  "gym:", "no.such:module", (), (0,), (-1,), (1, 2), (24, 32), (1.5,), (float("nan"),), ("",), ("a",), ("a", 3), (None,), ((1,), (2,)),
  (10**40,), ("(",), [], [8], [8, 16], ["a"], {}, {"a": 1}, b"bytes", 1j, range(3), object,
)  # fmt: skip

TEXTS = (
  "", " ", "None", "none", "nan", "inf", "-inf", "0", "-0", "-1", "1", "2", "7", "64", "1.5", "1e-4", "1e400", "9" * 30, "9" * 5000,
  "0x10", "true", "True", "no", "abc", "größe", "\x00", "a\nb", "\udc80", "()", "(1,)", "(1,2)", "[1,2]", "(1.5,)", "('a',)",
  "('a', 3)", "('',)", "(None,)", "((1,),)", "(", "1,2", "'a'", '"', "\\", "{}", "{'a': 1}", "__import__('os')", "lambda: 1", "1+1",
  "(nan,)", "x" * 5000, "(" * 300, "=", "a=b",
)  # fmt: skip


class Edit(NamedTuple):
  """One mistake.

  Attributes:
    kind: "set" | "drop" | "swap" | "unknown" | "typo" | "scale" | "letter".
    path: Path of the field.
    value: New value; for "swap" the other field, for "typo" and "letter" the place of the change,
      for "scale" the factor.
  """

  kind: str
  path: str
  value: Any = None


def edits(paths: list[str], values: tuple[Any, ...]) -> st.SearchStrategy[list[Edit]]:
  """Makes a strategy of one to four mistakes in some fields, with some values to set."""
  # Not `integers`, into which hypothesis mixes constants of the loaded modules: each process would
  # try other mistakes.
  path, place = st.sampled_from(paths), st.sampled_from(range(31))
  one = st.one_of(
    st.builds(Edit, st.just("set"), path, st.sampled_from(values)),
    st.builds(Edit, st.just("set"), path, st.sampled_from(values)),
    st.builds(Edit, st.just("swap"), path, path),
    st.builds(Edit, st.just("scale"), path, st.sampled_from((-1, 2, 3, 0.5, 1000, 10**9, 0.001))),
    st.builds(Edit, st.just("letter"), path, place),
    st.builds(Edit, st.sampled_from(("typo", "drop", "unknown")), path, place),
  )
  return st.lists(one, min_size=1, max_size=4)


def changed(kind: str, old: Any, value: Any) -> Any:
  """Returns the value that an edit makes of an existing one."""
  if kind == "scale":
    if isinstance(old, tuple):
      return tuple(changed(kind, x, value) for x in old)
    return old * value if isinstance(old, int | float) and not isinstance(old, bool) and isinstance(value, int) else old
  text = str(old)
  at = value % (len(text) + 1)
  return text[:at] + text[at + 1 :] if value % 2 else text[:at] + string.ascii_letters[value] + text[at:]


def written(edit: Edit, fields: dict[str, Any]) -> Any:
  """Returns the value that an edit writes into a field, given the config's values."""
  if edit.kind == "set":
    return edit.value
  return fields[edit.value] if edit.kind == "swap" else changed(edit.kind, fields[edit.path], edit.value)


def in_python(config: ConfigDict, mutation: list[Edit]) -> ConfigDict:
  """Applies a mutation to a copy of a config as a Python program could, without type checks."""
  config = copy.deepcopy(config)
  fields = fields_lib.flatten(config)
  with config.unlocked(), config.ignore_type():
    for edit in mutation:
      *sections, name = edit.path.split(".")
      section = config
      for one in sections:
        section = section.get(one) if isinstance(section, ConfigDict) else None
      if not isinstance(section, ConfigDict) or name not in section:
        continue  # An earlier edit removed the field.
      if edit.kind == "drop":
        del section[name]
      elif edit.kind == "unknown":
        section[f"{name}_{edit.value}"] = edit.value
      elif edit.kind == "typo":
        value = section[name]
        del section[name]
        section[name[: edit.value % len(name)] + "x" + name[edit.value % len(name) :]] = value
      else:
        # ml_collections converts a value that is written to a float field to a float.
        with contextlib.suppress(OverflowError):
          section[name] = written(edit, fields)
  return config


def on_the_command_line(config: ConfigDict, mutation: list[Edit]) -> list[str]:
  """Returns the same mistakes in a config as arguments of a command line."""
  fields = fields_lib.flatten(config)
  args = []
  for edit in mutation:
    path, text = edit.path, str(fields[edit.path])
    if edit.kind == "drop":
      path, text = path.rpartition(".")[0] or path, "None"
    elif edit.kind == "unknown":
      path = f"{path}_{edit.value}"
    elif edit.kind == "typo":
      path = changed("letter", path, edit.value)
    else:
      text = str(written(edit, fields))
    args.append(f"--config.{path}={text}")
  return args


def refusal_in_python(config: ConfigDict, mutation: list[Edit]) -> tuple[ConfigDict, list[str]]:
  """Returns the spoiled config and its problems."""
  spoiled = in_python(config, mutation)
  return spoiled, main.config_problems(spoiled)


def refusal_on_the_command_line(config: ConfigDict, mutation: list[Edit]) -> tuple[ConfigDict | None, list[str]]:
  """Returns the config that the arguments make, or None, and the lines that refuse them."""
  config = copy.deepcopy(config)
  _, overrides, rest = command_line.split(on_the_command_line(config, mutation))
  if rest:
    return None, []  # The mistake made it no override any more; absl refuses it.
  try:
    # absl formats the config as YAML, which takes nearly all of the time.
    with mock.patch.object(ConfigDict, "__str__", lambda self: "{}"):
      config = command_line.override(config, overrides)
  except command_line.UsageError as error:
    return None, str(error).splitlines()
  return config, main.config_problems(config)


def load(name: str, arg: str = "tiny") -> ConfigDict:
  """Loads a config file of the repository."""
  return command_line.load(f"{pathlib.Path(ROOT) / 'configs' / name}.py" + (f":{arg}" if arg else ""))
