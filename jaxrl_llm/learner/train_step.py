"""The train step: `policy_outputs`, which contains the only shift by one, and the update itself."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jaxrl_llm.devices.offload import is_on_host, offloaded
from jaxrl_llm.learner.rounding import in_bfloat16
from jaxrl_llm.learner.schedules import make_schedule
from jaxrl_llm.models import routing
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.segments import at_slots, previous_slots, reduce_metrics, token_mean, token_weights
from jaxrl_llm.types import (
  Comparer,
  Forward,
  Metrics,
  Objective,
  Params,
  PolicyOutputs,
  TokenMetrics,
  TokenTerm,
  TrainBatch,
  TrainState,
)

TrainStepFn = Callable[..., tuple[TrainState, Metrics]]
"""`(state, batch, *others) -> (state, metrics)`; the others are for the step's `outputs_fn`."""

LogprobsFn = Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"], Forward]]
"""Log-probabilities and entropy of each token whose mask is above 0.

`(params, batch, sources, *, filter_logits, learns_entropy, router_losses) -> (logprobs, entropy,
Forward)`. Each token is predicted from the hidden state at its slot in `sources`. The other tokens
are 0 and cost nothing in the output head.
"""


def policy_outputs(
  logprobs_fn: LogprobsFn,
  filter_logits: Callable,
  params: Params,
  batch: TrainBatch,
  teacher: Params | None = None,
  *,
  learns_entropy: bool = True,
  router_losses: tuple[str, ...] = (),
  teacher_fn: Callable | None = None,
  comparer: Comparer | None = None,
  teaches_itself: bool = False,
) -> PolicyOutputs:
  """Computes the log-probability and entropy of every counted token under the policy.

  The policy is the distribution that `filter_logits` makes of the logits. The state after one token
  gives the log-probability of the next. Only this function shifts the two, so everything is aligned
  with `batch.tokens`. Only tokens whose mask is above 0 are computed; the first token of a
  sequence, which has no predecessor, is never one of them.

  Args:
    logprobs_fn: The model's `logprobs`.
    filter_logits: `(logits, keep) -> logits` of the sampling distribution, the sampler's own
      function.
    params: The model's weights.
    batch: Rows, of which `tokens`, `positions`, `segments`, `prefixes`, `mask`, `routing` and, by a
      teacher, `taught` are read.
    teacher: Weights of a teacher that the policy is compared with; None for none.
    learns_entropy: Whether a gradient may flow through the entropy.
    router_losses: Losses of a mixture of experts to return, among "balance" and "z".
    teacher_fn: The teacher's `Model.teacher`, for a teacher only.
    comparer: Comparison with the teacher, for a teacher only.
    teaches_itself: Whether the policy's own weights are the teacher's, without a gradient.

  Returns:
    Outputs in float32. Routes are aligned with the token that takes them, not with the token that
    it predicts.
  """
  sources = previous_slots(batch.segments, batch.prefixes)
  teacher = jax.lax.stop_gradient(params) if teaches_itself else teacher
  options = {} if teacher is None else {"teacher": teacher_fn(teacher, batch, sources, comparer)}
  logprobs, entropy, out = logprobs_fn(
    params, batch, sources, filter_logits=filter_logits, learns_entropy=learns_entropy, router_losses=bool(router_losses), **options
  )
  losses = {"balance": out.balance_loss, "z": out.z_loss}
  returned = {name: losses[name] for name in router_losses} or None
  return PolicyOutputs(
    logprobs, entropy, live_routing=out.live_routing, router_losses=returned, comparison=out.comparison, score_norm=out.score_norm
  )


def critic_outputs(values_fn: Callable, params: Params, batch: TrainBatch) -> PolicyOutputs:
  """Computes the critic's value of the state before each token of a batch.

  Values are shifted as in `policy_outputs`, and the log-probabilities are zeros. The first token of
  a segment has no state before it: its value is 0, and no mask ever counts it.

  Args:
    values_fn: `(params, tokens, positions, segments, prefixes) -> values [B T]` of the states after
      each token.
    params: The critic's weights.
    batch: Rows, of which `tokens`, `positions`, `segments` and `prefixes` are read.
  """
  after = values_fn(params, batch.tokens, batch.positions, batch.segments, batch.prefixes)
  sources = previous_slots(batch.segments, batch.prefixes)
  values = jnp.where(sources >= 0, at_slots(after[..., None], sources, in_order=batch.prefixes is None)[..., 0], 0)
  return PolicyOutputs(logprobs=jnp.zeros_like(values), values=values)


def sampler_gap(logprobs: Float[Array, "B T"], sampler_logprobs: Float[Array, "B T"]) -> TokenMetrics:
  """Measures the disagreement of learner and sampler about the sampled tokens.

  It is an engine mismatch if both hold the same weights. `rollout_corr/bits_equal` is the share of
  the tokens with the same log-probability to the last bit; 1.0 is no mismatch at all.
  """
  log_ratio = jax.lax.stop_gradient(logprobs - sampler_logprobs)
  gap = jnp.abs(log_ratio)
  return {
    **{f"rollout_corr/logprob_abs_diff/{statistic}": gap for statistic in ("mean", "max", "p99")},
    "rollout_corr/bits_equal": jax.lax.stop_gradient(logprobs == sampler_logprobs).astype(gap.dtype),
    "rollout_corr/kl": -log_ratio,
    "rollout_corr/k3_kl": jnp.expm1(log_ratio) - log_ratio,
  }


def router_term(outputs: PolicyOutputs, coefs: Mapping[str, float]) -> TokenTerm:
  """Returns the routers' own losses at each token, times their coefficients, and their metrics."""
  total = sum((coefs[name] * x for name, x in outputs.router_losses.items()), jnp.zeros_like(outputs.logprobs))
  return total, jax.lax.stop_gradient({f"moe/{name}_loss": x for name, x in outputs.router_losses.items()})


def split_rows(tree: PyTree, num_micro_batches: int) -> PyTree:
  """Splits rows into m micro-batches along a new first axis.

  Each micro-batch takes every m-th row, so that it keeps rows of every shard and no row moves.
  """
  return jax.tree.map(lambda x: x.reshape(-1, num_micro_batches, *x.shape[1:]).swapaxes(0, 1), tree)


def join_rows(tree: PyTree) -> PyTree:
  """Inverts `split_rows`."""
  return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def count_micro_batches(batch: TrainBatch, rows_at_once: int | None) -> int:
  """Returns the number of micro-batches of `rows_at_once` rows in a batch; None takes all rows."""
  return 1 if rows_at_once is None else len(batch.mask) // rows_at_once


def map_micro_batches(of_batch: Callable[[TrainBatch], PyTree], batch: TrainBatch, rows_at_once: int | None) -> PyTree:
  """Computes a function of a batch's rows in micro-batches, to bound its activations."""
  num_micro_batches = count_micro_batches(batch, rows_at_once)
  return (
    of_batch(batch)
    if num_micro_batches == 1
    else join_rows(jax.lax.map(of_batch, split_rows(batch, num_micro_batches)))
  )


class Losses(NamedTuple):
  """The loss of an update in parts, as it is linear in the tokens' weights.

  Attributes:
    weigh: `(batch) -> (batch, masks, weights)`: the global batch, prepared for the objective, and
      the mask and the weights `[B T]` of each term of the loss.
    of_tokens: `(params, batch, weights, *others) -> losses [B T]`: what each token of some of the
      rows of a prepared batch adds to the loss.
    gradients: `(trained, frozen, batch, weights, *others) -> ((loss, token metrics), gradients)` of
      some of the rows. Zero weights leave tokens out, so that parts of a batch add up to it.
  """

  weigh: Callable[[TrainBatch], tuple[TrainBatch, list[Float[Array, "B T"]], list[Float[Array, "B T"]]]]
  of_tokens: Callable[..., Float[Array, "B T"]]
  gradients: Callable[..., tuple[tuple[Float[Array, ""], list[TokenMetrics]], Params]]


def make_losses(
  outputs_fn: Callable[..., PolicyOutputs],
  objective: Objective,
  *,
  rows_at_once: int | None = None,
  name: str = "actor",
  router_coefs: Mapping[str, float] = MappingProxyType({}),
  streams: Sequence[Objective] = (),
  echo_coef: float = 0.0,
) -> Losses:
  """Makes the loss that an update minimises, and its gradient; see `make_train_step`."""

  # Wrong shapes would broadcast into a plausible loss. The checks run while tracing and cost
  # nothing per step.
  refusing = lambda reason: {"custom_message": f"{name}: {reason}", "exception_type": ValueError}

  # A loss outside the mask must not even be multiplied by its zero weight: 0 · inf is NaN.
  weighed = lambda weights, losses: jnp.where(weights > 0, weights * losses, 0)

  def weigh(batch: TrainBatch) -> tuple[TrainBatch, list[Float[Array, "B T"]], list[Float[Array, "B T"]]]:
    """Returns the mask and the weights of each term of the loss, in the order of `terms`."""
    batch = batch if objective.prepare is None else objective.prepare(batch)
    weights = [token_weights(each, batch.mask, batch.segments, batch.groups) for each in (objective, *streams)]
    # With the objective's weights, an auxiliary loss would be stronger in some objectives.
    auxiliary = [mask for mask in (batch.mask if router_coefs else None, batch.replies) if mask is not None]
    weights += [token_mean(mask, batch.segments) for mask in auxiliary]
    if batch.kept is not None:
      weights = [x * batch.kept for x in weights]
    return batch._replace(kept=None), [batch.mask] * (1 + len(streams)) + auxiliary, weights

  def terms(params: Params, batch: TrainBatch, weights: list[Float[Array, "B T"]], *others):
    """Returns the loss of each token in each term, without its weight, and its metrics."""
    # The model also scores the tokens of replies.
    scored = batch.mask if batch.replies is None else jnp.maximum(batch.mask, batch.replies)
    outputs = outputs_fn(params, batch._replace(mask=scored), *others)
    # An objective sees one number per token, and never a model.
    with jax.named_scope("loss"):
      seen = batch._replace(routing=None, images=None, replies=None, taught=None)
      plain = outputs._replace(live_routing=None, router_losses=None)
      terms = [objective.token_loss(plain._replace(comparison=None), seen), *(stream.token_loss(plain, seen) for stream in streams)]
    if router_coefs:
      terms.append(router_term(outputs, router_coefs))
    if batch.replies is not None:
      terms.append((-echo_coef * outputs.logprobs, {"echo/nll": jax.lax.stop_gradient(-outputs.logprobs)}))
    losses, metrics = map(list, zip(*terms, strict=True))
    numbers = [batch.mask, *weights, outputs.logprobs, *losses]
    chex.assert_equal_shape(
      numbers, **refusing("mask, weights, log-probabilities and losses need one number per token")
    )
    if outputs.live_routing is not None and batch.routing is not None:
      metrics[0] = metrics[0] | {"moe/replay_expert_change": routing.expert_change(outputs.live_routing, batch.routing)}
    if name == "actor" and batch.sampler_logprobs is not None:
      metrics[0] = metrics[0] | sampler_gap(outputs.logprobs, batch.sampler_logprobs)
    return losses, metrics

  def loss_fn(trained: Params, frozen: Params, batch: TrainBatch, weights: list[Float[Array, "B T"]], *others):
    losses, metrics = terms(combine(trained, frozen), batch, weights, *others)
    return sum(jnp.sum(weighed(*pair)) for pair in zip(weights, losses, strict=True)), metrics

  def of_tokens(params: Params, batch: TrainBatch, weights: list[Float[Array, "B T"]], *others) -> Float[Array, "B T"]:
    losses, _ = terms(params, batch, weights, *others)
    return sum(map(weighed, weights, losses))

  def gradients(trained: Params, frozen: Params, batch: TrainBatch, weights: list[Float[Array, "B T"]], *others):
    grad_fn, num_micro_batches = jax.value_and_grad(loss_fn, has_aux=True), count_micro_batches(batch, rows_at_once)
    if num_micro_batches == 1:
      return grad_fn(trained, frozen, batch, weights, *others)

    def body(total, micro_batch):
      (loss, metrics), grads = grad_fn(trained, frozen, *micro_batch, *others)
      return jax.tree.map(jnp.add, total, (loss, grads)), metrics

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    (loss, grads), metrics = jax.lax.scan(body, (jnp.zeros(()), zeros), split_rows((batch, weights), num_micro_batches))
    return (loss, join_rows(metrics)), grads

  return Losses(weigh, of_tokens, gradients)


def make_train_step(
  outputs_fn: Callable[..., PolicyOutputs],
  objective: Objective,
  optimizer: optax.GradientTransformation,
  *,
  learning_rate: optax.Schedule,
  rows_at_once: int | None = None,
  name: str = "actor",
  trainable: PyTree | None = None,
  router_coefs: Mapping[str, float] = MappingProxyType({}),
  streams: Sequence[Objective] = (),
  echo_coef: float = 0.0,
) -> TrainStepFn:
  """Makes a train step, which is one optimizer update.

  The weights w are computed once, on the whole global batch. Micro-batches then accumulate Σ w·l
  and its gradient in float32, so neither their number nor the device count changes the loss, the
  gradient or a metric. A non-finite update, i.e. a non-finite loss or gradient, changes only the
  counters: params, optimizer moments and schedule stay as they were.

  Args:
    outputs_fn: `(params, batch, *others) -> PolicyOutputs`.
    objective: Objective to minimise.
    optimizer: Optimizer whose state is `TrainState.opt_state`.
    learning_rate: Schedule inside `optimizer`, for the metric.
    rows_at_once: Number of rows of a micro-batch over all devices, which must divide the number of
      rows of each batch; None takes all rows at once.
    name: Name of what is trained, the first part of its metrics' names.
    trainable: Params tree with True for each weight that is trained; the others have neither
      gradient nor moments. None trains all.
    router_coefs: Weight of the mean of each router loss that `outputs_fn` returns, over the counted
      tokens of the global batch.
    streams: Further objectives, whose losses add up. Each has weights of its own, and thus a
      denominator of its own.
    echo_coef: Weight of the mean cross-entropy of `TrainBatch.replies` over the global batch
      (ECHO), in nats per token. The objective does not see replies.

  Returns:
    `(state, batch, *others) -> (state, metrics)`, to be jitted with the state donated. The others,
    such as a teacher's weights, go to `outputs_fn` and get no gradient.

  Raises:
    ValueError: If, when the step is traced, arrays of a batch differ in shape, the micro-batches do
      not divide the rows, the objective's losses or weights are not one number per token, or the
      optimizer changes the type of what it updates.

  Note:
    `optax.apply_if_finite` is not used: after its limit of errors it applies the next non-finite
    update.
  """
  refusing = lambda reason: {"custom_message": f"{name}: {reason}", "exception_type": ValueError}
  settings = dict(rows_at_once=rows_at_once, name=name, router_coefs=router_coefs, streams=streams, echo_coef=echo_coef)
  losses = make_losses(outputs_fn, objective, **settings)

  def train_step(state: TrainState, batch: TrainBatch, *others: Params) -> tuple[TrainState, Metrics]:
    # Pictures have rows, but no slots.
    text = batch._replace(images=None)
    chex.assert_tree_shape_prefix(text, batch.mask.shape, **refusing("every array of a batch must begin with the axes of its mask"))
    chex.assert_is_divisible(len(batch.mask), rows_at_once or 1, **refusing("micro-batches do not divide the rows"))
    batch, masks, weights = losses.weigh(batch)
    trained, frozen = partition(state.params, trainable)
    (loss, token_metrics), grads = losses.gradients(trained, frozen, batch, weights, *others)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    with jax.named_scope("optimizer"):
      updates, opt_state = optax.with_extra_args_support(optimizer).update(grads, state.opt_state, trained, finite=finite)
      updated = optax.apply_updates(trained, updates)
    # Arrays in host memory were already kept, if necessary, by their own update.
    keep = lambda new, old: jax.tree.map(lambda n, o: n if is_on_host(o) else jnp.where(finite, n, o), new, old)
    applied = state.step - state.skipped
    metrics = {}
    for of_term, mask, own in zip(token_metrics, masks, weights, strict=True):
      metrics |= reduce_metrics(of_term, mask, own)
    metrics |= {
      f"{name}/loss": loss,
      f"{name}/grad_norm": grad_norm,
      f"{name}/lr": jnp.asarray(learning_rate(applied), jnp.float32),
      ("train/skipped" if name == "actor" else f"{name}/skipped"): 1 - finite.astype(jnp.float32),
    }
    if batch.replies is not None:
      metrics["echo/num_tokens"] = jnp.sum(batch.replies)
    updated_state = TrainState(
      params=combine(keep(updated, trained), frozen),
      opt_state=keep(opt_state, state.opt_state),
      step=state.step + 1,
      skipped=state.skipped + 1 - finite.astype(jnp.int32),
    )
    changed = refusing("an update that changes a shape or a type would compile again at the next step")
    chex.assert_trees_all_equal_shapes_and_dtypes(updated_state, state, **changed)
    return updated_state, metrics

  return train_step


def init_state(params: Params, optimizer: optax.GradientTransformation, *, trainable: PyTree | None = None) -> TrainState:
  """Makes a fresh train state: step 0, and empty moments for the weights that are trained."""
  # Two separate arrays: the state is donated, and a buffer can be donated only once.
  opt_state = optimizer.init(partition(params, trainable)[0])
  return TrainState(params, opt_state, step=jnp.zeros((), jnp.int32), skipped=jnp.zeros((), jnp.int32))


def make_optimizer(
  *,
  learning_rate: float,
  warmup_steps: int,
  decay_steps: int = 0,
  weight_decay: float,
  b1: float,
  b2: float,
  max_grad_norm: float,
  moments_dtype: str = "float32",
  offload: bool = False,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Makes AdamW with global-norm clipping and a warm-up, and returns it with its schedule.

  The rate rises linearly, then stays constant or falls linearly.

  Args:
    learning_rate: Learning rate after warm-up.
    warmup_steps: Number of updates that climb to it; 0 starts at it.
    decay_steps: Number of updates after warm-up over which the rate falls linearly to 0; 0 keeps it
      constant.
    weight_decay: Decoupled weight decay. Excludes vectors and scalars (norm scales, biases), whose
      decay only shifts the function.
    b1: Decay of the first moment.
    b2: Decay of the second moment.
    max_grad_norm: Global norm to which larger gradients are scaled down.
    moments_dtype: Dtype of the first moment; the second has that of the weights.
    offload: Whether the state is in host memory; see `offload.offloaded`.

  Returns:
    The optimizer and its schedule.

  References:
    Decoupled weight decay regularization, arXiv:1711.05101, 2017.
  """
  schedule = make_schedule(learning_rate=learning_rate, warmup_steps=warmup_steps, decay_steps=decay_steps)

  def decayed(params: Params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale" and "bias" not in path[-1].key, params)

  adamw = in_bfloat16(optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=decayed, mu_dtype=moments_dtype))
  return optax.chain(optax.clip_by_global_norm(max_grad_norm), offloaded(adamw) if offload else adamw), schedule
