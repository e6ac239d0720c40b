"""Probes of a reward: what prepared responses to a task's problems earn, and what looks broken.

No model is needed: the right answer is known, and so are many wrong ones.
"""

from jaxrl_llm.rewards.probes.findings import findings, most, table_lines
from jaxrl_llm.rewards.probes.table import GradeFn, Table, measure
from jaxrl_llm.rewards.probes.texts import FORMS, Probe, probes, shown_forms, some_problems, variants

__all__ = [
  "FORMS", "GradeFn", "Probe", "Table", "findings", "measure", "most", "probes", "shown_forms",
  "some_problems", "table_lines", "variants",
]  # fmt: skip
