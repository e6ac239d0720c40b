"""Measurement of objectives on one batch: noise, signal and bias of their gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxrl_llm.learner.gradient_noise import (
  Cotangents,
  Moments,
  bias,
  cotangents,
  effective_share,
  joined,
  multipliers,
  noise,
  plain,
  stacked,
  units_of,
)
from jaxrl_llm.types import Objective, Params, PolicyOutputs, TrainBatch

PLAIN = "no ratio"
"""Name of the policy gradient without a ratio, with the weights of the objective beside it."""

WHOLE = "all"
"""Name of the part of all tokens."""

OutputsFn = Callable[[Params, TrainBatch], PolicyOutputs]
MomentsFn = Callable[[Params, TrainBatch, Cotangents, np.ndarray], Moments]
Parts = Callable[[TrainBatch, Cotangents, Cotangents], Mapping[str, Cotangents]]
"""`(batch, of objective, of plain) -> gradients by name` of parts of the tokens."""


class _Loss(NamedTuple):
  objective: str
  part: str


class Measured(NamedTuple):
  """Moments of one kind of responses, under every loss.

  Attributes:
    places: Place of each loss in the moments. Losses with equal gradients share one.
    moments: Moments of the responses' gradients.
    clipped: Share of the tokens with an advantage that an objective gives no gradient, by name.
    effective: Effective share of the responses, by name of the objective; see `effective_share`.
  """

  places: dict[_Loss, int]
  moments: Moments
  clipped: dict[str, float]
  effective: dict[str, float]


def early_and_late(batch: TrainBatch, own: Cotangents, of_plain: Cotangents) -> dict[str, Cotangents]:
  """Splits an objective's gradient into the first and the second half of each response."""
  del of_plain
  segments = np.asarray(batch.segments)
  mask, late = np.asarray(batch.mask) > 0, np.zeros(segments.shape, bool)
  for row, segment, _ in units_of(batch):
    places = np.flatnonzero(mask[row] & (segments[row] == segment))
    late[row, places[(len(places) + 1) // 2 :]] = True
  return {"early": _only(own, jnp.asarray(~late)), "late": _only(own, jnp.asarray(late))}


def rare_and_frequent(batch: TrainBatch, own: Cotangents, of_plain: Cotangents) -> dict[str, Cotangents]:
  """Splits an objective's gradient at the median probability with which tokens were drawn."""
  del of_plain
  is_rare = batch.old_logprobs <= np.median(np.asarray(batch.old_logprobs)[np.asarray(batch.mask) > 0])
  return {"rare": _only(own, is_rare), "frequent": _only(own, ~is_rare)}


def clipped_and_kept(batch: TrainBatch, own: Cotangents, of_plain: Cotangents) -> dict[str, Cotangents]:
  """Splits the gradient without a ratio into tokens that the objective leaves out, and others."""
  del batch
  is_clipped = own.logprobs == 0
  return {"clipped": _only(of_plain, is_clipped), "kept": _only(of_plain, ~is_clipped)}


PARTS: dict[str, Parts] = {"halves": early_and_late, "frequency": rare_and_frequent, "clip": clipped_and_kept}
"""Splits of tokens by name."""


def measure(
  batches: Sequence[TrainBatch],
  params: Params,
  losses: Mapping[str, Objective],
  *,
  outputs_fn: OutputsFn,
  moments_fn: MomentsFn,
  parts: Sequence[Parts] = (),
  only_plain: bool = False,
) -> Measured:
  """Computes the moments of all losses over the responses of batches of equal size.

  Beside each objective, the gradient without a ratio is measured with the same weights.

  Args:
    batches: Batches, each with the advantages and log-probabilities that the objectives read.
    params: Weights of the policy.
    losses: Objectives by name.
    outputs_fn: Function `(params, batch) -> PolicyOutputs`, compiled.
    moments_fn: Function made by `make_moments`.
    parts: Splits of the tokens, whose parts are measured as well.
    only_plain: Whether to measure the gradients without a ratio alone.
  """
  of_batches: list[dict[_Loss, Cotangents]] = []
  weights: dict[str, list] = {name: [] for name in losses}
  gated: dict[str, list] = {name: [] for name in losses}
  for batch in batches:
    outputs, own = outputs_fn(params, batch), {}
    for name, objective in losses.items():
      own[_Loss(name, PLAIN)] = of_plain = cotangents(plain(objective), outputs, batch)
      if only_plain:
        continue
      own[_Loss(name, WHOLE)] = of_loss = cotangents(objective, outputs, batch)
      own |= {_Loss(name, part): x for split in parts for part, x in split(batch, of_loss, of_plain).items()}
      weights[name].append(multipliers(of_loss.logprobs, of_plain.logprobs, units_of(batch), batch))
      gated[name].append(np.asarray(of_loss.logprobs == 0)[np.asarray(of_plain.logprobs != 0)])
    of_batches.append(own)
  places, kept = _unique(of_batches)
  of_batch = lambda batch, own: moments_fn(params, batch, stacked([own[loss] for loss in kept]), units_of(batch))
  moments = joined([of_batch(*both) for both in zip(batches, of_batches, strict=True)])
  gated, weights = ({name: np.concatenate(x) for name, x in of.items() if x} for of in (gated, weights))
  clipped = {name: float(np.mean(x)) if len(x) else math.nan for name, x in gated.items()}
  return Measured(places, moments, clipped, {name: effective_share(x) for name, x in weights.items()})


def _unique(of_batches: Sequence[Mapping[_Loss, Cotangents]]) -> tuple[dict[_Loss, int], list[_Loss]]:
  """Returns the place of each loss among those that differ in a batch, and the losses there."""
  places, kept = {}, {}
  for loss in of_batches[0]:
    key = b"".join(np.asarray(x).tobytes() for own in of_batches for x in own[loss] if x is not None)
    places[loss] = kept.setdefault(key, (len(kept), loss))[0]
  return places, [loss for _, loss in kept.values()]


def _only(own: Cotangents, mask: Bool[Array, "B T"]) -> Cotangents:
  kept = lambda x: None if x is None else jnp.where(mask, x, 0)
  return Cotangents(kept(own.logprobs), kept(own.entropy))


def rows_of(measured: Measured, fresh: Measured | None = None) -> list[dict[str, Any]]:
  """Returns a row for each objective and part, as a table or a file shows them.

  Args:
    measured: Moments on the responses of the old policy.
    fresh: Moments on responses that the policy itself has drawn; None leaves out the comparison
      with their gradient without a ratio.

  Returns:
    Rows with `objective`, `part`, the fields of `Noise`, and `inflation`: the noise relative to
    that of the gradient without a ratio. The part "all" also has `clipped` and `effective`, and
    with `fresh` the fields of `Bias`.
  """
  rows, places = [], measured.places
  for loss, k in places.items():
    own, of_plain = noise(measured.moments, k), noise(measured.moments, places[_Loss(loss.objective, PLAIN)])
    row = {"objective": loss.objective, "part": loss.part} | own._asdict()
    row["inflation"] = own.noise / of_plain.noise if of_plain.noise > 0 else math.nan
    if loss.part == WHOLE:
      row |= {"clipped": measured.clipped[loss.objective], "effective": measured.effective[loss.objective]}
    if fresh is not None and loss.part in (WHOLE, PLAIN):
      row |= bias(measured.moments, k, fresh.moments, fresh.places[_Loss(loss.objective, PLAIN)])._asdict()
    rows.append(row)
  return rows
