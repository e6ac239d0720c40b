"""The page of verdicts is what its tables give."""

import pytest

from jaxrl_llm.rewards import verdicts
from tests.runs import ROOT

PAGE = ROOT / "docs" / "verdicts.md"


def test_the_page_holds_the_tables():
  pytest.importorskip("math_verify")
  page = PAGE.read_text(encoding="utf-8")
  assert verdicts.page_with_tables(page) == page, "python -m jaxrl_llm.rewards.verdicts docs/verdicts.md"


def test_every_number_is_a_verdict_of_its_reward():
  rows = verdicts.tables().split("\n## Numbers")[0].splitlines()
  numbers = [cell for row in rows for cell in row.split(" | ")]
  assert {"0", "1"} <= set(numbers) and not {"nan", "-1"} & set(numbers)
