"""Every pytree and function type of the framework, with the one dimension key.

Dimension key (used in every signature):

  B  rows of a batch. A row may hold several packed sequences.
  T  token slots of a row.
  N  sequences (one prompt with one response each), before packing.
  P  prompt token slots, R response token slots, of an unpacked sequence.
  G  samples drawn for one prompt (the group).
  V  vocabulary, D model width, L layers, H query heads, K key-value heads, C head width, F feed-forward width, S cache slots.

Alignment: every `[B T]` array is aligned with `tokens`. `logprobs[b, t]` is log π(tokens[b, t] | tokens[b, <t]): the shift by one
happens in one place, `train_step.policy_outputs`, and nobody else ever thinks about it.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, PyTree

Params = PyTree
"""Weights of a model: a pytree of arrays."""

Metrics = dict[str, Array]
"""Scalars by name, under verl's names where verl has one."""

TokenMetrics = dict[str, Array]
"""`[B T]` arrays by name; `segments.reduce_metrics` turns them into scalars, once, over the whole global batch."""

TokenTerm = tuple[Float[Array, "B T"], TokenMetrics]
"""A term of the objective at each token, and its metrics."""


class Forward(NamedTuple):
  """What a model says of packed rows.

  Attributes:
    logits: those at t are for token t + 1; None where only hidden states were asked for.
    hidden: final hidden states, normalised: what the output head reads; None where logits were asked for.
    routing: the experts that each token visited, -1 in layers without experts; None for a dense model.
    live_routing: what the routers chose by themselves; differs from `routing` only where recorded routes were replayed.
    balance_loss: mean over the layers with experts of how unevenly a token's sequence uses them, 1 where even; None where nobody asked.
    z_loss: mean over those layers of the router's squared log-partition; None where nobody asked.
  """

  logits: Float[Array, "B T V"] | None = None
  routing: Int[Array, "B T L K"] | None = None
  live_routing: Int[Array, "B T L K"] | None = None
  balance_loss: Float[Array, "B T"] | None = None
  z_loss: Float[Array, "B T"] | None = None
  hidden: Float[Array, "B T D"] | None = None


class PolicyOutputs(NamedTuple):
  """What the learner knows about the current policy on a batch.

  Attributes:
    logprobs: log-probability of each token under the distribution it is drawn from (temperature and filters included), in nats.
    entropy: entropy of that distribution at each token, in nats; None where nobody computed it.
    values: the critic's value of the state before each token; None without a critic.
    live_routing: the experts that the routers choose for each token, -1 in layers without experts; None for a dense model.
    router_losses: further losses at each token by name, as `Forward` has them.
  """

  logprobs: Float[Array, "B T"]
  entropy: Float[Array, "B T"] | None = None
  values: Float[Array, "B T"] | None = None
  live_routing: Int[Array, "B T L K"] | None = None
  router_losses: Mapping[str, Float[Array, "B T"]] | None = None


class TrainBatch(NamedTuple):
  """Packed rows for one optimizer update, on the whole global batch.

  Three policies are kept apart: the sampler's (`sampler_logprobs`), the learner's before the updates (`old_logprobs`, frozen
  over all updates of one rollout batch), and the current one (`PolicyOutputs.logprobs`).

  Attributes:
    tokens: token ids.
    positions: position of each token in its own sequence, from 0.
    segments: which sequence of the row a token belongs to, from 1; 0 is padding.
    mask: 1 where a token is an action that counts in the loss, else 0.
    advantages: advantage of each token.
    old_logprobs: log-probabilities under the policy at the start of this rollout batch's updates.
    sampler_logprobs: log-probabilities reported by the sampler.
    ref_logprobs: log-probabilities under the frozen reference; None without one.
    returns: value targets; None without a critic.
    old_values: the critic's values at rollout time; None without a critic.
    importance: weight of each token's policy term, without gradient and without effect on penalties (`objectives.corrections`); None is 1.
    kl_coefs: coefficient of the KL penalty at each token in the place of the objective's own, for an adaptive one; None leaves it.
    routing: experts that each token is to visit in the place of the router's choice, -1 for the live router; None is live everywhere.
    prefixes: the segment of the row that stands before a token's own: a prompt that several responses share; 0 is none. None: nothing is
      shared in any row.
  """

  tokens: Int[Array, "B T"]
  positions: Int[Array, "B T"]
  segments: Int[Array, "B T"]
  mask: Float[Array, "B T"]
  advantages: Float[Array, "B T"]
  old_logprobs: Float[Array, "B T"]
  sampler_logprobs: Float[Array, "B T"] | None = None
  ref_logprobs: Float[Array, "B T"] | None = None
  returns: Float[Array, "B T"] | None = None
  old_values: Float[Array, "B T"] | None = None
  importance: Float[Array, "B T"] | None = None
  kl_coefs: Float[Array, "B T"] | None = None
  routing: Int[Array, "B T L K"] | None = None
  prefixes: Int[Array, "B T"] | None = None


class GateContext(NamedTuple):
  """What a gate may know beyond the log-ratio and the advantages; most gates need none of it.

  Attributes:
    logprobs: log-probabilities under the current policy, differentiable.
    old_logprobs: log-probabilities under the policy that the ratio is relative to.
    mask: 1 where a token counts.
    segments: sequence of each token, or None for one sequence per row.
  """

  logprobs: Float[Array, "B T"]
  old_logprobs: Float[Array, "B T"]
  mask: Float[Array, "B T"]
  segments: Int[Array, "B T"] | None = None


class StopReason(IntEnum):
  """Why a response has no more tokens."""

  LENGTH = 0  # It ran into its budget.
  TOKEN = 1  # It drew a stop token.
  STRING = 2  # It completed a stop string or a stop sequence.
  ABORTED = 3  # Nobody wants the rest.
  UNFINISHED = 4  # The sampler's own budget ended first: the rest may be drawn later.


class Rollouts(NamedTuple):
  """What the sampler returns: N sequences in the order of the prompts, G consecutive samples per prompt.

  Attributes:
    prompts: prompt ids, padded on the left.
    prompt_mask: True where a prompt slot holds a token.
    tokens: response ids, padded on the right; the stop token is kept.
    mask: True where a response slot holds a drawn token (the stop token counts).
    logprobs: float32 log-probability of each drawn token under the distribution it was really drawn from, filters included; 0 for a
      token that nothing else could have been, as with temperature 0.
    stopped: True where the response ended by itself, with a stop token, string or sequence.
    routing: the experts that each token of prompt and response visited while it was sampled, -1 where none is known (padding, layers
      without experts, the last token, which nothing was sampled after); None where nobody asked.
    raw_logprobs: log-probability of each drawn token under the model itself: temperature 1, no filter. None where a sampler does not say.
    entropy: entropy at each token of the distribution that it was drawn from, in nats; None where nobody asked.
    reasons: a `StopReason` each; None where a sampler does not say.
    written: True where the policy wrote the token; False at what an environment replied, which is read and not learned. None where all of
      `mask` was written.
  """

  prompts: Int[Array, "N P"]
  prompt_mask: Bool[Array, "N P"]
  tokens: Int[Array, "N R"]
  mask: Bool[Array, "N R"]
  logprobs: Float[Array, "N R"]
  stopped: Bool[Array, " N"]
  routing: Int[Array, "N S L K"] | None = None
  raw_logprobs: Float[Array, "N R"] | None = None
  entropy: Float[Array, "N R"] | None = None
  reasons: Int[Array, " N"] | None = None
  written: Bool[Array, "N R"] | None = None


class TrainState(NamedTuple):
  """Everything an update changes. Donated to the train step.

  Attributes:
    params: the policy's weights.
    opt_state: optax's state, the schedule's count included.
    step: updates attempted so far.
    skipped: updates refused because the loss or a gradient was not finite.
  """

  params: Params
  opt_state: Any
  step: Int[Array, ""]
  skipped: Int[Array, ""]


RatioFn = Callable[[Float[Array, "B T"], Float[Array, "B T"], Int[Array, "B T"] | None], Float[Array, "B T"]]
"""`(log_ratio, mask, segments) -> log_ratio`: token log-ratios to the level at which the method weighs them."""

GateFn = Callable[[Float[Array, "B T"], Float[Array, "B T"], GateContext], TokenTerm]
"""`(log_ratio, advantages, context) -> (surrogate, token metrics)`: the per-token objective, to be maximised."""

PenaltyFn = Callable[[PolicyOutputs, TrainBatch], TokenTerm]
"""`(outputs, batch) -> (per-token loss to add, token metrics)`."""

WeighFn = Callable[[Float[Array, "B T"], Int[Array, "B T"] | None], Float[Array, "B T"]]
"""`(mask, segments) -> weights`: called once, on the whole global batch, before any split."""

TokenLossFn = Callable[[PolicyOutputs, TrainBatch], TokenTerm]
"""`(outputs, batch) -> (per-token loss, token metrics)`; never reduces."""


class Objective(NamedTuple):
  """A policy objective: the loss is Σ w·l, linear in the weights, so no split of the batch can change it.

  Attributes:
    weigh: weights of all tokens of the global batch.
    token_loss: loss of each token, to be minimised.
    needs: the fields that `token_loss` reads, as fields of `TrainBatch` and `PolicyOutputs`: of `old_logprobs`, `sampler_logprobs`,
      `ref_logprobs`, `entropy`; the loop computes these and nothing else.
    value_loss: loss of the critic's values, for a critic with parameters of its own; None for a method without a critic. `token_loss` adds
      the same term by itself where `PolicyOutputs.values` is given, i.e. where policy and critic share their parameters.
    correctable: whether `token_loss` weighs its policy term by `TrainBatch.importance`; corrections refuse an objective that does not.
    ratio_level: level of the ratio: "token", "sequence" (length-normalised, hence close to 1), "product" (a whole sequence's importance
      weight), or None for an objective that compares with no other policy.
    corrects_mismatch: whether samples are weighed by the mismatch π_old/μ of learner and sampler.
    imitates: whether it makes the tokens likelier whatever their advantages, as the warm start does.
  """

  weigh: WeighFn
  token_loss: TokenLossFn
  needs: frozenset[str] = frozenset()
  value_loss: PenaltyFn | None = None
  correctable: bool = False
  ratio_level: str | None = None
  corrects_mismatch: bool = False
  imitates: bool = False
