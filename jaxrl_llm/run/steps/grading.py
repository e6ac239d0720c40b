"""The rewards of a run's rollouts: graded, or drawn at random, and what is learned from."""

import json
import zlib
from collections import Counter

import numpy as np
from jaxtyping import Bool

from jaxrl_llm.devices import hosts
from jaxrl_llm.rewards.at_random import with_draws
from jaxrl_llm.rewards.outcome import refuse_failures
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import dynamic_sampling
from jaxrl_llm.rollouts.arrivals import DrawnBatch
from jaxrl_llm.run.setup.start import Run


class NegativeRewardError(ValueError):
  """A response earned less than 0, and the estimator of the advantages has no meaning for that."""


def assess(run: Run, drawn: DrawnBatch) -> batch_lib.Batch:
  """Returns the batch of drawn rollouts with their rewards and with what is learned from.

  Raises:
    NoRewardError: If more than `reward.max_failed_fraction` of the responses, or all, have no
      reward.
    NegativeRewardError: If a reward is below 0 and the estimator takes none.
  """
  section, estimator = run.config.reward, run.experiment.estimator
  batch = batch_lib.assess(
    drawn.rollouts, drawn.responses, drawn.examples, rewards=run.experiment.rewards, graded=drawn.graded, call=run.grader
  )
  if section.at_random is not None:
    batch = rewarded_at_random(run, batch)
  limit, graded = section.max_failed_fraction, batch.graded
  refuse_failures("rewards", graded, limit=limit, setting=f"config.reward.max_failed_fraction={limit}")
  if run.config.task.curriculum is not None:
    verdicts = np.clip(graded.parts[run.experiment.rewards[0].name], 0, 1)
    run.prompts.observe(batch.examples, np.where(graded.valid, verdicts, np.nan).tolist())
  if estimator.from_zero and np.any(graded.totals < 0):
    least = int(np.argmin(graded.totals))
    parts = ", ".join(f"{name} {part[least]:.4g}" for name, part in graded.parts.items())
    raise NegativeRewardError(
      f"config.advantage.estimator: found {run.config.advantage.estimator!r} and a response with the reward {graded.totals[least]:.4g} "
      f"({parts}), expected rewards of 0 or more; change the rewards, or take another estimator"
    )
  options = dict(skips_truncated=section.overlong_filter, whole_groups=estimator.whole_groups)
  return batch._replace(counted=batch_lib.counted(batch, **options))


def rewarded_at_random(run: Run, batch: batch_lib.Batch) -> batch_lib.Batch:
  """Fills the random reward of a batch with draws, which a resumed run repeats."""
  seed = (run.config.seed, run.record.rl_steps, zlib.crc32(batch.rollouts.tokens.tobytes()))
  draws = np.random.default_rng(seed).random(len(batch.completions)) < run.config.reward.at_random
  return batch._replace(graded=with_draws(run.experiment.rewards, batch.graded, draws.astype(np.float32)))


def with_signal(run: Run, batch: batch_lib.Batch, *, shaped: bool) -> Bool[np.ndarray, " n"]:
  """Returns which groups of an assessed batch carry a signal for the run's estimator.

  `shaped` is that of `dynamic_sampling.with_signal`.
  """
  experiment = run.experiment
  options = dict(rewards=experiment.rewards, by_steps="step_rewards" in experiment.needs, by_states="step_states" in experiment.needs)
  return dynamic_sampling.with_signal(batch, experiment.compare, shaped=shaped, **options)


def grading_metrics(run: Run) -> dict[str, float]:
  """Returns the counts of the judges since the last step, over all processes, and the curriculum's.

  These are the number of problems that it has measured, and their pass rate. Without judges and a
  curriculum the result is empty.
  """
  counts: Counter[str] = Counter()
  for text in hosts.gather_text(json.dumps(run.grader.metrics())) if run.grader.services else ():
    counts.update(json.loads(text))
  if run.config.task.curriculum is None:
    return dict(counts)
  tried, passed = run.prompts.rates.tried, run.prompts.rates.passed
  rate = sum(passed.values()) / max(sum(tried.values()), 1e-9)
  return dict(counts) | {"curriculum/measured": float(len(tried)), "curriculum/pass_rate": rate}
