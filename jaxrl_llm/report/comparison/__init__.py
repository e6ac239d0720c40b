"""The comparison of runs: `python -m jaxrl_llm.report runs/a runs/b ...`, or the folder of a sweep.

Runs whose configs differ only in their seed form one arm, which is shown as a mean with its 95 %
interval over seeds. Like the page of one run, the page is a single file that opens without a
network.
"""

from jaxrl_llm.report.comparison.page import EmptyComparisonError, load_arms, page_data, write_comparison

__all__ = ["EmptyComparisonError", "load_arms", "page_data", "write_comparison"]
