"""Every pytree and function type of the framework, and the dimension key.

Dimension key (used in every signature):

  B  rows of a batch. A row may hold several packed sequences.
  T  token slots of a row.
  N  sequences (one prompt with one response each), before packing.
  P  prompt token slots of an unpacked sequence.
  R  response token slots of an unpacked sequence.
  G  samples drawn for one prompt (the group).
  V  vocabulary, D model width, L layers, H query heads, K key-value heads, C head width,
     F feed-forward width, S cache slots.

Alignment: every `[B T]` array is aligned with `tokens`. `logprobs[b, t]` is log π(tokens[b, t] |
tokens[b, <t]). The shift by one happens only in `train_step.policy_outputs`; all other code can
ignore it.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, PyTree

Params = PyTree
"""Weights of a model: a pytree of arrays."""

Metrics = dict[str, Array]
"""Scalars by name; verl's names if verl has the metric."""

TokenMetrics = dict[str, Array]
"""`[B T]` arrays by name, which `segments.reduce_metrics` reduces once over the global batch."""

TokenTerm = tuple[Float[Array, "B T"], TokenMetrics]
"""Per-token term of the objective, and its metrics."""


class Patches(NamedTuple):
  """Patches of pictures, each padded to the same number.

  The patches of a picture lie in the order of its image tokens, each of which stands for a square
  of neighbours.

  Attributes:
    pixels: Normalised values of each patch.
    coordinates: Row and column of each patch in its picture.
    corners: Indices of the four learned positions around each patch.
    shares: Weights of these four, which sum to 1.
    mask: True if there is a patch.
  """

  pixels: Float[Array, "*I n pixels"]
  coordinates: Int[Array, "*I n 2"]
  corners: Int[Array, "*I n 4"]
  shares: Float[Array, "*I n 4"]
  mask: Bool[Array, "*I n"]


class Images(NamedTuple):
  """Pictures that rows of tokens show: I places for them in each row, with S image tokens each.

  Attributes:
    slots: Index of each token among the I·S image tokens of its row; -1 for text.
    features: Features of the image tokens: the one that stands for the token, and one for each deep
      layer. None if they follow from the patches.
    patches: Patches of the pictures; None if there are features.
  """

  slots: Int[Array, "B T"]
  features: Float[Array, "B I S F D"] | None = None
  patches: Patches | None = None


class Shown(NamedTuple):
  """Pictures in a batch of prompts.

  Attributes:
    images: The pictures.
    positions: Position of each token in time, height and width.
    ends: Position of the first token of each response.
  """

  images: Images
  positions: Int[Array, "B T 3"]
  ends: Int[Array, " B"]


class Comparison(NamedTuple):
  """Comparison of a policy with its teacher at each token, over the whole vocabulary.

  Only the divergence has a gradient.

  Attributes:
    divergence: Divergence that the policy is trained on, in nats.
    kl: Reverse KL(π‖π_T), in nats.
    teacher_entropy: Entropy of the teacher, in nats.
    agreement: 1 if both have the same likeliest token, else 0.
  """

  divergence: Float[Array, "*tokens"]
  kl: Float[Array, "*tokens"]
  teacher_entropy: Float[Array, "*tokens"]
  agreement: Float[Array, "*tokens"]


class Comparer(NamedTuple):
  """Comparison of a policy's logits with a teacher's, for one chunk of tokens.

  Attributes:
    compare: Function `(logits, teacher_logits) -> (comparison, sums)`.
    gradient: Function `(logits, teacher_logits, sums) -> [c V]`, the gradient of each token's
      divergence with respect to the policy's logits.
  """

  compare: Callable[[Array, Array], tuple[Comparison, Any]]
  gradient: Callable[[Array, Array, Any], Float[Array, "c V"]]


class Forward(NamedTuple):
  """Output of a model on packed rows.

  Attributes:
    logits: Logits; those at t are for token t + 1. None if only hidden states were requested.
    hidden: Final hidden states, normalised, which the output head reads. None if logits were
      requested.
    routing: Experts that each token visited, -1 in layers without experts; None for a dense model.
    live_routing: Experts that the routers chose by themselves; differs from `routing` only if
      recorded routes were replayed.
    balance_loss: Imbalance of a token's sequence over the experts, averaged over the layers with
      experts; 1 if even. None if not requested.
    z_loss: Squared log-partition of the router, averaged over those layers; None if not requested.
    comparison: Comparison with a teacher; None without one.
    score_norm: Squared norm of the gradient of each token's log-probability in its logits, from the
      output head; None if only hidden states or logits were requested.
  """

  logits: Float[Array, "B T V"] | None = None
  routing: Int[Array, "B T L K"] | None = None
  live_routing: Int[Array, "B T L K"] | None = None
  balance_loss: Float[Array, "B T"] | None = None
  z_loss: Float[Array, "B T"] | None = None
  hidden: Float[Array, "B T D"] | None = None
  comparison: Comparison | None = None
  score_norm: Float[Array, "B T"] | None = None


class PolicyOutputs(NamedTuple):
  """Outputs of the current policy on a batch.

  Attributes:
    logprobs: Log-probability of each token under its sampling distribution (temperature and filters
      included), in nats.
    entropy: Entropy of that distribution at each token, in nats; None if not computed.
    values: The critic's value of the state before each token; None without a critic.
    live_routing: Experts that the routers choose for each token, -1 in layers without experts; None
      for a dense model.
    router_losses: Additional per-token losses of the routers by name, from `Forward`.
    comparison: Comparison with a teacher; None without one.
    score_norm: Squared norm of the gradient of each log-probability in the logits, without a
      gradient; None if not computed.
  """

  logprobs: Float[Array, "B T"]
  entropy: Float[Array, "B T"] | None = None
  values: Float[Array, "B T"] | None = None
  live_routing: Int[Array, "B T L K"] | None = None
  router_losses: Mapping[str, Float[Array, "B T"]] | None = None
  comparison: Comparison | None = None
  score_norm: Float[Array, "B T"] | None = None


class TaughtRows(NamedTuple):
  """The batch's responses, each preceded by the teacher's prompt, row by row.

  Attributes:
    tokens: Token ids.
    positions: Position of each token in its own sequence, from 0.
    segments: Index of each token's sequence within the row, from 1; 0 is padding.
    sources: Slot here after which the teacher predicts the token, for each slot of the batch; -1
      for tokens of prompts and padding.
    prefixes: Index of the segment that precedes a token's own; None if no row shares a prompt.
  """

  tokens: Int[Array, "B T"]
  positions: Int[Array, "B T"]
  segments: Int[Array, "B T"]
  sources: Int[Array, "B T"]
  prefixes: Int[Array, "B T"] | None = None


class TrainBatch(NamedTuple):
  """Packed rows for one optimizer update, on the whole global batch.

  Three policies are kept apart: the sampler's (`sampler_logprobs`), the learner's before the
  updates (`old_logprobs`, frozen over all updates of one rollout batch), and the current one
  (`PolicyOutputs.logprobs`).

  Attributes:
    tokens: Token ids.
    positions: Position of each token in its own sequence, from 0.
    segments: Index of each token's sequence within the row, from 1; 0 is padding.
    mask: 1 if a token is an action that counts in the loss, else 0.
    advantages: Advantage of each token.
    old_logprobs: Log-probabilities under the policy at the start of this rollout batch's updates.
    sampler_logprobs: Log-probabilities reported by the sampler.
    ref_logprobs: Log-probabilities under the frozen reference; None without one.
    returns: Value targets; None without a critic.
    old_values: The critic's values at rollout time; None without a critic.
    importance: Weight of each token's policy term, without a gradient and without effect on
      penalties (`objectives.corrections`); None means 1.
    kl_coefs: Adaptive coefficient of the KL penalty at each token, which replaces the objective's
      own; None keeps the objective's own.
    entropy_coefs: Adaptive coefficient of the entropy bonus at each token, which replaces the
      objective's own; None keeps the objective's own.
    routing: Experts that each token must visit instead of the router's choice, -1 for the live
      router; None uses the live router everywhere.
    prefixes: Index of the segment that precedes a token's own, such as a prompt that several
      responses share; 0 means none. None if no row shares a prompt.
    images: Pictures that the rows show; None for a language model. Tokens then have positions in
      time, height and width.
    old_entropy: Entropy at each token of the policy at the start of this rollout batch's updates,
      in nats; None if nothing selects tokens by it.
    old_score_norm: Squared norm of the gradient in the logits of that policy's log-probability of
      each token; None if no advantage depends on it.
    replies: 1 at tokens of an environment's replies, which the step may imitate; else 0. None if it
      does not.
    selected: 1 at tokens that the objective treats differently, by `Objective.prepare`; else 0.
      None for an objective that selects none, or not yet.
    groups: Number of the prompt that each token's sequence is a sample of, from 1, the same in all
      rows; 0 for padding. None if no weight depends on it.
    taught: The rows as a teacher with prompts of its own reads them, for a comparison with it over
      the whole vocabulary; None otherwise.
    lag: Number of RL steps between the weights that drew each token and those at the start of this
      rollout batch's updates; 0 for tokens that the policy did not draw. None if nothing reads it.
    kept: 1 at tokens whose loss counts, 0 at those that are left out of an update while all others
      keep their weights; None leaves out none.
  """

  tokens: Int[Array, "B T"]
  positions: Int[Array, "B T *axes"]
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
  images: Images | None = None
  groups: Int[Array, "B T"] | None = None
  selected: Float[Array, "B T"] | None = None
  old_entropy: Float[Array, "B T"] | None = None
  entropy_coefs: Float[Array, "B T"] | None = None
  replies: Float[Array, "B T"] | None = None
  taught: TaughtRows | None = None
  lag: Int[Array, "B T"] | None = None
  old_score_norm: Float[Array, "B T"] | None = None
  kept: Float[Array, "B T"] | None = None


class GateContext(NamedTuple):
  """Inputs of a gate beyond the log-ratio and the advantages; most gates need none of them.

  Attributes:
    logprobs: Log-probabilities under the current policy, differentiable.
    old_logprobs: Log-probabilities under the policy that the ratio is relative to.
    mask: 1 if a token counts, else 0.
    segments: Sequence of each token, or None for one sequence per row.
    selected: 1 at tokens that the objective selects; None if it selects none.
  """

  logprobs: Float[Array, "B T"]
  old_logprobs: Float[Array, "B T"]
  mask: Float[Array, "B T"]
  segments: Int[Array, "B T"] | None = None
  selected: Float[Array, "B T"] | None = None


class StopReason(IntEnum):
  """Reason that a response ended."""

  LENGTH = 0  # The response reached its budget.
  TOKEN = 1  # The sampler drew a stop token.
  STRING = 2  # The response completed a stop string or a stop sequence.
  ABORTED = 3  # The rest of the response is not needed.
  UNFINISHED = 4  # The sampler's own budget ended first: the rest may be drawn later.


class Rollouts(NamedTuple):
  """Output of the sampler: N sequences in prompt order, G consecutive samples per prompt.

  Attributes:
    prompts: Prompt ids, padded on the left.
    prompt_mask: True if a prompt slot holds a token.
    tokens: Response ids, padded on the right; the stop token is kept.
    mask: True if a response slot holds a drawn token (the stop token counts).
    logprobs: Float32 log-probability of each drawn token under the distribution it was actually
      drawn from, filters included; 0 if no other token was possible, such as at temperature 0.
    stopped: True if the response ended by itself, with a stop token, string or sequence.
    routing: Experts that each token of prompt and response visited during sampling, -1 if unknown
      (padding, layers without experts, and the last token, after which nothing was sampled). None
      if not requested.
    raw_logprobs: Log-probability of each drawn token under the model itself: temperature 1, no
      filter. None if the sampler does not report it.
    entropy: Entropy of each token's sampling distribution, in nats; None if not requested.
    reasons: `StopReason` of each response; None if the sampler does not report it.
    written: True if the policy wrote the token; False for an environment's reply, which is read and
      not learned. None if the policy wrote every token in `mask`.
    versions: Version of the weights that drew each token, as the number of RL steps behind them; -1
      if the policy did not write it or the version is unknown. None if no version was recorded.
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
  versions: Int[Array, "N R"] | None = None


class TrainState(NamedTuple):
  """Everything that an update changes. Donated to the train step.

  Attributes:
    params: The policy's weights.
    opt_state: State of the optax optimizer, including the schedule's count.
    step: Number of updates attempted so far.
    skipped: Number of updates skipped because the loss or a gradient was non-finite.
  """

  params: Params
  opt_state: Any
  step: Int[Array, ""]
  skipped: Int[Array, ""]


RatioFn = Callable[[Float[Array, "B T"], Float[Array, "B T"], Int[Array, "B T"] | None], Float[Array, "B T"]]
"""`(log_ratio, mask, segments) -> log_ratio`: maps token log-ratios to the method's level."""

GateFn = Callable[[Float[Array, "B T"], Float[Array, "B T"], GateContext], TokenTerm]
"""`(log_ratio, advantages, context) -> (surrogate, token metrics)`; the surrogate is maximised."""

PenaltyFn = Callable[[PolicyOutputs, TrainBatch], TokenTerm]
"""`(outputs, batch) -> (per-token loss to add, token metrics)`."""

WeighFn = Callable[..., Float[Array, "B T"]]
"""`(mask, segments) -> weights`: called once, on the whole global batch, before any split.

One that also reads the prompts, `(mask, segments, groups) -> weights`, has an attribute `needs`
that contains "groups". `segments.token_weights` calls either.
"""

TokenLossFn = Callable[[PolicyOutputs, TrainBatch], TokenTerm]
"""`(outputs, batch) -> (per-token loss, token metrics)`; never reduces."""


class Objective(NamedTuple):
  """Policy objective; the loss Σ w·l is linear in the weights, so no split of the batch changes it.

  Attributes:
    weigh: Function that returns the weights of all tokens of the global batch.
    token_loss: Function that returns the loss of each token, to be minimised.
    needs: Optional fields of `TrainBatch` and `PolicyOutputs` that `token_loss` reads, among
      `old_logprobs`, `sampler_logprobs`, `ref_logprobs`, `entropy`, `comparison` and `lag`;
      `groups`, which `weigh` reads; or `old_entropy`, which `prepare` reads. The training loop
      computes only these.
    value_loss: Loss of the values of a critic with its own parameters; None for a method without a
      critic. `token_loss` adds the same term by itself if `PolicyOutputs.values` is given, i.e. if
      policy and critic share their parameters.
    correctable: Whether `token_loss` weighs its policy term by `TrainBatch.importance`; corrections
      refuse an objective that does not.
    ratio_level: Level of the ratio: "token", "sequence" (length-normalised, hence close to 1),
      "product" (the importance weight of a whole sequence), or None for an objective without a
      ratio.
    corrects_mismatch: Whether samples are weighed by the mismatch π_old/μ between learner and
      sampler.
    imitates: Whether the objective makes tokens likelier whatever their advantages, as imitation
      does.
    prepare: Function of the global batch that is called once, before any split, and returns it with
      what `token_loss` reads of a statistic over all of it. `token_loss` calls it by itself on a
      batch that is not prepared. None if there is no such statistic.
    teaches_without_advantage: Whether the policy term moves tokens whose advantage is 0.
  """

  weigh: WeighFn
  token_loss: TokenLossFn
  needs: frozenset[str] = frozenset()
  value_loss: PenaltyFn | None = None
  correctable: bool = False
  ratio_level: str | None = None
  corrects_mismatch: bool = False
  imitates: bool = False
  prepare: Callable[[TrainBatch], TrainBatch] | None = None
  teaches_without_advantage: bool = False
