"""avg@k and pass@k on held-out problems, with intervals over problems."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int, PRNGKeyArray

from jaxrl_llm import hosts
from jaxrl_llm.evaluation import avg_at_n, bootstrap_interval, pass_at_k
from jaxrl_llm.rewards import CallFn, WeightedReward, call_here, final_answer
from jaxrl_llm.rollout import draw
from jaxrl_llm.sampler import SampleFn
from jaxrl_llm.types import Completion, Params, Tokenizer

_FINAL_ANSWER = WeightedReward("final_answer", final_answer)


def eval_metrics(
  correct: Float[np.ndarray, "n k"], lengths: Int[np.ndarray, "n k"], levels: Int[np.ndarray, " n"]
) -> dict[str, float]:
  """The evaluation's row of metrics.

  Args:
    correct: 1 where a sample is right, else 0, or a number between for credit in part; NaN where the verifier failed.
    lengths: responses, in tokens.
    levels: difficulty of each problem.

  Raises:
    ValueError: no sample of known score.
  """
  accuracy = bootstrap_interval(avg_at_n(correct))
  k, known = correct.shape[1], ~np.isnan(correct)
  # Right is wholly right. Nobody knows of k samples that one is, or that none is, where a score is missing; such problems are left out.
  passed = pass_at_k(np.where(known, correct >= 1, np.nan), k)
  metrics = {
    "eval/accuracy": accuracy.mean,
    "eval/accuracy_low": accuracy.low,
    "eval/accuracy_high": accuracy.high,
    f"eval/pass@{k}": float(np.nanmean(passed)) if np.any(~np.isnan(passed)) else 0.0,
    "eval/response_length/mean": float(lengths.mean()),
  }
  if not known.all():
    metrics["eval/failed"] = float(np.sum(~known))
  for level in np.unique(levels):
    here = correct[levels == level]
    metrics[f"eval/accuracy/level_{level}"] = float(np.nanmean(here)) if np.any(~np.isnan(here)) else 0.0
  return metrics


def evaluate_policy(
  sample: SampleFn,
  params: Params,
  problems: Sequence[Mapping[str, Any]],
  key: PRNGKeyArray,
  *,
  batch_prompts: int,
  mesh: Mesh,
  tokenizer: Tokenizer,
  prompt_buckets: Sequence[int],
  verifier: WeightedReward = _FINAL_ANSWER,
  call: CallFn = call_here,
) -> dict[str, float]:
  """Samples every problem and grades the answers.

  Args:
    sample: the jitted sampler of evaluations; its group size is k.
    params: the policy.
    problems: held-out rows of the task.
    key: of this evaluation.
    batch_prompts: problems sampled at once; the last batch is filled up with problems that are not counted.
    mesh: see `rollout.draw`.
    tokenizer: see `rollout.draw`.
    prompt_buckets: see `rollout.draw`.
    verifier: 1 for a right response, else 0; the first of the task's rewards.
    call: who calls its function.

  Returns:
    The row of `eval_metrics`.
  """
  correct, lengths = [], []
  for start in range(0, len(problems), batch_prompts):
    batch = list(problems[start : start + batch_prompts])
    filled = batch + [batch[-1]] * (batch_prompts - len(batch))
    batch_key = jax.random.fold_in(key, start)
    _, responses = draw(sample, params, filled, batch_key, mesh=mesh, tokenizer=tokenizer, prompt_buckets=prompt_buckets)
    k = len(responses) // batch_prompts
    counted = responses[: len(batch) * k]
    correct += _grades(verifier, counted, [problem for problem in batch for _ in range(k)], call)
    lengths += [response.num_tokens for response in counted]
  levels = np.array([problem["level"] for problem in problems])
  return eval_metrics(np.array(correct).reshape(len(problems), -1), np.array(lengths).reshape(len(problems), -1), levels)


def _grades(
  verifier: WeightedReward, responses: Sequence[Completion], problems: Sequence[Mapping[str, Any]], call: CallFn
) -> list[float]:
  """The verifier's word on each response, each asked for in one process; NaN where it failed.

  Raises:
    ValueError: it failed on all of them.
  """
  failures = []

  def grade(own: Sequence[int]) -> Float[np.ndarray, "m 1"]:
    outcomes = call(verifier, [responses[i] for i in own], [problems[i] for i in own])
    failures.extend(f"{x.cause}: {x.detail}" for x in outcomes if x.cause)
    return np.array([np.nan if x.cause else x.value for x in outcomes], np.float32).reshape(-1, 1)

  found = hosts.share(grade, len(responses))[:, 0].tolist()
  if np.all(np.isnan(found)):
    first = f"; the first: {failures[0]}" if failures else ""
    raise ValueError(f"reward {verifier.name!r}: found none for any of {len(found)} responses, expected a number for most{first}")
  return found
