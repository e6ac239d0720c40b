"""Sampling and grading of held-out problems with the policy."""

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxrl_llm.evaluation.held_out.evaluated import Evaluated, Problems, evaluated
from jaxrl_llm.rewards import CallFn, WeightedReward, call_here
from jaxrl_llm.rewards.outcome import mapped
from jaxrl_llm.rewards.shared import grade_shared
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import Rollouts

DrawFn = Callable[[Problems, PRNGKeyArray], tuple[Rollouts, Sequence[Completion]]]
"""`(problems, key) -> (rollouts, responses)`, grouped by problem.

The sampler determines the number of samples per problem.
"""


def choose(num_problems: int, num_wanted: int, *, seed: int) -> list[int]:
  """Chooses at most `num_wanted` problems of a test set.

  The choice is the same for every evaluation of every run, so that curves can be compared.
  """
  return np.random.default_rng(seed).permutation(num_problems)[:num_wanted].tolist()


def evaluate_policy(
  draw: DrawFn,
  problems: Problems,
  key: PRNGKeyArray,
  *,
  batch_prompts: int,
  verifier: WeightedReward,
  call: CallFn = call_here,
  note: Callable[[str], None] | None = None,
) -> Evaluated:
  """Samples every problem and grades the responses.

  Args:
    draw: Function that samples responses to each of `batch_prompts` problems with the policy.
    problems: Held-out rows of the task.
    key: Random key of this evaluation.
    batch_prompts: Number of problems sampled at once. The last batch is padded with problems that
      are not counted.
    verifier: Reward that gives 1 for a right response, else 0; the first of the task's rewards.
    call: Function that calls the verifier for a batch of responses.
    note: Function that receives a progress line after each batch; None for no progress lines.

  Raises:
    NoRewardError: If the verifier failed on all responses.
  """
  prompts, responses, batches, known, begun = [], [], [], [], time.perf_counter()
  verifier = verifier._replace(weight=1.0)  # In training it may be 0 if only a reward model counts.
  for start in range(0, len(problems), batch_prompts):
    batch = list(problems[start : start + batch_prompts])
    filled = batch + [batch[-1]] * (batch_prompts - len(batch))
    rollouts, drawn = draw(filled, jax.random.fold_in(key, start))
    size = len(drawn) // batch_prompts
    drawn = drawn[: len(batch) * size]
    prompts += [tuple(rollouts.prompts[row][rollouts.prompt_mask[row]].tolist()) for row in range(0, len(drawn), size)]
    responses += drawn
    batches.append(grade_shared([verifier], drawn, [problem for problem in batch for _ in range(size)], call=call))
    known += batches[-1].totals[batches[-1].valid].tolist()
    if note is not None:
      so_far = f"{np.mean(known):.1%} right so far" if known else "no reward so far"
      note(f"{len(prompts):,} of {len(problems):,} problems | {so_far} | {time.perf_counter() - begun:.1f} s")
  graded = mapped(lambda *x: np.concatenate(x), *batches)
  return evaluated(problems, prompts, responses, graded, verifier)
