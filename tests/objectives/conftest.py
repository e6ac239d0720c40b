"""Small batches whose ratios lie away from clip boundaries."""

import numpy as np
import pytest


@pytest.fixture
def make_batch():
  """Factory of the arguments of `objectives.value`, as float64 NumPy arrays.

  `spread` is the standard deviation of the token log-ratios; `lengths` are the counted tokens of each row.
  """

  def make(seed=0, *, lengths=(5, 3, 1, 6), num_tokens=6, spread=0.4, level="token"):
    rng = np.random.default_rng(seed)
    shape = (len(lengths), num_tokens)
    mask = (np.arange(num_tokens) < np.asarray(lengths)[:, None]).astype(float)
    old_logprobs = -rng.uniform(0.5, 3, shape)
    logprobs = old_logprobs + spread * rng.standard_normal(shape)
    advantages = rng.standard_normal(len(lengths))
    if level == "token":
      advantages = rng.standard_normal(shape)
    values = rng.standard_normal(shape)
    return {
      "logprobs": logprobs,
      "old_logprobs": old_logprobs,
      "advantages": advantages,
      "mask": mask,
      "ref_logprobs": logprobs + 0.5 * rng.standard_normal(shape),
      "entropy": rng.uniform(0.1, 2, shape),
      "values": values,
      "returns": rng.standard_normal(shape),
      "old_values": values + 0.4 * rng.standard_normal(shape),
    }

  return make
