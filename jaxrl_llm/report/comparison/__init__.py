"""Runs side by side: `python -m jaxrl_llm.report runs/a runs/b ...`, or the folder of a sweep.

Runs whose configs differ in their seed only are one arm, shown as a mean with its 95 % interval over seeds. The page is made like that of
one run: a single file that opens without a network.
"""

from jaxrl_llm.report.comparison.comparing import EmptyComparisonError, load, page_data, write_comparison

__all__ = ["EmptyComparisonError", "load", "page_data", "write_comparison"]
