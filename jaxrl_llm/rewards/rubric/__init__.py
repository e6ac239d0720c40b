"""Rewards from a judge: a language model behind an HTTP endpoint that grades by a rubric.

A rubric is a file with criteria, their weights, and the endpoint; see `file`. Standard library
only, but for the YAML of a rubric.
"""

from jaxrl_llm.rewards.rubric.file import Criterion, Rubric, read_rubric, rubric_problems
from jaxrl_llm.rewards.rubric.judge import CAUSES, Judge
from jaxrl_llm.rewards.rubric.store import Judgements
from jaxrl_llm.rewards.rubric.term import judge_terms, path_of

__all__ = ["CAUSES", "Criterion", "Judge", "Judgements", "Rubric", "judge_terms", "path_of", "read_rubric", "rubric_problems"]
