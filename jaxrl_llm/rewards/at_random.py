"""Rewards drawn at random in place of a run's own: a control from which nothing can be learned.

The run's terms become monitors, which are logged and which nothing else reads, and one further term
is all of the reward. Whatever is computed from the terms of a reward, such as separate rewards,
verdicts, steps or pass rates, is then computed from the draws.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxrl_llm.rewards.outcome import Graded, WeightedReward, failures_of, weigh

RANDOM = "random"
"""Name of the term."""


def random_terms(terms: Sequence[WeightedReward]) -> list[WeightedReward]:
  """Returns the random term, and the given ones as monitors.

  The random term is 0 until `with_draws` replaces it, because the draws are those of a whole batch.
  """
  return [WeightedReward(RANDOM, lambda completion, example: 0.0), *(term._replace(monitors=True) for term in terms)]


def with_draws(terms: Sequence[WeightedReward], graded: Graded, draws: Float[np.ndarray, " N"]) -> Graded:
  """Returns the rewards of a batch with the draws as its random term.

  Args:
    terms: Terms from `random_terms`, with which the batch was graded.
    graded: Rewards of the batch.
    draws: Random reward of each response.

  Example:
    >>> from jaxrl_llm.rewards.outcome import grade
    >>> from jaxrl_llm.text_types import Completion
    >>> terms = random_terms([WeightedReward("right", lambda completion, example: 1.0)])
    >>> graded = with_draws(terms, grade(terms, [Completion("4", (1,), 1, True)] * 2, [{}] * 2), np.float32([0, 1]))
    >>> graded.totals.tolist(), graded.verdicts.tolist(), graded.parts["right"].tolist()
    ([0.0, 1.0], [0.0, 1.0], [1.0, 1.0])
  """
  return weigh(terms, graded.parts | {RANDOM: draws}, failures_of(graded))
