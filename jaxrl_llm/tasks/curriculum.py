"""A curriculum by measured pass rates: what the policy now and then gets right is drawn more often than what it always or never does.

Rates are kept by problem, or by level or any other column. A problem whose rate is p gives a group of G samples something to learn from,
some right and some wrong, with probability 1 - p^G - (1 - p)^G; that is its weight.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.tasks.files.storage import Row


class PassRates(NamedTuple):
  """What has been measured so far; a new one comes of each `observe`.

  Attributes:
    passed: samples that were right, by key, the older the less.
    tried: all samples, likewise.
  """

  passed: Mapping[str, float] = {}
  tried: Mapping[str, float] = {}


def observe(rates: PassRates, keys: Sequence[str], passed: Sequence[float], *, memory: float = 0.7) -> PassRates:
  """Adds the outcomes of some samples.

  Args:
    rates: measured before.
    keys: of each sample's problem.
    passed: 1 for a sample that was right, else 0; NaN for one that could not be judged, which counts as not tried.
    memory: what the samples seen before still count, once more of the same key are seen: the policy has changed since.

  Raises:
    ValueError: unequal lengths, or an outcome outside [0, 1].

  Example:
    >>> rates = observe(PassRates(), ["a", "a", "b"], [1, 0, 1])
    >>> rates.passed, rates.tried
    ({'a': 1.0, 'b': 1.0}, {'a': 2.0, 'b': 1.0})
  """
  if len(keys) != len(passed):
    raise ValueError(f"found {len(keys)} keys and {len(passed)} outcomes, expected as many of each")
  new: dict[str, tuple[float, float]] = {}
  for key, outcome in zip(keys, passed, strict=True):
    if outcome != outcome:
      continue
    if not 0 <= outcome <= 1:
      raise ValueError(f"found the outcome {outcome} for {key!r}, expected a number from 0 to 1")
    right, count = new.get(key, (0.0, 0.0))
    new[key] = right + float(outcome), count + 1.0
  return PassRates(
    {**rates.passed, **{key: memory * rates.passed.get(key, 0.0) + right for key, (right, _) in new.items()}},
    {**rates.tried, **{key: memory * rates.tried.get(key, 0.0) + count for key, (_, count) in new.items()}},
  )


def pass_rate(rates: PassRates, key: str, *, prior: float = 0.5, prior_samples: float = 1.0) -> float:
  """The estimate of a rate: (passed + prior · prior_samples) / (tried + prior_samples).

  Example:
    >>> pass_rate(PassRates({"a": 3.0}, {"a": 3.0}), "a"), pass_rate(PassRates(), "a")
    (0.875, 0.5)
  """
  return (rates.passed.get(key, 0.0) + prior * prior_samples) / (rates.tried.get(key, 0.0) + prior_samples)


def signal(rate: float, *, group_size: int) -> float:
  """The probability that a group is mixed: 1 - p^G - (1 - p)^G.

  Example:
    >>> signal(0.5, group_size=2), signal(1.0, group_size=8)
    (0.5, 0.0)
  """
  return 1.0 - rate**group_size - (1.0 - rate) ** group_size


def key_of(row: Row, by: str) -> str:
  """Under which key a row's outcomes count, by "problem" or by a column such as "level" or "task"; no such column is a ValueError."""
  if by != "problem":
    if by not in row:
      raise ValueError(f"task.curriculum: found {by!r}, expected 'problem' or a column of the rows: {', '.join(sorted(row))}")
    return str(row[by])
  return row.get("id") or hashlib.blake2b(row["question"].encode(), digest_size=8).hexdigest()


class CurriculumStream:
  """An endless stream of batches, drawn by what the policy has shown so far; like `pipeline.example_iterator` otherwise.

  A batch has no problem twice. The draw depends on the seed, the number of the batch and the rates alone, so neither on the number of
  processes nor on what was drawn before.

  Args:
    source: rows, with random access; read once, for their keys.
    batch_size: rows of a batch, at most as many as there are.
    seed: of the draws.
    by: see `key_of`.
    group_size: samples of each problem.
    floor: the least weight, so that nothing is never tried again.

  Raises:
    ValueError: fewer rows than a batch has.
  """

  def __init__(self, source: Sequence[Row], *, batch_size: int, seed: int, by: str = "problem", group_size: int = 8, floor: float = 0.05):
    if not 1 <= batch_size <= len(source):
      raise ValueError(f"found batches of {batch_size} from {len(source)} rows, expected at least 1 and at most all")
    self._source, self._batch_size, self._seed = source, batch_size, seed
    self._by, self._group_size, self._floor = by, group_size, floor
    names = [key_of(row, by) for row in source]
    self._names, self._keys, counts = np.unique(names, return_inverse=True, return_counts=True)
    self._share = 1.0 / counts  # Of a key's weight, for each of its rows: else a level would count by its size.
    self._step, self.rates = 0, PassRates()

  def __iter__(self) -> "CurriculumStream":
    return self

  def __next__(self) -> list[Row]:
    weights = self.weights()[self._keys]
    uniform = np.random.default_rng([self._seed, self._step]).random(len(weights))
    # The largest log(u) / w are a sample without replacement, each in proportion to its weight.
    order = np.argsort(-np.log(np.maximum(uniform, 1e-300)) / weights, kind="stable")
    self._step += 1
    return [dict(self._source[int(i)]) for i in order[: self._batch_size]]

  def weights(self) -> np.ndarray:
    """The weight of one row of each key, in the order of the sorted keys."""
    signals = [signal(pass_rate(self.rates, str(name)), group_size=self._group_size) for name in self._names]
    return np.maximum(signals, self._floor) * self._share

  def observe(self, rows: Sequence[Row], passed: Sequence[float]) -> None:
    """Takes note of each sample's row and outcome; see `observe`."""
    self.rates = observe(self.rates, [key_of(row, self._by) for row in rows], passed)

  def get_state(self) -> dict[str, Any]:
    """The position and the rates, fit for JSON."""
    return {"step": self._step, "passed": dict(self.rates.passed), "tried": dict(self.rates.tried)}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state of a stream that was made with the same arguments."""
    self._step, self.rates = int(state["step"]), PassRates(dict(state["passed"]), dict(state["tried"]))
