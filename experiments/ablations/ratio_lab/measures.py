"""Measures of log-ratios, and straight lines through them. No model is involved."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm import objectives

PAPER_TOKENS = 4096
"""Response length for which GSPO's clip is assumed to be made, in tokens.

The paper does not state it, but its responses have lengths of this order.
"""

GSPO_CLIP = (3e-4, 4e-4)
GRPO_CLIP = (0.2, 0.27)
"""Clips of GSPO and GRPO in the GSPO paper, as widths below and above 1."""

SCALES = (0.3, 1.0, 3.0)  # Factors of the width of GSPO's band.


def sequence_clip(num_tokens: int, scale: float = 1.0) -> tuple[float, float]:
  """Computes GSPO's clip for responses of a given length T.

  ε(T) = scale·ε_paper·√(PAPER_TOKENS/T)

  The band follows the spread of log s, which falls as 1/√T.

  Example:
    >>> [round(epsilon, 6) for epsilon in sequence_clip(64)]
    [0.0024, 0.0032]
  """
  root = scale * math.sqrt(PAPER_TOKENS / num_tokens)
  return GSPO_CLIP[0] * root, GSPO_CLIP[1] * root


def matched_clip(num_tokens: int) -> tuple[float, float]:
  """Computes a clip for s that is as wide as GRPO's clip for r, each in units of its own spread.

  ε(T) = ε_GRPO/√T
  """
  return GRPO_CLIP[0] / math.sqrt(num_tokens), GRPO_CLIP[1] / math.sqrt(num_tokens)


def clip_fractions(log_ratio: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
  """Measures the fractions of the same tokens that each rule clips.

  The fractions are those that the objectives report.

  Args:
    log_ratio: Log-ratio of the tokens, [N, T].
    advantages: Advantages of the responses, [N].

  Returns:
    The clipped fraction of each rule: `grpo`, `gspo_x0.3`, `gspo_x1`, `gspo_x3` and `gspo_matched`.
  """
  num_tokens = log_ratio.shape[1]
  bands = {f"gspo_x{scale:g}": sequence_clip(num_tokens, scale) for scale in SCALES} | {"gspo_matched": matched_clip(num_tokens)}
  rules = {"grpo": objectives.make("grpo", clip_low=GRPO_CLIP[0], clip_high=GRPO_CLIP[1], kl_coef=0.0)}
  rules |= {name: objectives.make("gspo", clip_low=low, clip_high=high) for name, (low, high) in bands.items()}
  zeros, ones = np.zeros_like(log_ratio), np.ones_like(log_ratio)
  return {
    # Only the ratio counts, so the old log-probabilities are set to 0.
    name: float(objectives.value(rule, log_ratio, zeros, advantages, ones)[1]["actor/pg_clipfrac"])
    for name, rule in rules.items()
  }


def ratio_statistics(log_ratio: np.ndarray) -> dict[str, float]:
  """Measures the spread of token and sequence ratios.

  Args:
    log_ratio: Log-ratio of the tokens of responses that the old policy drew, [N, T]. All responses
      have the same length.

  Returns:
    `var_rho`, the variance of ρ, the product of the token ratios of a sequence; `std_s` and
    `std_log_s`, the standard deviations of s, the T-th root of ρ, and of its log; `std_z` and
    `mean_z`, standard deviation and mean of the token log-ratio; `mean_max_r`, the mean over the
    responses of their largest token ratio; `ess_tokens` and `ess_sequences`, effective sample sizes
    as fractions of the numbers of tokens and sequences.
  """
  z = np.asarray(log_ratio, np.float64)
  ratio, product, log_s = np.exp(z), np.exp(np.sum(z, axis=1)), np.mean(z, axis=1)
  return {
    "var_rho": float(np.var(product, ddof=1)),
    "std_s": float(np.std(np.exp(log_s), ddof=1)),
    "std_log_s": float(np.std(log_s, ddof=1)),
    "std_z": float(np.std(z)),
    "mean_z": float(np.mean(z)),
    "mean_max_r": float(np.mean(np.max(ratio, axis=1))),
    "ess_tokens": effective_fraction(ratio),
    "ess_sequences": effective_fraction(product),
  }


def effective_fraction(weights: np.ndarray) -> float:
  """Computes the effective sample size of importance weights over their number: (Σw)²/(n·Σw²)."""
  return float(np.sum(weights) ** 2 / (weights.size * np.sum(weights**2)))


def with_drift(log_ratio: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
  """Replaces half of the variance of token log-ratios by a synthetic drift.

  The log-ratios are shuffled over the whole array first, so that only the drift is correlated
  within a sequence.

  Args:
    log_ratio: Measured log-ratios of the tokens, [N, T].
    kind: Kind of the drift: "independent" is independent noise; "autoregressive" is a first-order
      process that forgets in about 20 tokens (φ = 0.95); "shared" is an offset that all tokens of
      a sequence share.
    rng: Random generator of the shuffle and the drift.

  Returns:
    The log-ratios with the drift, [N, T].

  Raises:
    ValueError: If the kind is unknown.
  """
  shape = log_ratio.shape
  shuffled = rng.permutation(np.asarray(log_ratio, np.float64).ravel()).reshape(shape)
  noise = rng.standard_normal(shape)
  if kind == "shared":
    noise = np.broadcast_to(noise[:, :1], shape)
  elif kind == "autoregressive":
    phi, drift = 0.95, np.empty(shape)
    drift[:, 0] = noise[:, 0]
    for t in range(1, shape[1]):
      drift[:, t] = phi * drift[:, t - 1] + math.sqrt(1 - phi**2) * noise[:, t]
    noise = drift
  elif kind != "independent":
    raise ValueError(f"kind: found {kind!r}, expected 'independent', 'autoregressive' or 'shared'")
  return (shuffled + np.std(shuffled) * noise) / math.sqrt(2)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
  """Fits the slope of log y against log x by least squares.

  Example:
    >>> round(slope([1, 2, 4], [5, 20, 80]), 6)
    2.0
  """
  return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def slopes(rows: Sequence[Mapping], name: str) -> list[float]:
  """Fits the slope of the log of a quantity against the log of the length, for each seed.

  Args:
    rows: Rows with `seed`, `tokens` and the quantity.
    name: Name of the quantity.
  """
  seeds = sorted({row["seed"] for row in rows})
  curves = [sorted((row["tokens"], row[name]) for row in rows if row["seed"] == seed) for seed in seeds]
  return [slope(*zip(*curve)) for curve in curves]


def clip_table(runs: Sequence[Mapping]) -> list[dict]:
  """Compares GSPO's clipped fraction with GRPO's in every cell.

  A cell is a combination of learning rate, length, number of updates and band.

  Args:
    runs: Rows with `seed`, `tokens`, `learning_rate`, `updates` and the fractions of
      `clip_fractions`.

  Returns:
    One row per cell, with the settings of the cell; `grpo` and `gspo`, the clipped fractions as
    means over the seeds; and `ratio`, GSPO's fraction over GRPO's (None if one of them is 0).
  """
  keys = sorted({(row["learning_rate"], row["tokens"], row["updates"]) for row in runs})
  table = []
  for learning_rate, tokens, updates in keys:
    cell = [row for row in runs if (row["learning_rate"], row["tokens"], row["updates"]) == (learning_rate, tokens, updates)]
    grpo = float(np.mean([row["grpo"] for row in cell]))
    for band in (*(f"gspo_x{scale:g}" for scale in SCALES), "gspo_matched"):
      gspo = float(np.mean([row[band] for row in cell]))
      ratio = gspo / grpo if gspo > 0 and grpo > 0 else None
      table.append(
        dict(learning_rate=learning_rate, tokens=tokens, updates=updates, band=band, grpo=grpo, gspo=gspo, ratio=ratio)
      )
  return table
