"""Measures of routes and log-probabilities, and summaries of rows by seed."""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import routing


def overlaps(a: np.ndarray, b: np.ndarray, segments: np.ndarray) -> np.ndarray:
  """Computes |A ∩ B| / K for the tokens that are recorded in both routings.

  Only tokens whose routes affect a later token count.

  Args:
    a: First routing A, [B, T, L, K].
    b: Second routing B, [B, T, L, K].
    segments: Segment of each token, [B, T]; 0 is padding.

  Returns:
    The overlaps, [tokens, L].
  """
  a, b, segments = (jnp.asarray(x) for x in (a, b, segments))
  both = jnp.all(routing.recorded(a) & routing.recorded(b), axis=-1) & (routing.travelled(segments) > 0)
  return np.asarray(routing.overlap(a, b))[np.asarray(both)]


def change_by_layer(a: np.ndarray, b: np.ndarray, segments: np.ndarray) -> list[float]:
  """Averages 1 − |A ∩ B| / K over the tokens of `overlaps`, for each layer."""
  return np.mean(1 - overlaps(a, b, segments), axis=0).tolist()


def tokens_changed(a: np.ndarray, b: np.ndarray, segments: np.ndarray) -> float:
  """Returns the fraction of the tokens of `overlaps` whose experts differ in at least one layer."""
  return float(np.mean(np.any(overlaps(a, b, segments) < 1, axis=-1)))


def smallest_overlap(a: np.ndarray, b: np.ndarray, segments: np.ndarray) -> float:
  """Returns the smallest |A ∩ B| / K over the tokens of `overlaps` and their layers.

  It is 1 if the routings agree wherever they affect a later token.
  """
  return float(np.min(overlaps(a, b, segments)))


def mismatch(logprobs: np.ndarray, sampled: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Measures the mismatch between a policy π and the sampler μ on tokens that μ drew.

  Args:
    logprobs: Log π of the tokens, [B, T].
    sampled: Log μ of the tokens, [B, T].
    mask: Mask of the drawn tokens, [B, T].

  Returns:
    `k3`, the mean of k − 1 − log k with k = π/μ, whose expectation is KL(μ‖π); `f2`, the fraction
    of the tokens with max(k, 1/k) > 2; `gap`, the largest |log k|.

  References:
    Stabilizing MoE reinforcement learning by aligning training and inference routers (R3),
    arXiv:2510.11370, 2025.
  """
  log_k = (np.asarray(logprobs, np.float64) - sampled)[np.asarray(mask) > 0]
  k3 = np.mean(np.expm1(log_k) - log_k)
  return {"k3": float(k3), "f2": float(np.mean(np.abs(log_k) > np.log(2))), "gap": float(np.max(np.abs(log_k)))}


def ratio_spread(log_ratio: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Measures the spread of importance ratios r = π/π_old.

  Args:
    log_ratio: Log r of the tokens, [B, T].
    mask: Mask of the tokens that count, [B, T]. Each row has at least one.

  Returns:
    `std_log_r`, the standard deviation of log r over the tokens; `std_log_s`, that of the log of
    the length-normalised ratios s over the sequences; `max_r`, the largest r; `f2`, the fraction of
    the tokens with max(r, 1/r) > 2.
  """
  mask = np.asarray(mask) > 0
  rows = np.where(mask, np.asarray(log_ratio, np.float64), 0)
  tokens, log_s = rows[mask], rows.sum(axis=1) / mask.sum(axis=1)
  return {
    "std_log_r": float(np.std(tokens)),
    "std_log_s": float(np.std(log_s)),
    "max_r": float(np.exp(np.max(tokens))),
    "f2": float(np.mean(np.abs(tokens) > np.log(2))),
  }


def where(rows: Sequence[Mapping], **values) -> list[Mapping]:
  """Selects the rows with the given values.

  Example:
    >>> where([{"a": 1, "b": 2}, {"a": 2, "b": 2}], a=2)
    [{'a': 2, 'b': 2}]
  """
  return [row for row in rows if all(row[name] == value for name, value in values.items())]


def per_seed(rows: Sequence[Mapping], read: Callable[[Sequence[Mapping]], float]) -> list[float]:
  """Reads a number from the rows of each seed, in the order of the seeds."""
  return [read(where(rows, seed=seed)) for seed in sorted({row["seed"] for row in rows})]


def mean_of(name: str) -> Callable[[Sequence[Mapping]], float]:
  """Makes a function that reads the mean of a column."""
  return lambda rows: float(np.mean([row[name] for row in rows]))


def line(rows: Sequence[Mapping], x: str, y: str, *, of: Callable[[float], float]) -> list[float]:
  """Fits the slope of the mean of y against a function of x, for each seed.

  Args:
    rows: Rows with columns `seed`, x and y.
    x: Name of the column x.
    y: Name of the column y.
    of: Function to apply to x.
  """

  def slope(rows: Sequence[Mapping]) -> float:
    places = sorted({row[x] for row in rows})
    return float(np.polyfit([of(place) for place in places], [mean_of(y)(where(rows, **{x: place})) for place in places], 1)[0])

  return per_seed(rows, slope)


def log_quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
  """Returns log(above / below) for each seed.

  Args:
    above: Numerator of each seed.
    below: Denominator of each seed, in the same order. Values below 1e-12 count as 1e-12 in both.
  """
  return [float(np.log(max(a, 1e-12) / max(b, 1e-12))) for a, b in zip(above, below, strict=True)]
