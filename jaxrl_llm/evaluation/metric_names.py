"""Metric names in lighteval's notation: `avg@n:n=64`, `pass@k:k=1&n=16`, `maj@n:n=8`."""

from typing import NamedTuple

from jaxrl_llm.messages import Problem, did_you_mean

PARAMETERS: dict[str, tuple[str, ...]] = {"avg@n": ("n",), "pass@k": ("k", "n"), "maj@n": ("n",)}
"""Parameters of each metric, in the order in which its name lists them."""


class MetricName(NamedTuple):
  """A metric of repeated samples.

  Attributes:
    kind: Key of `PARAMETERS`.
    n: Number of samples per problem.
    k: Number of those samples that may be tried; None for all metrics but `pass@k`.
  """

  kind: str
  n: int
  k: int | None = None

  def __str__(self) -> str:
    values = {"k": self.k, "n": self.n}
    return f"{self.kind}:" + "&".join(f"{name}={values[name]}" for name in PARAMETERS[self.kind])


def parse_metric(text: str) -> MetricName:
  """Parses the name of a metric with all of its parameters.

  Raises:
    ValueError: If the metric does not exist or its parameters are wrong. One line, with the fix.

  Example:
    >>> parse_metric("pass@k:k=1&n=16")
    MetricName(kind='pass@k', n=16, k=1)
    >>> str(parse_metric("avg@n:n=64"))
    'avg@n:n=64'
  """
  kind, _, rest = text.partition(":")
  if kind not in PARAMETERS:
    hint = did_you_mean(kind, PARAMETERS, cutoff=0.5)
    raise ValueError(Problem("metric", repr(text), f"one of {', '.join(PARAMETERS)} with its parameters, such as 'avg@n:n=64'{hint}"))
  pairs = [part.partition("=") for part in rest.split("&")] if rest else []
  values = {name: int(value) for name, _, value in pairs if value.isdecimal() and int(value) > 0}
  if sorted(values) != sorted(PARAMETERS[kind]) or len(pairs) != len(values):
    wanted = "&".join(f"{name}=8" if name == "n" else f"{name}=1" for name in PARAMETERS[kind])
    raise ValueError(Problem("metric", repr(text), f"whole numbers above 0 for its parameters, such as '{kind}:{wanted}'"))
  if values.get("k", 1) > values["n"]:
    raise ValueError(Problem("metric", repr(text), "k <= n: of n samples no more than n can be tried"))
  return MetricName(kind, **values)
