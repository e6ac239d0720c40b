"""Low-rank adapters on one frozen model: gradients of any loss, Adam, and merged weights."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from jaxrl_llm.devices.mesh import num_row_shards, place_tokens, platform_of, replicated
from jaxrl_llm.kernels.partial import CPU_BLOCK
from jaxrl_llm.learner.train_step import split_rows
from jaxrl_llm.models import Lora, Model, make_model, trainable
from jaxrl_llm.models.head import chunk_tokens, token_logprobs
from jaxrl_llm.models.linear import ADAPTER
from jaxrl_llm.models.lora import merged
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.segments import reduce_metrics, token_weights
from jaxrl_llm.serve.refusals import Refusal
from jaxrl_llm.serve.tinker.data import DataRows, Datum, pack
from jaxrl_llm.serve.tinker.losses import Loss, make_loss
from jaxrl_llm.types import Objective, Params, PolicyOutputs, TrainBatch

ALPHA = 32.0
"""Numerator of the scale of an adapter, alpha / rank, as in Tinker."""

_TOKENS_AT_ONCE = 2048
_MOST_PROGRAMS = 64


class Adam(NamedTuple):
  """Settings of one optimizer step.

  Attributes:
    learning_rate: Learning rate.
    beta1: Decay of the first moment.
    beta2: Decay of the second moment.
    eps: Term that is added to the denominator.
    weight_decay: Decoupled weight decay.
    grad_clip_norm: Global norm to which larger gradients are scaled down; 0 is none.
  """

  learning_rate: float = 1e-4
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-12
  weight_decay: float = 0.0
  grad_clip_norm: float = 0.0


class Trained(NamedTuple):
  """What training changes of an adapter.

  Attributes:
    weights: Matrices of the adapter.
    moments: State of Adam.
  """

  weights: Params
  moments: optax.OptState


class Outputs(NamedTuple):
  """Outcome of a loss on data.

  Attributes:
    logprobs: Log-probability of each target of each datum.
    metrics: Metrics by name; the part behind the colon says how parts of a batch are joined.
    gradients: Gradient of the loss in the weights of the adapter; None if not wanted.
  """

  logprobs: list[Float[np.ndarray, "n k"]]
  metrics: dict[str, float]
  gradients: Params | None


class Learner:
  """Programs of all adapters of one shape on one model. They share the frozen weights.

  Args:
    base: Model without adapters.
    params: Params of the model, which stay as they are.
    lora: Shape of the adapters.

  Raises:
    ValueError: If the adapters would adapt nothing. One line.
  """

  def __init__(self, base: Model, params: Params, lora: Lora):
    self.model = make_model(base.config._replace(lora=lora, remat="none"), mesh=base.mesh)
    # A long row would not fit with all activations of its forward pass.
    self._of_long_rows = make_model(self.model.config._replace(remat="full"), mesh=base.mesh)
    is_trained = trainable(self.model.config, self.model.logical_axes)
    self._frozen = _beside_adapters(params, is_trained)
    mesh, out = base.mesh, {} if base.mesh is None else {"out_shardings": replicated(base.mesh)}
    self._shards = 1 if mesh is None else num_row_shards(mesh)
    # On a CPU a datum's numbers then do not depend on the others of its row.
    self._unit = CPU_BLOCK if platform_of(mesh) == "cpu" else 1
    self._init = jax.jit(lambda key: partition(self.model.init(key), is_trained)[0], **out)
    self._merge = jax.jit(lambda trained, frozen: merged(self.model.config, combine(trained, frozen)))
    self._step, self._add = jax.jit(_adam_step), jax.jit(partial(jax.tree.map, jnp.add))
    self._reduce = jax.jit(reduce_metrics)
    self._programs: OrderedDict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = OrderedDict()

  def begin(self, seed: int) -> Trained:
    """Returns a new adapter, which changes nothing yet."""
    weights = self._init(jax.random.key(seed))
    return Trained(weights, optax.scale_by_adam().init(weights))

  def placed(self, arrays: PyTree) -> PyTree:
    """Places arrays from host memory where those of an adapter lie."""
    return (
      jax.device_put(arrays)
      if self.model.mesh is None
      else jax.device_put(arrays, replicated(self.model.mesh))
    )

  def merged(self, weights: Params) -> Params:
    """Returns the params of the model without adapters that computes the same."""
    return self._merge(weights, self._frozen)

  def add(self, gradients: Params, more: Params) -> Params:
    """Returns the sum of two gradients."""
    return self._add(gradients, more)

  def step(self, trained: Trained, gradients: Params, settings: Adam) -> tuple[Trained, float]:
    """Takes one step of Adam.

    Returns:
      The adapter and the norm of the gradient before it is clipped.

    Raises:
      Refusal: If the gradient or what would become of the adapter is not finite.
    """
    after, norm, is_finite = self._step(trained, gradients, settings)
    if not is_finite:
      raise Refusal(
        400,
        "optim_step: the gradient or the weights after it are not finite; nothing has changed, and the gradient is gone",
      )
    return after, float(norm)

  def compute(self, weights: Params, data: Sequence[Datum], loss: Loss, *, forward_only: bool) -> Outputs:
    """Computes a loss on data, and its gradient.

    Raises:
      Refusal: If the loss is not finite.
    """
    rows, places, at_once = pack(data, loss, budget=_TOKENS_AT_ONCE, shards=self._shards, unit=self._unit)
    is_long = rows.tokens.shape[1] > _TOKENS_AT_ONCE
    weigh, program = self._programs_of(loss, forward_only, is_long)
    batch, token_weight = weigh(rows.batch)
    parts, total = [], None
    pieces = split_rows((rows._replace(batch=batch), token_weight), len(rows.tokens) // at_once)
    for i in range(len(rows.tokens) // at_once):
      piece = jax.tree.map(lambda x, i=i: x[i], pieces)
      outputs, gradients = program(weights, self._frozen, *self._placed(piece))
      total = gradients if total is None else self._add(total, gradients)
      parts.append(jax.device_get(outputs))
    # The inverse of `split_rows`, on the host.
    of_rows = jax.tree.map(lambda *x: np.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *parts)
    logprobs, losses, of_tokens = of_rows
    weights_there = np.asarray(token_weight)
    value = float(np.sum(np.where(weights_there != 0, weights_there * losses, 0), dtype=np.float64))
    if not np.isfinite(value):
      raise Refusal(
        400, f"loss_fn: the loss {loss.name!r} is not finite on these data; no gradient has been added"
      )
    reduced = jax.device_get(self._reduce(of_tokens, batch.mask, token_weight))
    metrics = {f"{name}:mean": float(x) for name, x in reduced.items()}
    width = data[0].targets.shape[1]
    of_data = [
      logprobs[row].reshape(-1, width)[start : start + len(datum.tokens)]
      for (row, start), datum in zip(places, data, strict=True)
    ]
    return Outputs(of_data, {"loss:sum": value, **metrics}, total)

  def score(self, weights: Params, ids: Sequence[int]) -> Float[np.ndarray, " n"]:
    """Returns the log-probability of each id but the first, to the bit as `compute` does."""
    if len(ids) < 2:
      return np.zeros(0, np.float32)
    targets = np.asarray(ids[1:])[:, None]
    data = [Datum(np.asarray(ids[:-1]), targets, {"weights": np.ones(targets.shape, np.float32)})]
    return self.compute(weights, data, make_loss("cross_entropy", {}), forward_only=True).logprobs[0][:, 0]

  def _placed(self, piece: PyTree) -> PyTree:
    mesh = self.model.mesh
    return piece if mesh is None else place_tokens(mesh, piece)

  def _programs_of(
    self, loss: Loss, forward_only: bool, is_long: bool
  ) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the jitted programs of a loss: weights of a whole batch, and the loss of some rows.

    Those that were not used for longest are dropped.
    """
    key = loss.name, loss.settings, forward_only, is_long
    if key not in self._programs:
      model = self._of_long_rows if is_long else self.model
      of_rows = partial(_loss_of_rows, model, loss.objective)

      def with_gradient(trained: Params, frozen: Params, rows: DataRows, weights: Array):
        (_, outputs), gradients = jax.value_and_grad(of_rows, has_aux=True)(trained, frozen, rows, weights)
        return outputs, gradients

      program = jax.jit((lambda *args: (of_rows(*args)[1], None)) if forward_only else with_gradient)
      self._programs[key] = jax.jit(partial(_weighed, loss.objective)), program
    self._programs.move_to_end(key)
    if len(self._programs) > _MOST_PROGRAMS:
      self._programs.popitem(last=False)
    return self._programs[key]


def _weighed(objective: Objective, batch: TrainBatch) -> tuple[TrainBatch, Float[Array, "B T"]]:
  """Prepares a whole batch for an objective, and computes its weights."""
  batch = batch if objective.prepare is None else objective.prepare(batch)
  return batch, token_weights(objective, batch.mask, batch.segments, batch.groups)


def _beside_adapters(params: Params, like: PyTree) -> Params:
  """Returns the params with None in place of the adapters that a tree of the same form has."""
  pick = lambda name, x: (
    _beside_adapters(params[name], x) if isinstance(x, Mapping) else None if ADAPTER in name else params[name]
  )
  return {name: pick(name, x) for name, x in like.items()}


def _loss_of_rows(
  model: Model,
  objective: Objective,
  trained: Params,
  frozen: Params,
  rows: DataRows,
  weights: Float[Array, "B T"],
):
  """Computes the loss Σ w·l of rows; returns also the log-probabilities, the losses and metrics."""
  params, batch = combine(trained, frozen), rows.batch
  hidden = model.hidden(params, rows.tokens, rows.positions, rows.segments).hidden
  width = batch.tokens.shape[1] // rows.tokens.shape[1]
  names = ("embedding",) if model.config.tie_embeddings else ("head", f"head{ADAPTER}a", f"head{ADAPTER}b")
  logprobs, entropy, *_ = token_logprobs(
    {name: params[name] for name in names if name in params},
    hidden if width == 1 else jnp.repeat(hidden, width, axis=1),
    batch.tokens,
    batch.segments > 0,
    unembed=model.unembed,
    filter_logits=lambda logits, keep: logits,
    chunk=model.config.head_tokens or chunk_tokens(model.config.vocab_size, model.mesh),
    learns_entropy="entropy" in objective.needs,
    mesh=model.mesh,
  )
  losses, metrics = objective.token_loss(PolicyOutputs(logprobs, entropy), batch)
  # A loss outside the mask must not even be multiplied by its zero weight: 0 · inf is NaN.
  return jnp.sum(jnp.where(weights != 0, weights * losses, 0)), (logprobs, losses, metrics)


def _adam_step(trained: Trained, gradients: Params, settings: Adam) -> tuple[Trained, Array, Array]:
  """Returns the adapter after a step, the norm of the gradient, and whether all is finite."""
  norm = optax.tree.norm(gradients)
  limit = settings.grad_clip_norm
  scale = jnp.where((limit > 0) & (norm > limit), limit / jnp.maximum(norm, 1e-30), 1.0)
  adam = optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)
  updates, moments = adam.update(jax.tree.map(lambda g: scale * g, gradients), trained.moments)
  rate, decay = settings.learning_rate, settings.weight_decay
  weights = jax.tree.map(lambda w, u: w - rate * (u + decay * w), trained.weights, updates)
  return Trained(weights, moments), norm, jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(weights))
