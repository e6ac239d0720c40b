"""Statistics of evaluation results: arrays in, numbers out, with no model and no JAX.

Names and definitions follow lighteval.

| metric | value per problem |
| --- | --- |
| `avg@n:n=64` | mean reward of n samples |
| `pass@k:k=1&n=16` | unbiased estimate from n samples of the probability that one of k is right |
| `maj@n:n=8` | whether the most frequent answer among n samples is right |

Each metric is averaged over problems, with a bootstrap interval over problems. `power` says which
differences between two evaluations such intervals can show.
"""

from jaxrl_llm.evaluation.answers import Answer, AnswerFn, answer_reader
from jaxrl_llm.evaluation.intervals import Interval, bootstrap_interval
from jaxrl_llm.evaluation.metric_names import MetricName, parse_metric
from jaxrl_llm.evaluation.power import Spread, problems_needed, smallest_difference, spread_of
from jaxrl_llm.evaluation.repeated import avg_at_n, by_level, maj_at_n, pass_at_k
from jaxrl_llm.evaluation.samples import SampleRow, read_samples, write_samples
from jaxrl_llm.evaluation.summary import Estimate, Summary, estimate, per_problem, short_name, summarise, table, to_json

__all__ = [
  "Answer", "AnswerFn", "Estimate", "Interval", "MetricName", "SampleRow", "Spread", "Summary", "answer_reader", "avg_at_n",
  "bootstrap_interval", "by_level", "estimate", "maj_at_n", "parse_metric", "pass_at_k", "per_problem", "problems_needed", "read_samples",
  "short_name", "smallest_difference", "spread_of", "summarise", "table", "to_json", "write_samples",
]  # fmt: skip
