"""A curriculum by measured pass rates, which favours problems that the policy sometimes gets right.

Pass rates are kept per problem, or per level or any other column. A group of G samples of a problem
with pass rate p has both right and wrong samples, and so something to learn from, with probability
1 - p^G - (1 - p)^G. That probability is the problem's weight.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.tasks.files.storage import Row


class PassRates(NamedTuple):
  """Pass rates measured so far. Each `observe` returns a new instance.

  Attributes:
    passed: Number of right samples by key; older ones count less.
    tried: Number of all samples by key; older ones count less.
  """

  passed: Mapping[str, float] = {}
  tried: Mapping[str, float] = {}


def observe(rates: PassRates, keys: Sequence[str], passed: Sequence[float], *, memory: float = 0.7) -> PassRates:
  """Adds the outcomes of some samples.

  Args:
    rates: Pass rates measured so far.
    keys: Key of each sample's problem.
    passed: Outcome of each sample: 1 if right, else 0; NaN if it could not be judged, in which case
      it does not count as tried.
    memory: Factor on the earlier counts of a key when new samples of it arrive, since the policy
      has changed in the meantime.

  Raises:
    ValueError: If the lengths differ or an outcome is outside [0, 1].

  Example:
    >>> rates = observe(PassRates(), ["a", "a", "b"], [1, 0, 1])
    >>> rates.passed, rates.tried
    ({'a': 1.0, 'b': 1.0}, {'a': 2.0, 'b': 1.0})
  """
  if len(keys) != len(passed):
    raise ValueError(f"found {len(keys)} keys and {len(passed)} outcomes, expected one outcome per key")
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
  """Returns the estimated rate: (passed + prior · prior_samples) / (tried + prior_samples).

  Example:
    >>> pass_rate(PassRates({"a": 3.0}, {"a": 3.0}), "a"), pass_rate(PassRates(), "a")
    (0.875, 0.5)
  """
  return (rates.passed.get(key, 0.0) + prior * prior_samples) / (rates.tried.get(key, 0.0) + prior_samples)


def signal(rate: float, *, group_size: int) -> float:
  """Returns the probability that a group has right and wrong samples: 1 - p^G - (1 - p)^G.

  Example:
    >>> signal(0.5, group_size=2), signal(1.0, group_size=8)
    (0.5, 0.0)
  """
  return 1.0 - rate**group_size - (1.0 - rate) ** group_size


def key_of(row: Row, by: str) -> str:
  """Returns the key under which a row's outcomes are counted.

  Args:
    row: Row of a task.
    by: "problem", or the name of a column such as "level" or "task".

  Raises:
    ValueError: If the row has no such column.
  """
  if by != "problem":
    if by not in row:
      raise ValueError(f"task.curriculum: found {by!r}, expected 'problem' or a column of the rows: {', '.join(sorted(row))}")
    return str(row[by])
  return row.get("id") or hashlib.blake2b(row["question"].encode(), digest_size=8).hexdigest()


class CurriculumStream:
  """An endless stream of batches, sampled by measured pass rates.

  It is otherwise used like `pipeline.example_iterator`. No problem occurs twice in a batch. A draw
  depends only on the seed, the batch number and the rates, not on the number of processes or on
  earlier draws.

  Args:
    source: Rows with random access; read once, for their keys.
    batch_size: Rows per batch, at most the number of rows in `source`.
    seed: Seed of the draws.
    by: "problem" or the name of a column, as in `key_of`.
    group_size: Samples per problem.
    floor: Minimum weight of a key, so that every problem can be drawn again.

  Raises:
    ValueError: If `batch_size` is below 1 or above the number of rows.
  """

  def __init__(self, source: Sequence[Row], *, batch_size: int, seed: int, by: str = "problem", group_size: int = 8, floor: float = 0.05):
    if not 1 <= batch_size <= len(source):
      raise ValueError(f"found batches of {batch_size} from {len(source)} rows, expected at least 1 and at most all")
    self._source, self._batch_size, self._seed = source, batch_size, seed
    self._by, self._group_size, self._floor = by, group_size, floor
    keys: dict[str, str] = {}
    # Several problems may have one question, and prompts that differ in another column.
    self._shared = {key for row in source if keys.setdefault(key := key_of(row, by), row.get("prompt", "")) != row.get("prompt", "")}
    self._shared = self._shared if by == "problem" else set()
    names = [self._key(row) for row in source]
    self._names, self._keys, counts = np.unique(names, return_inverse=True, return_counts=True)
    # A row's share of its key's weight; otherwise large levels would weigh more.
    self._share = 1.0 / counts
    self._step, self.rates = 0, PassRates()

  def _key(self, row: Row) -> str:
    key = key_of(row, self._by)
    return key if key not in self._shared else hashlib.blake2b(f"{key}\0{row['prompt']}".encode(), digest_size=8).hexdigest()

  def __iter__(self) -> "CurriculumStream":
    return self

  def __next__(self) -> list[Row]:
    weights = self.weights()[self._keys]
    uniform = np.random.default_rng([self._seed, self._step]).random(len(weights))
    # The largest log(u) / w are a weighted sample without replacement.
    order = np.argsort(-np.log(np.maximum(uniform, 1e-300)) / weights, kind="stable")
    self._step += 1
    return [dict(self._source[int(i)]) for i in order[: self._batch_size]]

  def weights(self) -> np.ndarray:
    """Returns the weight of one row of each key, in the order of the sorted keys."""
    signals = [signal(pass_rate(self.rates, str(name)), group_size=self._group_size) for name in self._names]
    return np.maximum(signals, self._floor) * self._share

  def observe(self, rows: Sequence[Row], passed: Sequence[float]) -> None:
    """Adds each sample's row and outcome to the rates; see the function `observe`."""
    self.rates = observe(self.rates, list(map(self._key, rows)), passed)

  def get_state(self) -> dict[str, Any]:
    """Returns the position and the rates as a JSON-serialisable dict."""
    return {"step": self._step, "passed": dict(self.rates.passed), "tried": dict(self.rates.tried)}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Resumes from the state of a stream that was made with the same arguments."""
    self._step, self.rates = int(state["step"]), PassRates(dict(state["passed"]), dict(state["tried"]))
