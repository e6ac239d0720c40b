"""Evaluation on held-out problems: sampling, grading, and one row for each sample."""

from jaxrl_llm.evaluation.held_out.evaluated import Evaluated, check_metrics, eval_metrics, summary
from jaxrl_llm.evaluation.held_out.rows import regrade, regraded_rows, sample_rows
from jaxrl_llm.evaluation.held_out.sampled import DrawFn, choose, evaluate_policy

__all__ = [
  "DrawFn", "Evaluated", "check_metrics", "choose", "eval_metrics", "evaluate_policy", "regrade",
  "regraded_rows", "sample_rows", "summary",
]  # fmt: skip
