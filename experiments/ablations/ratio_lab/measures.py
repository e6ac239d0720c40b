"""Measures of log-ratios, and the straight lines through them.

No model in here.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm import objectives

PAPER_TOKENS = 4096
"""Length of a response that GSPO's clip is taken to be made for. The paper does not say.

Its responses are of this order.
"""

GSPO_CLIP = (3e-4, 4e-4)
GRPO_CLIP = (0.2, 0.27)
"""Both of the GSPO paper, below and above 1."""

SCALES = (0.3, 1.0, 3.0)


def sequence_clip(num_tokens: int, scale: float = 1.0) -> tuple[float, float]:
  """Returns GSPO's clip for responses of another length: log s spreads as 1/√T, so the band does.

  ε(T) = scale·ε_paper·√(PAPER_TOKENS/T)

  Example:
    >>> [round(epsilon, 6) for epsilon in sequence_clip(64)]
    [0.0024, 0.0032]
  """
  root = scale * math.sqrt(PAPER_TOKENS / num_tokens)
  return GSPO_CLIP[0] * root, GSPO_CLIP[1] * root


def matched_clip(num_tokens: int) -> tuple[float, float]:
  """Returns a clip for s that is as wide as GRPO's for r, each in units of its own spread.

  It is ε_GRPO/√T.
  """
  return GRPO_CLIP[0] / math.sqrt(num_tokens), GRPO_CLIP[1] / math.sqrt(num_tokens)


def clip_fractions(log_ratio: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
  """Returns the fractions of the same tokens that each rule clips.

  As the objectives themselves report them.

  Args:
    log_ratio: Log-ratio of the tokens, [N, T].
    advantages: Advantages of the responses, [N].

  Returns:
    `grpo`, `gspo_x0.3`, `gspo_x1`, `gspo_x3` and `gspo_matched`.
  """
  num_tokens = log_ratio.shape[1]
  bands = {f"gspo_x{scale:g}": sequence_clip(num_tokens, scale) for scale in SCALES} | {"gspo_matched": matched_clip(num_tokens)}
  rules = {"grpo": objectives.make("grpo", clip_low=GRPO_CLIP[0], clip_high=GRPO_CLIP[1], kl_coef=0.0)}
  rules |= {name: objectives.make("gspo", clip_low=low, clip_high=high) for name, (low, high) in bands.items()}
  zeros, ones = np.zeros_like(log_ratio), np.ones_like(log_ratio)
  return {
    # Only the ratio counts, so that the old policy may as well have given every token probability
    # 1.
    name: float(objectives.value(rule, log_ratio, zeros, advantages, ones)[1]["actor/pg_clipfrac"])
    for name, rule in rules.items()
  }


def ratio_statistics(log_ratio: np.ndarray) -> dict[str, float]:
  """Returns the spread of token and sequence ratios.

  Args:
    log_ratio: Log-ratio of the tokens of responses of one length that the old policy drew, [N, T].

  Returns:
    `var_rho`, of the product over the sequence; `std_s` and `std_log_s`, of its T-th root; `std_z`
    and `mean_z` of the token log-ratio; `mean_max_r`, the mean over the responses of their largest
    token ratio; `ess_tokens` and `ess_sequences`, effective sample sizes as fractions.
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
  """Returns the effective sample size of importance weights over their number: (Σw)²/(n·Σw²)."""
  return float(np.sum(weights) ** 2 / (weights.size * np.sum(weights**2)))


def with_drift(log_ratio: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
  """Returns the log-ratios that are made to hang together.

  Half of the variance of a token is replaced by a drift made by hand.

  Args:
    log_ratio: Measured, [N, T]. Its tokens are shuffled over the whole array, so that what hangs
      together is the drift alone.
    kind: "independent" adds independent noise; "autoregressive" a first-order process that forgets
      in about 20 tokens (φ = 0.95); "shared" an offset that all tokens of a sequence have in
      common.
    rng: Random generator of the drift.
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
  """Returns the slope of log y against log x, by least squares.

  Example:
    >>> round(slope([1, 2, 4], [5, 20, 80]), 6)
    2.0
  """
  return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def slopes(rows: Sequence[Mapping], name: str) -> list[float]:
  """Returns the slope of one quantity against the length, for each seed.

  Args:
    rows: Each with `seed`, `tokens` and the quantity.
    name: Name of the quantity.
  """
  seeds = sorted({row["seed"] for row in rows})
  curves = [sorted((row["tokens"], row[name]) for row in rows if row["seed"] == seed) for seed in seeds]
  return [slope(*zip(*curve)) for curve in curves]


def clip_table(runs: Sequence[Mapping]) -> list[dict]:
  """Returns GSPO's clipped fraction over GRPO's, for every length and learning rate.

  It does so for every number of updates and every band.

  Args:
    runs: Each with `seed`, `tokens`, `learning_rate`, `updates` and what `clip_fractions` gives.

  Returns:
    A row a cell: fractions are means over the seeds; `ratio` is None where one of them is 0.
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
