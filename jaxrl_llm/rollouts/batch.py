"""A graded rollout batch, with its metrics and sample rows: responses -> rewards."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm.pretrained.thumbnails import thumbnails
from jaxrl_llm.rewards import CallFn, Graded, WeightedReward, call_here, failure_metrics
from jaxrl_llm.rewards.outcome import PENDING, put, with_group_terms
from jaxrl_llm.rewards.shared import grade_shared
from jaxrl_llm.rollouts.jobs import Examples
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import Rollouts


class Batch(NamedTuple):
  """A rollout batch on the host: N = n·G sequences, G consecutive ones per prompt.

  Attributes:
    rollouts: Tokens and log-probabilities.
    completions: Completions that the rewards saw.
    examples: Task row of each sequence.
    graded: Rewards of each sequence.
    group_size: Number of samples per prompt (G).
    counted: True for sequences that the loss counts. A sequence does not count if its reward is
      unknown, if the sampler returned a non-finite log-probability for it, or if it was truncated
      and truncated sequences are skipped.
    advantages: Advantage of each response token; None until computed.
    signal: True for groups that carry a signal (`dynamic_sampling.with_signal`); None until
      computed.
  """

  rollouts: Rollouts
  completions: Sequence[Completion]
  examples: Examples
  graded: Graded
  group_size: int
  counted: Bool[np.ndarray, " N"]
  advantages: Float[np.ndarray, "N R"] | None = None
  signal: Bool[np.ndarray, " n"] | None = None

  @property
  def finite(self) -> Bool[np.ndarray, " N"]:
    """True for sequences with finite sampler log-probabilities at all tokens the policy wrote."""
    return np.all(np.isfinite(self.rollouts.logprobs) | ~written_mask(self.rollouts), axis=1)


def assess(
  rollouts: Rollouts,
  responses: Sequence[Completion],
  examples: Examples,
  *,
  rewards: Sequence[WeightedReward],
  graded: Graded | None = None,
  call: CallFn = call_here,
) -> Batch:
  """Grades responses, each in one process.

  Responses that were graded while others were still being drawn (see `DrawnBatch.graded`) keep
  their rewards.

  Args:
    rollouts: Rollouts on the host.
    responses: Completion of each sequence.
    examples: One task row per prompt.
    rewards: Terms of the reward.
    graded: Rewards known so far; None if there are none.
    call: Function that calls the reward terms.
  """
  group_size = len(responses) // len(examples)
  repeated = [example for example in examples for _ in range(group_size)]
  if graded is None:
    graded = grade_shared(rewards, responses, repeated, call=call)
  else:
    rest = np.flatnonzero(graded.failed == PENDING)
    graded = put(graded, rest, grade_shared(rewards, [responses[i] for i in rest], [repeated[i] for i in rest], call=call))
  graded = with_group_terms(rewards, graded, responses, group_size)
  return Batch(rollouts, responses, repeated, graded, group_size, graded.valid)


def counted(batch: Batch, *, skips_truncated: bool, whole_groups: bool) -> Bool[np.ndarray, " N"]:
  """Returns which sequences count in the loss.

  Args:
    batch: Batch from `assess`.
    skips_truncated: Whether to skip responses that did not end by themselves (DAPO's overlong
      filter). Their rewards stay in all statistics.
    whole_groups: Whether to skip a whole group if the reward of one of its samples is unknown.
  """
  counts = batch.graded.valid
  if whole_groups:
    counts = np.repeat(counts.reshape(-1, batch.group_size).all(axis=1), batch.group_size)
  # The reward is known, so the others of the group keep their baseline, but no ratio can be
  # computed.
  counts = counts & batch.finite
  return counts & batch.rollouts.stopped if skips_truncated else counts


def metrics(batch: Batch) -> dict[str, Any]:
  """Returns the metrics of a rollout batch, under verl's names.

  `rollout/tokens_sha256` distinguishes two runs at the first differing token, and further hashes
  do so for what precedes and follows the tokens in a step. `rollout/sequences_sha256` is that of
  prompts and responses in any order.
  """
  rollouts = batch.rollouts
  graded, valid = batch.graded, batch.graded.valid
  known = graded.totals[valid] if np.any(valid) else np.zeros(1, np.float32)
  advantages = batch.advantages[written_mask(rollouts) & batch.counted[:, None]]
  advantages = advantages if len(advantages) else np.zeros(1, np.float32)
  values = {"critic/rewards": known, "critic/advantages": advantages, "response_length": rollouts.mask.sum(axis=1)}
  statistics = {"mean": np.mean, "max": np.max, "min": np.min}
  row: dict[str, Any] = {f"{name}/{kind}": float(fn(x)) for name, x in values.items() for kind, fn in statistics.items()}
  for name, part in graded.parts.items():
    own = part[valid]
    own, unknown = own[~np.isnan(own)], int(np.sum(np.isnan(own)))  # NaN if a monitor failed.
    row |= {f"reward/{name}/unknown": float(unknown)} if unknown else {}
    row |= {f"reward/{name}/mean": float(np.mean(own)) if len(own) else 0.0} if len(own) or not unknown else {}
  # Only the causes that occurred, so that a run without failures has no column of zeros for each.
  row |= {name: x for name, x in failure_metrics(graded.failed).items() if x or name == "rewards/failed"}
  row["rollout/counted"] = float(np.mean(batch.counted))
  if broken := int(np.sum(~batch.finite)):
    row["rollout/nonfinite_logprobs"] = broken
  row |= {
    "response_length/clip_ratio": float(1 - np.mean(rollouts.stopped)),
    "prompt_length/mean": float(rollouts.prompt_mask.sum(axis=1).mean()),
    "group/frac_reward_zero_std": float(1 - np.mean(batch.signal)),
    "rollout/tokens_sha256": _sha256(rollouts.tokens, rollouts.mask),
  }
  return row | _hashes(batch)


def _hashes(batch: Batch) -> dict[str, str]:
  """Returns a hash of each part of a step, by metric."""
  rollouts, mask = batch.rollouts, batch.rollouts.mask
  prompts = [row[own] for row, own in zip(rollouts.prompts, rollouts.prompt_mask, strict=True)]
  responses = [row[own] for row, own in zip(rollouts.tokens, mask, strict=True)]
  lengths = np.array([len(prompt) for prompt in prompts])
  sequences = sorted(map(_sha256, lengths, prompts, responses))
  parts = {
    "prompts": _sha256(lengths, *prompts),
    "sequences": hashlib.sha256("".join(sequences).encode()).hexdigest(),
    "logprobs": _sha256(rollouts.logprobs[mask]),
    "rewards": _sha256(batch.graded.totals),
    "loss_mask": _sha256(written_mask(rollouts) & batch.counted[:, None]),
    "advantages": _sha256(batch.advantages[mask]),
  }
  return {f"rollout/{name}_sha256": digest for name, digest in parts.items()}


def _sha256(*arrays: np.ndarray | np.generic) -> str:
  return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


def sample_rows(
  batch: Batch,
  *,
  num_rows: int,
  token_text: Callable[[Sequence[int]], str],
  token_scores: Sequence[Mapping[str, Float[np.ndarray, "..."]]] = (),
) -> list[dict[str, Any]]:
  """Makes rows of `samples.jsonl`, from as many different prompts as possible.

  A row holds small copies of its prompt's pictures.

  Args:
    batch: The rollout batch.
    num_rows: Maximum number of rows.
    token_text: Function that decodes a token to text, for the viewer's heat map.
    token_scores: Named per-token scores of each sequence, prompt included, NaN if missing; empty if
      there are none.
  """
  # The first sample of every group, then the second of every group, ...
  order = sorted(range(len(batch.completions)), key=lambda row: (row % batch.group_size, row // batch.group_size))
  # The first of the task's rewards is its verifier.
  rows, verdicts = [], next(iter(batch.graded.parts.values()))
  for row in sorted(order[:num_rows]):
    completion, example = batch.completions[row], batch.examples[row]
    mask, own = batch.rollouts.mask[row], written_mask(batch.rollouts)[row]
    ids = batch.rollouts.tokens[row][mask].tolist()
    rows.append(
      {
        "prompt": example["prompt"],
        "response": transcript(completion),
        "answer": example["answer"],
        "level": example["level"],
        "reward": float(batch.graded.totals[row]),
        "correct": bool(batch.graded.valid[row] and verdicts[row] >= 1),
        "advantage": float(batch.advantages[row][own].mean()),
        "num_tokens": completion.num_tokens,
        "stopped": completion.stopped,
        "token_ids": ids,
        "tokens": [token_text([token]) for token in ids],
        "logprobs": [float(x) for x in batch.rollouts.logprobs[row][mask]],
      }
      | ({"images": thumbnails(example["images"])} if example.get("images") else {})
      | ({} if batch.rollouts.written is None else {"written": [int(x) for x in own[mask]]})
      | (_of_response(token_scores[row], len(ids)) if token_scores else {})
    )
  return rows


def written_mask(rollouts: Rollouts) -> Bool[np.ndarray, "N R"]:
  """Returns a mask that is True at the tokens that the policy wrote."""
  return rollouts.mask if rollouts.written is None else rollouts.written


def transcript(completion: Completion) -> str:
  """Returns a response as text; for a conversation, all turns with the replies between them."""
  if not completion.turns:
    return completion.text
  words = [(turn.text, turn.reply if isinstance(turn.reply, str) else f"[{len(turn.reply)} tokens]") for turn in completion.turns]
  return "".join(text + reply for text, reply in words[:-1]) + words[-1][0]


def _of_response(numbers: Mapping[str, Float[np.ndarray, "..."]], length: int) -> dict[str, list[float]]:
  """Returns the response's part of a sequence's scores, rounded to six significant digits.

  Scores without a finite value are left out.
  """
  responses = {name: x[len(x) - length :] for name, x in numbers.items()}
  return {name: [float(f"{item:.6g}") + 0.0 for item in x] for name, x in responses.items() if np.isfinite(x).any()}
