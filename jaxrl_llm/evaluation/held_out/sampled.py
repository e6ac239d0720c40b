"""Held-out problems, sampled with the policy and graded."""

import json
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from jaxrl_llm.devices import hosts
from jaxrl_llm.evaluation.held_out.evaluated import Evaluated, Problems, evaluated, outcomes_of
from jaxrl_llm.rewards import CallFn, Outcome, WeightedReward, call_here, final_answer
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import Rollouts

DrawFn = Callable[[Problems, PRNGKeyArray], tuple[Rollouts, list[Completion]]]
"""`(problems, key) -> (rollouts, responses)`: as many samples of each problem as the sampler draws, one problem's after another's."""

_FINAL_ANSWER = WeightedReward("final_answer", final_answer)


def choose(num_problems: int, num_wanted: int, *, seed: int) -> list[int]:
  """The problems of a test set that are evaluated: the same at every evaluation of every run, so that curves can be compared.

  Args:
    num_problems: of the set.
    num_wanted: how many of them at most.
    seed: of the choice.
  """
  return np.random.default_rng(seed).permutation(num_problems)[:num_wanted].tolist()


def evaluate_policy(
  draw: DrawFn,
  problems: Problems,
  key: PRNGKeyArray,
  *,
  batch_prompts: int,
  verifier: WeightedReward = _FINAL_ANSWER,
  call: CallFn = call_here,
  note: Callable[[str], None] | None = None,
) -> Evaluated:
  """Samples every problem and grades the answers.

  Args:
    draw: samples responses to each of `batch_prompts` problems with the policy.
    problems: held-out rows of the task.
    key: of this evaluation.
    batch_prompts: problems sampled at once; the last batch is filled up with problems that are not counted.
    verifier: 1 for a right response, else 0; the first of the task's rewards.
    call: who calls its function.
    note: told a line after each batch; None tells nobody.

  Raises:
    NoRewardError: the verifier failed on all responses.
  """
  prompts, responses, outcomes, begun = [], [], [], time.perf_counter()
  for start in range(0, len(problems), batch_prompts):
    batch = list(problems[start : start + batch_prompts])
    filled = batch + [batch[-1]] * (batch_prompts - len(batch))
    rollouts, drawn = draw(filled, jax.random.fold_in(key, start))
    size = len(drawn) // batch_prompts
    drawn = drawn[: len(batch) * size]
    prompts += [tuple(rollouts.prompts[row][rollouts.prompt_mask[row]].tolist()) for row in range(0, len(drawn), size)]
    responses += drawn
    outcomes += _shared_outcomes(verifier, drawn, [problem for problem in batch for _ in range(size)], call)
    if note is not None:
      known = [outcome.value for outcome in outcomes if not outcome.cause]
      so_far = f"{np.mean(known):.1%} right so far" if known else "no score so far"
      note(f"{len(prompts):,} of {len(problems):,} problems | {so_far} | {time.perf_counter() - begun:.1f} s")
  return evaluated(problems, prompts, responses, outcomes, verifier)


def _shared_outcomes(verifier: WeightedReward, responses: Sequence[Completion], problems: Problems, call: CallFn) -> list[Outcome]:
  """The same, each asked for in one process."""
  failures: dict[str, tuple[str, str]] = {}

  def values(own: Sequence[int]) -> Float[np.ndarray, "m 1"]:
    outcomes = outcomes_of(verifier, [responses[i] for i in own], [problems[i] for i in own], call)
    failures.update({str(i): (x.cause, x.detail) for i, x in zip(own, outcomes, strict=True) if x.cause})
    return np.array([0.0 if x.cause else x.value for x in outcomes], np.float32).reshape(-1, 1)

  found = hosts.share(values, len(responses))[:, 0].tolist()
  for text in hosts.gather_text(json.dumps(failures)):
    failures |= json.loads(text)
  return [Outcome(None, *failures[str(i)]) if str(i) in failures else Outcome(value) for i, value in enumerate(found)]
