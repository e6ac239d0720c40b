"""Settings as a signature, a docstring and rules describe them."""

import functools
import os
from collections.abc import Mapping, Sequence

import pytest

from jaxrl_llm.advantages.estimators import ESTIMATORS
from jaxrl_llm.advantages.estimators import factory as estimator
from jaxrl_llm.config.fields import FIELDS
from jaxrl_llm.objectives import OBJECTIVES
from jaxrl_llm.objectives.corrected import CORRECTIONS, settings_by_name
from jaxrl_llm.settings.signature import settings_of
from jaxrl_llm.settings.values import COUNT, holds


def entry(
  setup,
  *,
  limit: float,
  number: float | None = 1,
  folder: str | os.PathLike | None = None,
  names: Sequence[str] = (),
  options: Mapping | None = None,
  plain=2,
  count: int = 3,
  **others,
):
  """Makes nothing.

  Args:
    setup: What all entries have.
    limit, number: Bound of
      the entry.

  Returns:
    count: Not an argument.
  """


def test_types_defaults_and_words_come_from_the_signature():
  settings = settings_of(functools.partial(entry, None), {"count": COUNT, "plain": (lambda x: x != 4, "no 4")})
  assert list(settings) == ["limit", "number", "folder", "names", "options", "plain", "count"]
  assert {name: x.check.type for name, x in settings.items()} == {
    "limit": float, "number": float, "folder": str, "names": tuple, "options": tuple, "plain": int, "count": int,
  }  # fmt: skip
  assert [name for name, x in settings.items() if x.is_required] == ["limit"]
  assert [name for name, x in settings.items() if x.check.optional] == ["number", "folder", "options"]
  assert settings["limit"].sentence == settings["number"].sentence == "Bound of the entry." and settings["count"].sentence == ""
  assert (settings["plain"].check.words, settings["count"].check) == ("no 4", COUNT)


@pytest.mark.parametrize(
  ("name", "legal", "illegal"),
  [
    ("limit", (1, 0.5, float("inf")), (True, "1", None)),
    ("folder", ("a",), (1, "a\nb")),
    ("names", (("a",), ()), (["a"], "a")),
    ("plain", (2,), (2.5, False)),
  ],
)
def test_a_value_has_the_type_of_its_setting(name, legal, illegal):
  check = settings_of(entry)[name].check
  assert all(holds(check, x) for x in legal) and not any(holds(check, x) for x in illegal)


def test_every_setting_of_the_package_is_described_and_no_field():
  described = {
    "objective": {name: settings_of(make, make.rules) for name, make in OBJECTIVES.items()},
    "advantage": {name: settings_of(estimator(name)) for name in ESTIMATORS},
    "correction": {name: settings_by_name(name) for name in CORRECTIONS},
  }
  gate_settings = set(described["objective"]["custom"]) - {"ratio", "gate", "anchor", "value_coef", "value_clip"}
  for section, entries in described.items():
    for name, settings in entries.items():
      for key, setting in settings.items():
        assert setting.sentence or (name == "custom" and key in gate_settings), (name, key)
        assert f"{section}.{key}" not in FIELDS, (name, key)
