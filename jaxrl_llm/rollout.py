"""prompts -> sample -> reward -> advantage: one batch of rollouts, and what is logged of it."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxrl_llm import hosts
from jaxrl_llm.credit import Evidence
from jaxrl_llm.mesh import place_rows
from jaxrl_llm.packing import Trajectory
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.outcome import CallFn, call_here, failure_metrics, grade
from jaxrl_llm.sampler import Finished, Requests, SampleFn, StreamFn, gather
from jaxrl_llm.tasks.pipeline import encode_prompts
from jaxrl_llm.types import Completion, Params, Rollouts, StopReason, Tokenizer

Examples = Sequence[Mapping[str, Any]]
StepRewards = Callable[[Mapping[str, Any], Sequence[int]], list[tuple[int, float]]]


class Score(NamedTuple):
  """What a sequence is worth.

  Attributes:
    total: its reward.
    parts: each reward by itself, unweighted.
    failed: why the reward is not known; None where it is.
    detail: of that, in one line.
  """

  total: np.float32
  parts: dict[str, np.float32]
  failed: str | None = None
  detail: str = ""



class Batch(NamedTuple):
  """One rollout batch on the host: N = n·G sequences, G consecutive ones for each prompt.

  Attributes:
    rollouts: tokens and log-probabilities.
    completions: what the rewards saw.
    examples: the task's row of each sequence.
    rewards: the total reward of each sequence.
    parts: each reward by itself, unweighted.
    verdicts: the total without the terms that only shape it.
    failed: of each sequence why its reward is not known; None where it is.
    detail: what came of the first of these, in one line; empty for none.
    group_size: samples for each prompt (G).
    counted: False for a sequence that nothing is learned from: its reward is not known, or it was cut short where those are left out.
    advantages: of each response token; None until they are known.
  """

  rollouts: Rollouts
  completions: list[Completion]
  examples: Examples
  rewards: Float[np.ndarray, " N"]
  parts: dict[str, Float[np.ndarray, " N"]]
  verdicts: Float[np.ndarray, " N"]
  failed: list[str | None]
  group_size: int
  counted: Bool[np.ndarray, " N"]
  detail: str = ""
  advantages: Float[np.ndarray, "N R"] | None = None

  @property
  def valid(self) -> Bool[np.ndarray, " N"]:
    """True where the reward is known."""
    return np.array([cause is None for cause in self.failed])


class Drawn(NamedTuple):
  """Rollouts on the host, as `assess` wants them.

  Attributes:
    rollouts: tokens and log-probabilities.
    responses: their completions.
    examples: one row of the task for each prompt.
    scores: of the sequences that were scored before the last ones were there, None for the others; None where none was.
  """

  rollouts: Rollouts
  responses: list[Completion]
  examples: Examples
  scores: list[Score | None] | None = None


def dispatch(
  sample: SampleFn | StreamFn,
  params: Params,
  examples: Examples,
  key: PRNGKeyArray,
  *,
  mesh: Mesh,
  tokenizer: Tokenizer,
  prompt_buckets: Sequence[int],
  requests: Requests | None = None,
) -> Rollouts | Iterator[Finished]:
  """Has the sampler's devices draw responses to problems, and does not wait for them.

  Args:
    sample: the jitted sampler, or a stream.
    params: the policy, on the devices of the sampler.
    examples: rows of the task, a number of them that the mesh divides.
    key: of this batch alone.
    mesh: of the sampler; the rows of the prompts are split over it.
    tokenizer: the task's.
    prompt_buckets: prompt slots to choose from.
    requests: responses to go on with, for a sampler that was compiled to; None for others.

  Returns:
    Rollouts on the devices, for which `collect` waits; or the stream of them, for `follow`.
  """
  prompts = place_rows(mesh, encode_prompts(examples, tokenizer, buckets=prompt_buckets))
  if requests is None:
    return sample(params, *prompts, key)
  return sample(params, *prompts, key, requests._replace(begun=place_rows(mesh, requests.begun)))


def collect(rollouts: Rollouts, tokenizer: Tokenizer) -> tuple[Rollouts, list[Completion]]:
  """Brings all rollouts to every host once they are drawn.

  Args:
    rollouts: of `dispatch`.
    tokenizer: the task's.
  """
  rollouts = hosts.to_host(rollouts)
  return rollouts, completions(rollouts, tokenizer.decode)


def follow(
  stream: Iterator[Finished],
  examples: Examples,
  tokenizer: Tokenizer,
  *,
  rewards: Sequence[WeightedReward],
  group_size: int,
  call: CallFn = call_here,
) -> tuple[Drawn, float]:
  """As `collect`, of a stream: decodes and scores what has finished while the devices draw the rest.

  A reward sees one response and its own example, so that scoring a few responses at a time changes none. Those that come last are not
  scored here, because nothing is drawn beside it any more; nor are those that a later call goes on with. None is aborted: without its end
  a response has no reward, and its group no advantages.

  Args:
    stream: of `dispatch`.
    examples: one row for each prompt.
    tokenizer: the task's.
    rewards: terms of the reward.
    group_size: samples for each prompt (G).
    call: who calls their functions.

  Returns:
    The rollouts in the order of the prompts, with the scores that are known already; and the seconds that these took.
  """
  num_sequences = len(examples) * group_size
  finished, texts, scores, seconds = [], {}, [None] * num_sequences, 0.0
  for part in stream:
    start = time.perf_counter()
    finished.append(part)
    texts |= dict(zip(part.sequences.tolist(), completions(part.rollouts, tokenizer.decode), strict=True))
    if len(texts) == num_sequences:
      continue
    whole = part.sequences[part.rollouts.reasons != StopReason.UNFINISHED].tolist()
    found = _scores(rewards, [texts[i] for i in whole], [examples[i // group_size] for i in whole], call)
    for i, known in zip(whole, found, strict=True):
      scores[i] = known
    seconds += time.perf_counter() - start
  return Drawn(gather(finished), [texts[i] for i in range(num_sequences)], examples, scores), seconds


def select(drawn: Drawn, rows: Int[np.ndarray, " m"]) -> Drawn:
  """Some of the groups, whole.

  Args:
    drawn: N sequences.
    rows: of them, those to keep.
  """
  group_size = len(drawn.responses) // len(drawn.examples)
  return Drawn(
    jax.tree.map(lambda x: x[rows], drawn.rollouts),
    [drawn.responses[i] for i in rows],
    [drawn.examples[i // group_size] for i in rows[::group_size]],
    None if drawn.scores is None else [drawn.scores[i] for i in rows],
  )


def draw(
  sample: SampleFn, params: Params, examples: Examples, key: PRNGKeyArray, *, tokenizer: Tokenizer, **placing: Any
) -> tuple[Rollouts, list[Completion]]:
  """Samples responses to problems and waits for them: `dispatch`, which has the arguments, and `collect`."""
  return collect(dispatch(sample, params, examples, key, tokenizer=tokenizer, **placing), tokenizer)


def assess(
  rollouts: Rollouts,
  responses: list[Completion],
  examples: Examples,
  *,
  rewards: Sequence[WeightedReward],
  scores: Sequence[Score | None] | None = None,
  call: CallFn = call_here,
) -> Batch:
  """Scores responses, each in one process.

  Args:
    rollouts: on the host.
    responses: their completions.
    examples: one row for each prompt; its group's samples share it.
    rewards: terms of the reward.
    scores: that are known already, see `Drawn`.
    call: who calls the functions of the terms.
  """
  group_size = len(responses) // len(examples)
  repeated = [example for example in examples for _ in range(group_size)]
  scores = [None] * len(responses) if scores is None else list(scores)
  unknown = [i for i, known in enumerate(scores) if known is None]
  causes: dict[str, Sequence[str]] = {}

  def rows_of(own: Sequence[int]) -> Float[np.ndarray, "m k"]:
    """For each response its total reward, and its rewards in the order of the terms."""
    found = _scores(rewards, [responses[unknown[i]] for i in own], [repeated[unknown[i]] for i in own], call)
    causes.update({str(i): (score.failed, score.detail) for i, score in zip(own, found, strict=True) if score.failed is not None})
    return np.array([[x.total, *x.parts.values()] for x in found], np.float32).reshape(len(own), 1 + len(rewards))

  rows = hosts.share(rows_of, len(unknown))
  for text in hosts.gather_text(json.dumps(causes)):
    causes |= json.loads(text)
  for i, (total, *found) in enumerate(rows):
    parts = {reward.name: part for reward, part in zip(rewards, found, strict=True)}
    scores[unknown[i]] = Score(total, parts, *causes.get(str(i), (None, "")))
  parts = {reward.name: np.array([score.parts[reward.name] for score in scores], np.float32) for reward in rewards}
  totals = np.array([score.total for score in scores], np.float32)
  # Summed by itself and not subtracted: equal verdicts are then equal to the last bit.
  verdicts = sum((reward.weight * parts[reward.name].astype(np.float64) for reward in rewards if not reward.shapes), np.zeros(len(totals)))
  failed = [score.failed for score in scores]
  counted = np.array([cause is None for cause in failed])
  detail = next((score.detail for score in scores if score.detail), "")
  return Batch(rollouts, responses, repeated, totals, parts, np.float32(verdicts), failed, group_size, counted, detail)


def _scores(rewards: Sequence[WeightedReward], responses: list[Completion], examples: Examples, call: CallFn) -> list[Score]:
  graded = grade(rewards, responses, examples, call=call)
  detail = graded.details[0] if graded.details else ""
  rows = zip(graded.totals, graded.failed, strict=True)
  parts_of = lambda i: {name: part[i] for name, part in graded.parts.items()}
  return [Score(total, parts_of(i), failed, detail if failed else "") for i, (total, failed) in enumerate(rows)]


def evidence(
  batch: Batch,
  *,
  rewards: Sequence[WeightedReward],
  step_rewards: StepRewards | None = None,
  kl: Callable[[Float[np.ndarray, "N R"], Float[np.ndarray, "N R"]], Float[Array, "N R"]] | None = None,
  kl_coef: float = 0.0,
  old_logprobs: Sequence[Float[np.ndarray, "..."]] | None = None,
  ref_logprobs: Sequence[Float[np.ndarray, "..."]] | None = None,
  values: Sequence[Float[np.ndarray, "..."]] | None = None,
) -> Evidence:
  """What the advantages of a rollout batch are computed from, one row a sequence.

  Args:
    batch: from `assess`.
    rewards: the terms that it was scored with.
    step_rewards: the task's verifier of steps, where the estimator reads steps.
    kl: `(old_logprobs, ref_logprobs) -> divergence` at each token, where it is part of the reward.
    kl_coef: reward per nat of it.
    old_logprobs: for each sequence log π_old of its tokens, prompt included; for `kl`.
    ref_logprobs: for each sequence log π_ref of its tokens, prompt included; for `kl`.
    values: for each sequence the critic's values at its tokens, prompt included, where there is a critic.
  """
  mask = batch.rollouts.mask
  parts = np.stack([np.float32(reward.weight) * batch.parts[reward.name] for reward in rewards])
  counted = mask & batch.counted[:, None]
  found = Evidence(batch.rewards, parts, counted.astype(np.float32), batch.valid, kl_coef=np.float32(kl_coef))
  if kl is not None:
    # In the padded layout, whose shape never changes: nothing compiles after the first step.
    found = found._replace(kl=np.asarray(kl(_responses(old_logprobs, mask), _responses(ref_logprobs, mask))))
  if values is not None:
    found = found._replace(values=_responses(values, mask))
  if step_rewards is not None:
    gains, ends = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, bool)
    for row, (completion, example) in enumerate(zip(batch.completions, batch.examples, strict=True)):
      for end, reward in step_rewards(example, completion.token_ids):
        gains[row, end], ends[row, end] = reward, True
    found = found._replace(step_rewards=gains, step_ends=ends)
  return found


def _responses(sequences: Sequence[Float[np.ndarray, "..."]], mask: Bool[np.ndarray, "N R"]) -> Float[np.ndarray, "N R"]:
  """The response part of per-token values of whole sequences, padded on the right."""
  found = np.zeros(mask.shape, np.float32)
  for row, (x, drawn) in enumerate(zip(sequences, mask, strict=True)):
    found[row, drawn] = x[len(x) - int(drawn.sum()) :]
  return found


def whole_sequences(responses: Float[np.ndarray, "N R"], rollouts: Rollouts) -> list[Float[np.ndarray, "..."]]:
  """Per-token values of the responses with zeros for their prompts: one array a sequence, as long as its trajectory."""
  lengths = rollouts.prompt_mask.sum(axis=1)
  return [
    np.concatenate([np.zeros(n, np.float32), x[drawn].astype(np.float32)])
    for n, x, drawn in zip(lengths, responses, rollouts.mask, strict=True)
  ]


def completions(rollouts: Rollouts, decode: Callable[[Sequence[int]], str]) -> list[Completion]:
  """What reward functions see of each response.

  Args:
    rollouts: on the host.
    decode: token ids to text, special tokens left out.
  """
  result = []
  for tokens, mask, stopped in zip(rollouts.tokens, rollouts.mask, rollouts.stopped, strict=True):
    ids = tuple(int(token) for token in tokens[mask])
    result.append(Completion(text=decode(ids), token_ids=ids, num_tokens=len(ids), stopped=bool(stopped)))
  return result


def counted(batch: Batch, *, skips_truncated: bool, whole_groups: bool) -> Bool[np.ndarray, " N"]:
  """Sequences that count in the loss.

  Args:
    batch: from `assess`.
    skips_truncated: leave out those that did not end by themselves (DAPO's overlong filter); their rewards stay in their groups'
      statistics.
    whole_groups: leave out a group altogether if the reward of one of its samples is not known.
  """
  found = batch.valid
  if whole_groups:
    found = np.repeat(found.reshape(-1, batch.group_size).all(axis=1), batch.group_size)
  return found & batch.rollouts.stopped if skips_truncated else found


def trajectories(rollouts: Rollouts, counted: Bool[np.ndarray, " N"] | None = None) -> list[Trajectory]:
  """Sequences of a rollout batch; their advantages are zeros, for nobody knows them yet.

  Args:
    rollouts: on the host.
    counted: False for sequences of which no token counts; None counts all.
  """
  result = []
  counted = np.ones(len(rollouts.tokens), bool) if counted is None else counted
  for row in range(len(rollouts.tokens)):
    prompt = rollouts.prompts[row][rollouts.prompt_mask[row]]
    drawn = rollouts.mask[row]
    response, logprobs = rollouts.tokens[row][drawn], rollouts.logprobs[row][drawn]
    zeros, ones = np.zeros(len(prompt), np.float32), np.ones(len(response), np.float32)
    result.append(
      Trajectory(
        tokens=np.concatenate([prompt, response]).astype(np.int32),
        mask=np.concatenate([zeros, ones * counted[row]]),
        advantages=np.zeros(len(prompt) + len(response), np.float32),
        sampler_logprobs=np.concatenate([zeros, logprobs]).astype(np.float32),
        routing=None if rollouts.routing is None else rollouts.routing[row][np.concatenate([rollouts.prompt_mask[row], drawn])],
      )
    )
  return result


def metrics(batch: Batch) -> dict[str, Any]:
  """What is logged of a rollout batch, under verl's names.

  `rollout/tokens_sha256` tells two runs apart at the first token that differs.
  """
  rollouts = batch.rollouts
  lengths = rollouts.mask.sum(axis=1)
  known = batch.rewards[batch.valid] if np.any(batch.valid) else np.zeros(1, np.float32)
  groups = batch.rewards.reshape(-1, batch.group_size)
  digest = hashlib.sha256(rollouts.tokens.tobytes() + rollouts.mask.tobytes()).hexdigest()
  advantages = batch.advantages[rollouts.mask & batch.counted[:, None]]
  advantages = advantages if len(advantages) else np.zeros(1, np.float32)
  values = {"critic/rewards": known, "critic/advantages": advantages, "response_length": lengths}
  statistics = {"mean": np.mean, "max": np.max, "min": np.min}
  row: dict[str, Any] = {f"{name}/{kind}": float(fn(x)) for name, x in values.items() for kind, fn in statistics.items()}
  row |= {f"reward/{name}/mean": float(np.mean(part[batch.valid])) if np.any(batch.valid) else 0.0 for name, part in batch.parts.items()}
  # Of the causes those that occurred: a run in which none does need not carry a column of zeros for each.
  row |= {name: x for name, x in failure_metrics(batch.failed).items() if x or name == "rewards/failed"}
  row["rollout/counted"] = float(np.mean(batch.counted))
  row |= {
    "response_length/clip_ratio": float(1 - np.mean(rollouts.stopped)),
    "prompt_length/mean": float(rollouts.prompt_mask.sum(axis=1).mean()),
    "group/frac_reward_zero_std": float(np.mean(groups.max(axis=1) == groups.min(axis=1))),
    "rollout/tokens_sha256": digest,
  }
  return row


def sample_rows(batch: Batch, *, num_rows: int, token_text: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
  """Rows of `samples.jsonl`, from as many different prompts as there are.

  Args:
    batch: the rollout batch.
    num_rows: how many.
    token_text: one token as text, for the viewer's heat-map.
  """
  # The first sample of every group, then the second of every group, ...
  order = sorted(range(len(batch.completions)), key=lambda row: (row % batch.group_size, row // batch.group_size))
  rows = []
  for row in sorted(order[:num_rows]):
    completion, example = batch.completions[row], batch.examples[row]
    rows.append(
      {
        "prompt": example["prompt"],
        "response": completion.text,
        "answer": example["answer"],
        "level": example["level"],
        "reward": float(batch.rewards[row]),
        "advantage": float(batch.advantages[row][batch.rollouts.mask[row]].mean()),
        "num_tokens": completion.num_tokens,
        "stopped": completion.stopped,
        "token_ids": list(completion.token_ids),
        "tokens": [token_text([token]) for token in completion.token_ids],
        "logprobs": [float(x) for x in batch.rollouts.logprobs[row][batch.rollouts.mask[row]]],
      }
    )
  return rows

