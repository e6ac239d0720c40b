"""Versions of the weights that drew the tokens of a rollout batch, and how far they lag."""

import numpy as np
from jaxtyping import Int

from jaxrl_llm.rollouts.batch import written_mask
from jaxrl_llm.types import Rollouts


def of_one_version(rollouts: Rollouts, version: int) -> Rollouts:
  """Notes that one version of the weights drew all tokens of a rollout batch on the host."""
  return rollouts._replace(versions=np.where(written_mask(rollouts), version, -1).astype(np.int32))


def lags(rollouts: Rollouts, step: int) -> Int[np.ndarray, "N R"]:
  """Returns the number of RL steps by which the weights that drew each token lag; 0 for others.

  Args:
    rollouts: Rollouts on the host.
    step: RL step that learns from them, from 0: the version of its weights.

  Raises:
    ValueError: If the version that drew a token is unknown, or newer than the step's.
  """
  written = written_mask(rollouts)
  if rollouts.versions is None:
    raise ValueError("rollouts.versions: found None, expected the version of the weights that drew each token, to compute its lag")
  lag = np.where(written, step - np.asarray(rollouts.versions), 0)
  if np.any(wrong := written & ((rollouts.versions < 0) | (lag < 0))):
    row, slot = np.argwhere(wrong)[0]
    raise ValueError(
      f"rollouts.versions: found {rollouts.versions[row, slot]} at token {slot} of sequence {row}, expected 0 to {step}, the version "
      "of this step's weights"
    )
  return lag.astype(np.int32)


def metrics(rollouts: Rollouts, step: int, *, most: int) -> dict[str, float]:
  """Returns metrics of the lag, over the tokens that the policy wrote, in RL steps.

  `rollout/staleness/tokens/D` counts the tokens with a lag of D, and
  `rollout/staleness/partial_ratio` is the fraction of responses that several versions drew, of
  which the longest spans `max_partial_span` steps (verl's names).

  Args:
    rollouts: Rollouts on the host, with versions.
    step: RL step that learns from them, from 0.
    most: Largest lag that the run allows, up to which each has its count.

  Example:
    >>> ids, written = np.ones((2, 2), np.int32), np.ones((2, 2), bool)
    >>> rollouts = Rollouts(ids, written, ids, written, -1.0 * ids, written[:, 0], versions=np.array([[3, 4], [4, 4]]))
    >>> {name.removeprefix("rollout/staleness/"): x for name, x in metrics(rollouts, 4, most=2).items()}
    {'mean': 0.25, 'max': 1.0, 'min': 0.0, 'partial_ratio': 0.5, 'max_partial_span': 1.0, \
'tokens/0': 3.0, 'tokens/1': 1.0, 'tokens/2': 0.0}
  """
  written, of_tokens = written_mask(rollouts), lags(rollouts, step)
  own = of_tokens[written] if np.any(written) else np.zeros(1, np.int32)
  oldest, newest = np.where(written, of_tokens, 0).max(axis=1), np.where(written, of_tokens, step).min(axis=1)
  spans = np.where(written.any(axis=1), oldest - newest, 0)
  row = {"mean": own.mean(), "max": own.max(), "min": own.min(), "partial_ratio": np.mean(spans > 0), "max_partial_span": spans.max()}
  row |= {f"tokens/{lag}": count for lag, count in enumerate(np.bincount(own, minlength=most + 1))}
  return {f"rollout/staleness/{name}": float(x) for name, x in row.items()}
