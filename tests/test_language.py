"""A mirror of the house's language: departures that a pattern can see do not become more."""

from collections import Counter

import pytest

from tests import language

FALSE_ALARMS = {
  ("experiments/claims/README.md", "width"): 1,  # A line of numbers that is computed.
  ("experiments/notebooks/pages.py", "width"): 1,  # A style sheet.
  ("experiments/real_model/README.md", "width"): 1,  # A command.
  ("jaxrl_llm/messages.py", "name"): 1,  # The word of the house's messages: found X, expected Y.
  ("tests/experiments/launch/test_xpk.py", "width"): 1,  # A value under test.
  ("tests/experiments/test_compile_for_pod.py", "width"): 5,  # Text of a compiled program.
  ("tests/run/test_disk_full.py", "width"): 2,  # A program as text.
  ("tests/run/test_multihost.py", "width"): 2,  # A program as text.
  ("tests/test_language.py", "riddle"): 2,  # Values under test.
}
"""Departures by file and rule that are none."""


def write(folder, name, text):
  path = folder / name
  path.write_text(text, encoding="utf-8")
  return [(remark.rule, remark.line) for remark in language.remarks(path)]


def test_nothing_departs_from_the_rules():
  counts = Counter()
  for path in language.files([language.ROOT / place for place in language.PLACES]):
    for remark in language.remarks(path):
      counts[path.relative_to(language.ROOT).as_posix(), remark.rule] += 1
  risen = {key: count for key, count in counts.items() if count > FALSE_ALARMS.get(key, 0)}
  assert not risen, f"`python tests/language.py PATH` shows the lines: {risen}"


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ('def f(a):\n  """Does it.\n\n  Args:\n    a: of the batch.\n  """\n', [("entry", 5)]),
    ('def f(a):\n  """Does it.\n\n  Args:\n    a: Likewise.\n  """\n', [("entry", 5), ("riddle", 5)]),
    ('def f(a):\n  """Does it.\n\n  Args:\n    a: Size of the batch.\n  """\n', []),
    ('def f():\n  """The size of the batch."""\n', [("verb", 2)]),
    ('def test_f():\n  """The size of the batch."""\n', []),
    ("def f(this):\n  found = this\n  return found\n", [("name", 1), ("name", 2)]),
    ("# None where nobody computed it.\n", [("riddle", 1)]),
    (f"# {'a word ' * 15}\n", [("width", 1)]),
    (f"x = 1  # {'a' * 100}\n", []),  # No place to break.
  ],
)
def test_departures_in_python_are_seen(text, expected, tmp_path):
  assert write(tmp_path, "a.py", text) == expected


def test_departures_in_guides_are_seen(tmp_path):
  long = "a word " * 16
  text = f"{long}\n```\n{long}\n```\n| {long} |\n- {long}\n\nAnybody.\n"
  assert write(tmp_path, "a.md", text) == [("width", 1), ("width", 6), ("riddle", 8)]
