"""From a packed batch to new weights: `policy_outputs` (the one place with the shift by one) and `make_train_step`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jaxrl_llm.devices.offload import is_on_host, offloaded
from jaxrl_llm.models import routing
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.segments import at_slots, previous_slots, reduce_metrics
from jaxrl_llm.types import Forward, Metrics, Objective, Params, PolicyOutputs, TokenMetrics, TokenTerm, TrainBatch, TrainState

TrainStepFn = Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]

LogprobsFn = Callable[..., tuple[Float[Array, "B T"], Float[Array, "B T"], Forward]]
"""`(params, batch, sources, *, filter_logits, learns_entropy, router_losses) -> (logprobs, entropy, Forward)`: of each token of the batch
whose mask is above 0, from the hidden state at its slot of `sources`. Other tokens read 0, and cost nothing in the output head."""


def policy_outputs(
  logprobs_fn: LogprobsFn,
  filter_logits: Callable,
  params: Params,
  batch: TrainBatch,
  *,
  learns_entropy: bool = True,
  router_losses: tuple[str, ...] = (),
) -> PolicyOutputs:
  """Log-probability and entropy of every counted token of a batch under the policy that `filter_logits` makes of the logits.

  The state after one token gives the log-probability of the next; here, and nowhere else, the two are brought together, so that
  everything is aligned with `batch.tokens`. Only tokens whose mask is above 0 are computed; a first token, which nothing comes before,
  is none of them.

  Args:
    logprobs_fn: the model's `logprobs`.
    filter_logits: `(logits, keep) -> logits` of the sampling distribution, the sampler's own function.
    params: the model's weights.
    batch: rows; of it `tokens`, `positions`, `segments`, `prefixes`, `mask` and `routing` are read.
    learns_entropy: whether a gradient may flow through the entropy.
    router_losses: of "balance" and "z", those to return, of a mixture of experts.

  Returns:
    Outputs in float32. Routes are aligned with the token that travels them, not with the one that it predicts.
  """
  sources = previous_slots(batch.segments, batch.prefixes)
  logprobs, entropy, out = logprobs_fn(
    params, batch, sources, filter_logits=filter_logits, learns_entropy=learns_entropy, router_losses=bool(router_losses)
  )
  losses = {"balance": out.balance_loss, "z": out.z_loss}
  found = {name: losses[name] for name in router_losses} or None
  return PolicyOutputs(logprobs, entropy, live_routing=out.live_routing, router_losses=found)


def critic_outputs(values_fn: Callable, params: Params, batch: TrainBatch) -> PolicyOutputs:
  """The critic's value of the state before each token of a batch, shifted like `policy_outputs`; the log-probabilities are zeros.

  The first token of a segment has no state before it: its value is 0, and no mask ever counts it. `values_fn` is
  `(params, tokens, positions, segments, prefixes) -> values [B T]` of the states after each token.
  """
  after = values_fn(params, batch.tokens, batch.positions, batch.segments, batch.prefixes)
  sources = previous_slots(batch.segments, batch.prefixes)
  values = jnp.where(sources >= 0, at_slots(after[..., None], sources, in_order=batch.prefixes is None)[..., 0], 0)
  return PolicyOutputs(logprobs=jnp.zeros_like(values), values=values)


def sampler_gap(logprobs: Float[Array, "B T"], sampler_logprobs: Float[Array, "B T"]) -> TokenMetrics:
  """How far the learner and the sampler disagree about the tokens drawn: an engine mismatch, where both hold the same weights."""
  log_ratio = jax.lax.stop_gradient(logprobs - sampler_logprobs)
  gap = jnp.abs(log_ratio)
  return {
    "rollout_corr/logprob_abs_diff/mean": gap,
    "rollout_corr/logprob_abs_diff/max": gap,
    "rollout_corr/kl": -log_ratio,
    "rollout_corr/k3_kl": jnp.expm1(log_ratio) - log_ratio,
  }


def router_terms(outputs: PolicyOutputs, batch: TrainBatch, coefs: Mapping[str, float]) -> TokenTerm:
  """What a mixture of experts adds: the routers' own losses at each token, and how far their choice is from the routes replayed."""
  losses = outputs.router_losses or {}
  total = sum((coefs[name] * x for name, x in losses.items()), jnp.zeros_like(outputs.logprobs))
  metrics = {f"moe/{name}_loss": x for name, x in losses.items()}
  if outputs.live_routing is not None and batch.routing is not None:
    metrics["moe/replay_expert_change"] = routing.expert_change(outputs.live_routing, batch.routing)
  return total, jax.tree.map(jax.lax.stop_gradient, metrics)


def split_rows(tree: PyTree, num_pieces: int) -> PyTree:
  """Rows as that many micro-batches, along a new first axis: every m-th row, so that each keeps rows of every shard and none moves."""
  return jax.tree.map(lambda x: x.reshape(-1, num_pieces, *x.shape[1:]).swapaxes(0, 1), tree)


def join_rows(tree: PyTree) -> PyTree:
  """What `split_rows` took apart."""
  return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def in_pieces(of_batch: Callable[[TrainBatch], PyTree], batch: TrainBatch, num_pieces: int) -> PyTree:
  """A function of a batch's rows, computed in the micro-batches of an update, whose activations fit."""
  return of_batch(batch) if num_pieces == 1 else join_rows(jax.lax.map(of_batch, split_rows(batch, num_pieces)))


def make_train_step(
  outputs_fn: Callable[[Params, TrainBatch], PolicyOutputs],
  objective: Objective,
  optimizer: optax.GradientTransformation,
  *,
  learning_rate: optax.Schedule,
  num_micro_batches: int = 1,
  name: str = "actor",
  trainable: PyTree | None = None,
  router_coefs: Mapping[str, float] = MappingProxyType({}),
) -> TrainStepFn:
  """One optimizer update.

  The weights w are computed once, on the whole global batch; micro-batches then add up Σ w·l and its gradient in float32, so neither
  their number nor the device count changes the loss, the gradient or a metric. An update whose loss or gradient is not finite changes
  nothing but the counters: params, optimizer moments and schedule stay as they were.

  Args:
    outputs_fn: `(params, batch) -> PolicyOutputs`.
    objective: what to minimise.
    optimizer: its state is `TrainState.opt_state`.
    learning_rate: the schedule inside `optimizer`, for the metric.
    num_micro_batches: pieces of the batch; must divide its rows.
    name: what is trained, the first part of its metrics' names.
    trainable: the params tree with True where a weight is trained, and nothing else has a gradient or moments; None is everywhere.
    router_coefs: weight of each of the router losses that `outputs_fn` returns.

  Returns:
    `(state, batch) -> (state, metrics)`, to be jitted with the state donated.

  Raises:
    ValueError: While the step is traced: arrays of a batch that differ in shape, rows that the micro-batches do not divide, an objective
      whose losses or weights are not one number a token, or an optimizer that changes the type of what it updates.

  Note:
    `optax.apply_if_finite` is not used: after its limit of errors it lets the next bad update through.
  """

  # Wrong shapes would broadcast into a loss that looks like one. They are found while the step is traced: no step pays for it.
  refusing = lambda reason: {"custom_message": f"{name}: {reason}", "exception_type": ValueError}

  def loss_fn(trained: Params, frozen: Params, batch: TrainBatch, weights: Float[Array, "B T"]):
    outputs = outputs_fn(combine(trained, frozen), batch)
    # An objective sees one number a token, and never a model.
    with jax.named_scope("loss"):
      losses, metrics = objective.token_loss(outputs._replace(live_routing=None, router_losses=None), batch._replace(routing=None))
    numbers = [batch.mask, weights, outputs.logprobs, losses]
    chex.assert_equal_shape(numbers, **refusing("mask, weights, log-probabilities and losses are one number a token"))
    further, router_metrics = router_terms(outputs, batch, router_coefs)
    losses, metrics = losses + further, metrics | router_metrics
    if name == "actor" and batch.sampler_logprobs is not None:
      metrics = metrics | sampler_gap(outputs.logprobs, batch.sampler_logprobs)
    # A loss off the mask must not even meet its zero weight: 0 · inf is NaN.
    return jnp.sum(jnp.where(weights > 0, weights * losses, 0)), metrics

  def accumulate(trained: Params, frozen: Params, batch: TrainBatch, weights: Float[Array, "B T"]):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if num_micro_batches == 1:
      return grad_fn(trained, frozen, batch, weights)

    def body(total, piece):
      (loss, metrics), grads = grad_fn(trained, frozen, *piece)
      return jax.tree.map(jnp.add, total, (loss, grads)), metrics

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    (loss, grads), metrics = jax.lax.scan(body, (jnp.zeros(()), zeros), split_rows((batch, weights), num_micro_batches))
    return (loss, join_rows(metrics)), grads

  def train_step(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
    chex.assert_tree_shape_prefix(batch, batch.mask.shape, **refusing("every array of a batch begins with the axes of its mask"))
    chex.assert_is_divisible(len(batch.mask), num_micro_batches, **refusing("micro-batches do not divide the rows"))
    weights = objective.weigh(batch.mask, batch.segments)
    trained, frozen = partition(state.params, trainable)
    (loss, token_metrics), grads = accumulate(trained, frozen, batch, weights)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    with jax.named_scope("optimizer"):
      updates, opt_state = optax.with_extra_args_support(optimizer).update(grads, state.opt_state, trained, finite=finite)
      updated = optax.apply_updates(trained, updates)
    # What lies in host memory has been kept where it had to be by its own update.
    keep = lambda new, old: jax.tree.map(lambda n, o: n if is_on_host(o) else jnp.where(finite, n, o), new, old)
    applied = state.step - state.skipped
    metrics = reduce_metrics(token_metrics, batch.mask, weights)
    metrics |= {
      f"{name}/loss": loss,
      f"{name}/grad_norm": grad_norm,
      f"{name}/lr": jnp.asarray(learning_rate(applied), jnp.float32),
      ("train/skipped" if name == "actor" else f"{name}/skipped"): 1 - finite.astype(jnp.float32),
    }
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
  """A fresh train state around `params`: step 0, empty moments for the weights that are trained."""
  # Two arrays, not one twice: the state is donated, and a buffer can be donated only once.
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
  """AdamW after global-norm clipping, with a linear warm-up to a constant rate or a linear decay; and the schedule itself.

  Args:
    learning_rate: after warm-up.
    warmup_steps: updates that climb to it; 0 starts at it.
    decay_steps: updates after warm-up over which it falls linearly to 0; 0 keeps it constant.
    weight_decay: decoupled, not for vectors and scalars (norm scales, biases), whose decay only shifts the function.
    b1: decay of the first moment.
    b2: decay of the second moment.
    max_grad_norm: gradients with a larger global norm are scaled down to it.
    moments_dtype: of the first moment; the second has that of the weights.
    offload: for a state in host memory; see `offload.offloaded`.

  References:
    Decoupled weight decay regularization, arXiv:1711.05101, 2017.
  """
  # The first update already moves: a rate of 0 would waste it.
  climb = optax.linear_schedule(learning_rate / max(warmup_steps, 1), learning_rate, max(warmup_steps - 1, 1))
  rest = optax.linear_schedule(learning_rate, 0.0, decay_steps) if decay_steps else optax.constant_schedule(learning_rate)
  schedule = optax.join_schedules([climb, rest], [warmup_steps])

  def decayed(params: Params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale" and "bias" not in path[-1].key, params)

  adamw = optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=decayed, mu_dtype=moments_dtype)
  return optax.chain(optax.clip_by_global_norm(max_grad_norm), offloaded(adamw) if offload else adamw), schedule
