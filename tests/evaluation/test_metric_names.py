"""Metric names in lighteval's notation."""

import pytest

from jaxrl_llm.evaluation import MetricName, parse_metric


@pytest.mark.parametrize("text, expected", [
  ("avg@n:n=64", MetricName("avg@n", 64)), ("pass@k:k=1&n=16", MetricName("pass@k", 16, 1)), ("maj@n:n=8", MetricName("maj@n", 8)),
])  # fmt: skip
def test_names_round_trip(text, expected):
  assert parse_metric(text) == expected and str(expected) == text
  assert parse_metric("pass@k:n=16&k=1") == MetricName("pass@k", 16, 1)


@pytest.mark.parametrize("text, message", [
  ("", "expected one of avg@n, pass@k, maj@n"), ("avg@8", "did you mean 'avg@n'"), ("pass@1", "did you mean 'pass@k'"),
  ("avg@n", "such as 'avg@n:n=8'"), ("avg@n:", "such as 'avg@n:n=8'"), ("avg@n:n=0", "whole numbers above 0"),
  ("avg@n:n=-1", "whole numbers"), ("avg@n:n=1.5", "whole numbers"), ("avg@n:k=1", "such as 'avg@n:n=8'"), ("avg@n:n=1&n=2", "such as"),
  ("pass@k:n=8", "such as 'pass@k:k=1&n=8'"),
  ("pass@k:k=1&n=8&m=2", "such as"), ("pass@k:k=9&n=8", "expected k <= n"), ("maj@n:n=8&", "such as"),
])  # fmt: skip
def test_a_wrong_name_is_refused_in_one_line(text, message):
  with pytest.raises(ValueError, match=message) as caught:
    parse_metric(text)
  assert "\n" not in str(caught.value)
