"""From logits to the distribution that tokens are drawn from: temperature, top-k, top-p. Sampler and learner use the same function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

FilterFn = Callable[..., Float[Array, "*batch V"]]
"""`(logits, keep=None) -> filtered logits`; `keep` holds ids that no filter may remove."""

# Finite, so that gradients of a filtered-out logit are 0 and never NaN; exp(-1e30 - max) underflows to exactly 0.
REMOVED = -1e30


def make_filter(*, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> FilterFn:
  """Logits of the sampling distribution.

  Args:
    temperature: divides the logits; above 0.
    top_k: keep the k likeliest tokens (and ties of the k-th); 0 keeps all.
    top_p: keep the smallest set of likeliest tokens whose probability reaches p, after top-k; 1 keeps all.

  Returns:
    `filter_logits(logits, keep=None)`. With `keep`, ids `[*batch]` that stay whatever the filters say: the learner passes the token
    that was drawn, since the current policy may rank it outside its own set, where its log-probability would be -inf.

  Raises:
    ValueError: a setting out of range.

  Example:
    >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    >>> jax.nn.softmax(make_filter(top_k=2)(logits)).round(3).tolist()
    [0.625, 0.375, 0.0]
  """
  if not temperature > 0:
    raise ValueError(f"rollout.temperature: found {temperature}, expected a number above 0")
  if top_k < 0:
    raise ValueError(f"rollout.top_k: found {top_k}, expected 0 (keep all) or a positive number of tokens")
  if not 0 < top_p <= 1:
    raise ValueError(f"rollout.top_p: found {top_p}, expected a number in (0, 1]")

  def filter_logits(logits: Float[Array, "*batch V"], keep: Int[Array, "*batch"] | None = None) -> Float[Array, "*batch V"]:
    logits = logits.astype(jnp.float32) / temperature
    kept = jnp.ones(logits.shape, bool)
    if 0 < top_k < logits.shape[-1]:
      kept &= logits >= jax.lax.top_k(logits, top_k)[0][..., -1:]
    if top_p < 1:
      probs = jax.nn.softmax(jnp.where(kept, logits, REMOVED), axis=-1)
      ranked = -jnp.sort(-probs, axis=-1)
      # A token stays while the mass ranked strictly above it has not reached p, so the likeliest always stays.
      in_nucleus = jnp.cumsum(ranked, axis=-1) - ranked < top_p
      threshold = jnp.min(jnp.where(in_nucleus, ranked, jnp.inf), axis=-1, keepdims=True)
      kept &= probs >= threshold
    if keep is not None:
      kept |= jnp.arange(logits.shape[-1]) == keep[..., None]
    return jnp.where(kept, logits, REMOVED)

  return filter_logits
