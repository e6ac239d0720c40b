"""Trajectories of a rollout batch and the evidence for its advantages: rewards -> learner."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.estimators import Evidence
from jaxrl_llm.learner.packing import Trajectory
from jaxrl_llm.models.image_slots import Pictures
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rollouts.batch import Batch, written_mask
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import Rollouts


def evidence(
  batch: Batch,
  *,
  rewards: Sequence[WeightedReward],
  shaped: bool = True,
  by_steps: bool = False,
  by_states: bool = False,
  kl: Callable[[Float[np.ndarray, "N R"], Float[np.ndarray, "N R"]], Float[Array, "N R"]] | None = None,
  kl_coef: float = 0.0,
  old_logprobs: Sequence[Float[np.ndarray, "..."]] | None = None,
  ref_logprobs: Sequence[Float[np.ndarray, "..."]] | None = None,
  values: Sequence[Float[np.ndarray, "..."]] | None = None,
  old_entropy: Sequence[Float[np.ndarray, "..."]] | None = None,
  old_score_norm: Sequence[Float[np.ndarray, "..."]] | None = None,
  mismatch_weights: Callable[..., Float[Array, "N R"]] | None = None,
) -> Evidence:
  """Collects the inputs from which the advantages of a rollout batch are computed.

  Each sequence has one row.

  Args:
    batch: Batch from `assess`.
    rewards: Reward terms that the batch was graded with.
    shaped: Whether to include the terms that only shape the reward.
    by_steps: Whether the estimator reads the rewards of steps; see `steps_of`.
    by_states: Whether it also reads the states in which they began; see `states_of`.
    kl: `(old_logprobs, ref_logprobs) -> divergence` at each token, if it is part of the reward.
    kl_coef: Penalty per nat of divergence.
    old_logprobs, ref_logprobs: Values of log π_old and log π_ref at each sequence's tokens, prompt
      included; `kl` requires the latter. Without the former it takes the sampler's.
    values: The critic's values at each sequence's tokens, prompt included, if there is a critic.
    old_entropy: Entropy of the policy at each sequence's tokens, prompt included, if it is read.
    old_score_norm: Squared norm of the gradient of their log-probabilities in the logits, if it is
      read.
    mismatch_weights: `(old_logprobs, sampler_logprobs, mask) -> weights` of the tokens, if read.

  Note:
    If the sampler's log-probabilities are read, a sequence in which one of them is not finite has
    no known reward.
  """
  mask, written, known = batch.rollouts.mask, written_mask(batch.rollouts), batch.graded.valid
  terms = [reward for reward in rewards if not reward.monitors]
  # A weight of 0 in place of a missing part, so that programs are compiled for one number of parts.
  terms = [reward._replace(weight=0.0) if reward.shapes and not shaped else reward for reward in terms]
  sampled = np.where(mask & np.isfinite(batch.rollouts.logprobs), batch.rollouts.logprobs, 0)
  if (kl is not None and old_logprobs is None) or mismatch_weights is not None:
    known = known & batch.finite
  inputs = Evidence(
    batch.graded.totals if shaped else batch.graded.verdicts,
    parts=np.stack([batch.graded.parts[reward.name] for reward in terms]),
    mask=(written & batch.counted[:, None]).astype(np.float32),
    valid=known,
    weights=np.float32([reward.weight for reward in terms]),
    written=(written & known[:, None]).astype(np.float32),
    kl_coef=np.float32(kl_coef),
  )
  # The padded layout has a constant shape, so nothing compiles after the first step.
  old = sampled if old_logprobs is None else _responses(old_logprobs, mask)
  if kl is not None:
    inputs = inputs._replace(kl=np.asarray(kl(old, _responses(ref_logprobs, mask))))
  if mismatch_weights is not None:
    inputs = inputs._replace(importance=np.asarray(mismatch_weights(old, sampled, inputs.written)))
  if values is not None:
    inputs = inputs._replace(values=_responses(values, mask))
  if old_entropy is not None:
    inputs = inputs._replace(old_entropy=_responses(old_entropy, mask))
  if old_score_norm is not None:
    inputs = inputs._replace(old_score_norm=_responses(old_score_norm, mask))
  if by_steps:
    gains, ends, states = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, bool), np.zeros(mask.shape, np.int32)
    numbers: dict[tuple[int, str | bytes], int] = {}
    for row, own in enumerate(map(np.flatnonzero, written)):
      if len(own):
        steps = steps_of(batch.completions[row], batch.examples[row], inputs.parts[:, row].tolist(), terms=terms, last=int(own[-1]))
        gains[row, [*steps]], ends[row, [*steps]] = [*steps.values()], True
        if by_states:
          keys = states_of(batch.completions[row], batch.rollouts.tokens[row], own, ends=steps)
          for end, key in keys.items():
            states[row, end] = numbers.setdefault((row // batch.group_size, key), len(numbers))
    inputs = inputs._replace(step_rewards=gains, step_ends=ends, step_states=states if by_states else None)
  return inputs


def steps_of(
  completion: Completion, example: Mapping[str, Any], parts: Sequence[float], *, terms: Sequence[WeightedReward], last: int
) -> dict[int, float]:
  """Returns the rewards of a response's steps by the index of their last tokens.

  The steps are the turns of a conversation, or those that a term divides itself among; a response
  without either is a single step. The last step also gets all terms of the response as a whole.

  Args:
    completion: The response.
    example: Task row of the response.
    parts: Unweighted reward of each term.
    terms: Terms of the reward.
    last: Index of the response's last token.

  Example:
    >>> from jaxrl_llm.text_types import Turn
    >>> conversation = Completion("#6", (), 8, True, (Turn("<<2*3=", "6>>", 0.5, 5), Turn("#6", "", 0.0, 11)))
    >>> turns = WeightedReward("tool", None, 0.5, steps=lambda response, example: [(turn.end, turn.reward) for turn in response.turns])
    >>> steps_of(conversation, {}, [1.0, 0.5], terms=[WeightedReward("right", None), turns], last=11)
    {5: 0.25, 11: 1.0}
  """
  steps, whole = {turn.end: 0.0 for turn in completion.turns}, 0.0
  for term, part in zip(terms, parts, strict=True):
    if term.steps is None:
      whole += term.weight * part
    else:
      for end, reward in term.steps(completion, example):
        steps[end] = steps.get(end, 0.0) + term.weight * reward
  last = max(steps, default=last)
  return steps | {last: steps.get(last, 0.0) + whole}


def states_of(
  completion: Completion, tokens: Int[np.ndarray, " R"], written: Int[np.ndarray, " W"], *, ends: Iterable[int]
) -> dict[int, str | bytes]:
  """Returns the keys of the states in which a response's steps began, by their last tokens.

  A key is the environment's if the step is a turn that has one. Otherwise it is a digest of the
  tokens before the step, so that only responses that are equal so far are in the same state.

  Args:
    completion: The response.
    tokens: Tokens of the response.
    written: Indices of those that the policy wrote, in order.
    ends: Index of the last token of each step.

  Example:
    >>> from jaxrl_llm.text_types import Turn
    >>> conversation = Completion("#6", (), 8, True, (Turn("2*3=", "6>>", 0.0, 3), Turn("#6", "", 1.0, 8, "at 6")))
    >>> list(states_of(conversation, np.arange(9), np.array([0, 1, 2, 3, 7, 8]), ends=[3, 8]).values())
    [b'', 'at 6']
  """
  named, keys = {turn.end: turn.state for turn in completion.turns}, {}
  digest, read, start = hashlib.blake2b(digest_size=16), 0, int(written[0])
  for end in sorted(ends):
    digest.update(tokens[read:start].tobytes())
    read, key = start, named.get(end)
    keys[end] = (digest.digest() if start else b"") if key is None else key
    start = next((int(i) for i in written[np.searchsorted(written, end, side="right") :]), end + 1)
  return keys


def _responses(sequences: Sequence[Float[np.ndarray, "..."]], mask: Bool[np.ndarray, "N R"]) -> Float[np.ndarray, "N R"]:
  """Returns the response part of per-token values of whole sequences, padded on the right."""
  padded = np.zeros(mask.shape, np.float32)
  for row, (x, drawn) in enumerate(zip(sequences, mask, strict=True)):
    padded[row, drawn] = x[len(x) - int(drawn.sum()) :]
  return padded


def whole_sequences(responses: Float[np.ndarray, "N R"], rollouts: Rollouts) -> list[Float[np.ndarray, "..."]]:
  """Prepends zeros for the prompts to per-token values of the responses.

  Returns:
    One array per sequence, as long as its trajectory.
  """
  lengths = rollouts.prompt_mask.sum(axis=1)
  return [
    np.concatenate([np.zeros(n, np.float32), x[drawn].astype(np.float32)])
    for n, x, drawn in zip(lengths, responses, rollouts.mask, strict=True)
  ]


def trajectories(
  rollouts: Rollouts,
  counted: Bool[np.ndarray, " N"] | None = None,
  *,
  pictures: Sequence[Pictures | None] | None = None,
  group_size: int | None = None,
  replies: bool = False,
  lags: Int[np.ndarray, "N R"] | None = None,
) -> list[Trajectory]:
  """Makes the trajectories of a rollout batch on the host, with zero advantages.

  Args:
    rollouts: Rollouts on the host.
    counted: True for sequences whose tokens count; None counts all.
    pictures: Pictures of each sequence's prompt, None for one without any; None if there are none.
    group_size: Number of samples per prompt, to number the prompts; None leaves them without
      numbers.
    replies: Whether to mark the tokens of an environment's replies.
    lags: Lag of each response token, from `versions.lags`; None if nothing reads it.
  """
  result = []
  counted = np.ones(len(rollouts.tokens), bool) if counted is None else counted
  written = written_mask(rollouts)
  for row in range(len(rollouts.tokens)):
    prompt = rollouts.prompts[row][rollouts.prompt_mask[row]]
    drawn = rollouts.mask[row]
    response, logprobs = rollouts.tokens[row][drawn], rollouts.logprobs[row][drawn]
    zeros, own = np.zeros(len(prompt), np.float32), written[row][drawn].astype(np.float32)
    # A sequence that does not count stays in the batch, and NaN times a weight of 0 is NaN in a
    # gradient.
    logprobs = np.where(np.isfinite(logprobs), logprobs, 0) if not counted[row] else logprobs
    result.append(
      Trajectory(
        tokens=np.concatenate([prompt, response]).astype(np.int32),
        mask=np.concatenate([zeros, own * counted[row]]),
        advantages=np.zeros(len(prompt) + len(response), np.float32),
        sampler_logprobs=np.concatenate([zeros, logprobs]).astype(np.float32),
        routing=None if rollouts.routing is None else rollouts.routing[row][np.concatenate([rollouts.prompt_mask[row], drawn])],
        num_prompt=len(prompt),
        pictures=None if pictures is None else pictures[row],
        group=None if group_size is None else row // group_size + 1,
        replies=np.concatenate([zeros, (1 - own) * counted[row]]).astype(np.float32) if replies else None,
        lag=None if lags is None else np.concatenate([np.zeros(len(prompt), np.int32), lags[row][drawn]]).astype(np.int32),
      )
    )
  return result
