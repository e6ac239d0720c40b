"""Reference: every objective as scalar loops over Python floats, and the table of golden cases.

  python -m tests.objectives.reference     writes jaxrl_llm/objectives/golden.json

The loops are written from the formulas. Nothing here imports the package, so that the two can
disagree. Here too an objective is a ratio x a gate x weights, but each slot is a loop over the
tokens of one sequence, and its gradient is a closed form instead of autodiff. `at` holds the
log-probabilities at which stop-gradients are evaluated. Finite differences in the log-probabilities
with `at` held fixed give the gradient that a method intends.
"""

import json
import math
import pathlib
import random
import re
import struct
from typing import Any, NamedTuple

from tests.objectives import reference_corrections, reference_terms

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "jaxrl_llm" / "objectives" / "golden.json"

# ---------------------------------------------------------------------------------------------------------------------------------------
# Every default, written down a second time, so that a changed default fails the test.
# ---------------------------------------------------------------------------------------------------------------------------------------

COMMON = {"kl_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0, "max_tokens": None}
HARD = COMMON | {"dual_clip": None}
FUTURE = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0, "half_life": 32.0, "future_cap": 0.2, "safe_ratio": 4.0}
PAPERS: dict[str, dict[str, Any]] = {
  "ppo": HARD | {"clip_low": 0.2, "clip_high": 0.2, "value_coef": 0.5, "value_clip": 0.2, "weights": "token_mean"},
  "grpo": HARD | {"clip_low": 0.2, "clip_high": 0.2, "weights": "sequence_mean", "kl_coef": 0.04},
  "dr_grpo": HARD | {"clip_low": 0.2, "clip_high": 0.2, "weights": "constant", "max_tokens": 3000},
  "dapo": HARD | {"clip_low": 0.2, "clip_high": 0.28, "weights": "token_mean"},
  "gspo": HARD | {"clip_low": 3e-4, "clip_high": 4e-4, "weights": "sequence_mean"},
  "gspo_token": HARD | {"clip_low": 3e-4, "clip_high": 4e-4, "weights": "sequence_mean"},
  "sapo": COMMON | {"tau_pos": 1.0, "tau_neg": 1.05, "weights": "sequence_mean"},
  "reinforce": COMMON | {"weights": "sequence_sum"},
  "rloo": HARD | {"clip_low": 0.2, "clip_high": 0.2, "weights": "sequence_mean"},
  "reinforce_plus_plus": HARD | {"clip_low": 0.2, "clip_high": 0.2, "weights": "token_mean"},
  "cispo": COMMON | {"clip_low": 1.0, "clip_high": 4.0, "weights": "token_mean"},
  "gmpo": COMMON | {"log_clip_low": 0.4, "log_clip_high": 0.4, "weights": "sequence_mean"},
  "minirl": HARD | {"clip_low": 0.2, "clip_high": 0.27, "tis_cap": 5.0, "weights": "sequence_sum"},
  "luspo": HARD | {"clip_low": 2e-3, "clip_high": 2.5e-3, "weights": "sequence_sum"},
  "vespo": COMMON | {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0, "weights": "token_mean"},
  "dppo_tv": COMMON | {"delta_low": 0.15, "delta_high": 0.15, "ratio_cap": 20.0, "anchor": "sampler", "weights": "token_mean"},
  "dppo_kl": COMMON | {"delta_low": 0.05, "delta_high": 0.05, "ratio_cap": 20.0, "anchor": "sampler", "weights": "token_mean"},
  "cppo": COMMON | {"delta": 0.15, "w_min": 0.8, "budget": 0.02, "anchor": "sampler", "weights": "token_mean"},
  "minpro": COMMON | {"clip_high": 4.0, "weights": "token_mean"},
  "maspo": COMMON | {"sigma": 1.0, "alpha": 0.3, "beta": 0.03, "weights": "token_mean"},
  "dro": COMMON | {"pull": 0.05, "weights": "sequence_sum"},
  "clip_cov": HARD | {"clip_low": 0.2, "clip_high": 0.2, "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "weights": "token_mean"},
  "kl_cov": COMMON | {"cov_kl_coef": 1.0, "cov_share": 2e-4, "weights": "token_mean"},
  "fipo": COMMON | FUTURE | {"weights": "token_mean"},
  "topr": COMMON | {"ratio_cap": 1.0, "anchor": "sampler", "weights": "sequence_sum"},
  "sft": {"weights": "token_mean", "max_tokens": None},
  "custom": COMMON
  | {"ratio": "token", "gate": "hard", "weights": "token_mean", "anchor": "old", "value_coef": 0.0, "value_clip": None}
  # None stands for the constant of the gate's paper, below.
  | dict.fromkeys(
    "clip_low clip_high dual_clip tau_pos tau_neg log_clip_low log_clip_high sigma alpha beta k_pos lambda_pos k_neg lambda_neg "
    "delta_low delta_high ratio_cap delta w_min budget pull half_life future_cap safe_ratio".split()
  ),
}

GATE_PAPERS = {
  "hard": {"clip_low": 0.2, "clip_high": 0.2},
  "soft": {"tau_pos": 1.0, "tau_neg": 1.05},
  "gaussian": {"sigma": 1.0, "alpha": 0.3, "beta": 0.03},
  "capped": {"clip_low": 1.0, "clip_high": 4.0},
  "gamma": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
  "tv_ball": {"delta_low": 0.15, "delta_high": 0.15, "ratio_cap": 20.0},
  "kl_ball": {"delta_low": 0.05, "delta_high": 0.05, "ratio_cap": 20.0},
  "prefix_budget": {"delta": 0.15, "w_min": 0.8, "budget": 0.02},
  "quadratic": {"pull": 0.05},
  "tapered": {"ratio_cap": 1.0},
  "future": FUTURE,
}
"""Values that `custom` uses for settings of a gate that are None."""

METHODS = {
  "ppo": ("token", "hard"),
  "grpo": ("token", "hard"),
  "dr_grpo": ("token", "hard"),
  "dapo": ("token", "hard"),
  "gspo": ("sequence", "hard"),
  "gspo_token": ("sequence_token_gradient", "hard"),
  "sapo": ("token", "soft"),
  "reinforce": ("none", "none"),
  "rloo": ("product", "hard"),
  "reinforce_plus_plus": ("token", "hard"),
  "cispo": ("token", "capped"),
  "gmpo": ("clipped_mean", "none"),
  "minirl": ("token", "hard"),
  "luspo": ("sequence", "hard"),
  "vespo": ("product", "gamma"),
  "dppo_tv": ("token", "tv_ball"),
  "dppo_kl": ("token", "kl_ball"),
  "cppo": ("token", "prefix_budget"),
  "minpro": ("prefix_min", "capped"),
  "maspo": ("token", "gaussian"),
  "dro": ("token", "quadratic"),
  "clip_cov": ("token", "hard"),
  "kl_cov": ("token", "none"),
  "fipo": ("token", "future"),
  "topr": ("product", "tapered"),
}
"""Ratio and gate of each objective, as keys of `RATIOS` and `GATES`; `custom` has its own."""


# ---------------------------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------------------------


class Bounds:
  """Comparisons with bounds, which record the distance of a case from the nearest bound."""

  def __init__(self):
    self.margin = math.inf

  def above(self, x: float, bound: float) -> bool:
    """Returns whether x > bound."""
    if math.isfinite(bound):
      self.margin = min(self.margin, abs(x - bound))
    return x > bound


class Tokens(NamedTuple):
  """Counted tokens of one sequence, one number per token.

  `log_ratio` and `log_ratio_at` are at the ratio's level.
  """

  logprobs: list[float]
  at: list[float]
  anchor: list[float]
  advantages: list[float]
  log_ratio: list[float]
  log_ratio_at: list[float]


class Term(NamedTuple):
  """A token's surrogate and its slopes.

  The slopes are in the log-ratio and in the token's own log-probability. `clipped` says whether a
  clip binds; None means that there is no clip.
  """

  value: float
  by_log_ratio: float = 0.0
  by_logprob: float = 0.0
  clipped: bool | None = None


class Result(NamedTuple):
  """Results of a case; `weights` are those of the policy terms, 0 outside the mask."""

  loss: float
  grad_logprobs: list[list[float]]
  grad_values: list[list[float]]
  clip_fraction: float | None
  margin: float
  weights: list[list[float]]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Ratios: (settings, token log-ratios, those at the stop-gradients, advantages, bounds) ->
# (log-ratios, Jacobian, clipped)
# ---------------------------------------------------------------------------------------------------------------------------------------


def diagonal(entries):
  return [[x if i == j else 0.0 for j in range(len(entries))] for i, x in enumerate(entries)]


def token(s, z, z_at, advantages, bounds):
  """Computes log r_t = z_t."""
  return list(z), diagonal([1.0] * len(z)), None


def unit(s, z, z_at, advantages, bounds):
  """Computes r_t = 1 with the gradient of log π."""
  return [a - b for a, b in zip(z, z_at)], diagonal([1.0] * len(z)), None


def sequence(s, z, z_at, advantages, bounds):
  """Computes log s, the mean of z."""
  n = len(z)
  return [math.fsum(z) / n] * n, [[1 / n] * n for _ in z], None


def sequence_token(s, z, z_at, advantages, bounds):
  """Computes log s_t = sg[log s] + z_t − sg[z_t]."""
  mean = math.fsum(z_at) / len(z)
  return [mean + a - b for a, b in zip(z, z_at)], diagonal([1.0] * len(z)), None


def product(s, z, z_at, advantages, bounds):
  """Computes log ρ = Σ z, bounded at ±20."""
  n, total = len(z), math.fsum(z)
  inside = not bounds.above(abs(total), 20.0)
  return [min(max(total, -20.0), 20.0)] * n, [[float(inside)] * n for _ in z], None


def clipped_mean(s, z, z_at, advantages, bounds):
  """Computes log g, the mean of z clipped on the side of the advantage."""
  n, bounded, clipped = len(z), [], []
  for x, advantage in zip(z, advantages):
    if bounds.above(advantage, 0):
      clipped.append(bounds.above(x, s["log_clip_high"]))
      bounded.append(min(x, s["log_clip_high"]))
    else:
      clipped.append(bounds.above(-x, s["log_clip_low"]))
      bounded.append(max(x, -s["log_clip_low"]))
  return [math.fsum(bounded) / n] * n, [[0.0 if c else 1 / n for c in clipped] for _ in z], clipped


def prefix_min(s, z, z_at, advantages, bounds):
  """Computes z_t + min over j < t of z_j; the first token has only z_1."""
  log_ratio, jacobian = [], diagonal([1.0] * len(z))
  for t, x in enumerate(z):
    least = min(range(t), key=lambda j: z[j]) if t else None
    log_ratio.append(x if least is None else x + z[least])
    if least is not None:
      jacobian[t][least] += 1.0
  return log_ratio, jacobian, None


RATIOS = {
  "none": unit,
  "token": token,
  "sequence": sequence,
  "sequence_token_gradient": sequence_token,
  "product": product,
  "clipped_mean": clipped_mean,
  "prefix_min": prefix_min,
}


# ---------------------------------------------------------------------------------------------------------------------------------------
# Gates: (settings, tokens, bounds) -> one Term per token
# ---------------------------------------------------------------------------------------------------------------------------------------


def none(s, q, bounds):
  """Computes r·A."""
  return [Term(math.exp(x) * a, math.exp(x) * a) for x, a in zip(q.log_ratio, q.advantages)]


def hard(s, q, bounds):
  """Computes min(r·A, clip(r)·A), which is at least dual_clip·A if A < 0."""
  terms, low, high = [], 1 - s["clip_low"], 1 + s["clip_high"]
  for x, a in zip(q.log_ratio, q.advantages):
    r = math.exp(x)
    value = min(r * a, min(max(r, low), high) * a)
    clipped = bounds.above(r, high) if bounds.above(a, 0) else bounds.above(low, r)
    ended = clipped
    if s["dual_clip"] is not None and a < 0:
      value = max(value, s["dual_clip"] * a)
      ended = ended or bounds.above(r, s["dual_clip"])
    terms.append(Term(value, 0.0 if ended else r * a, clipped=clipped))
  return terms


def soft(s, q, bounds):
  """Computes (4/τ)·σ(τ(r − 1))·A."""
  terms = []
  for x, a in zip(q.log_ratio, q.advantages):
    r, tau = math.exp(x), s["tau_pos"] if bounds.above(a, 0) else s["tau_neg"]
    terms.append(Term(4 / tau / (1 + math.exp(-tau * (r - 1))) * a, r / math.cosh(tau * (r - 1) / 2) ** 2 * a))
  return terms


def capped(s, q, bounds):
  """Computes sg[clip(r)]·A·log π."""
  terms, low, high = [], 1 - s.get("clip_low", 1.0), 1 + s["clip_high"]
  for x, a, logprob in zip(q.log_ratio_at, q.advantages, q.logprobs):
    r = math.exp(x)
    clipped = bounds.above(r, high) or bounds.above(low, r)
    weight = min(max(r, low), high)
    terms.append(Term(weight * a * logprob, by_logprob=weight * a, clipped=clipped))
  return terms


def gamma(s, q, bounds):
  """Computes sg[ρ^k·exp(λ(1 − ρ))]·A·log π."""
  terms = []
  for x, a, logprob in zip(q.log_ratio_at, q.advantages, q.logprobs):
    k, lam = (s["k_pos"], s["lambda_pos"]) if bounds.above(a, 0) else (s["k_neg"], s["lambda_neg"])
    rho = math.exp(x)
    weight = rho**k * math.exp(lam * (1 - rho))
    terms.append(Term(weight * a * logprob, by_logprob=weight * a))
  return terms


def _inside_a_ball(s, q, bounds, outside):
  terms = []
  for x, a, logprob, at, anchor in zip(q.log_ratio_at, q.advantages, q.logprobs, q.at, q.anchor):
    r, r_cap = math.exp(x), s["ratio_cap"]
    dropped = outside(math.exp(at), math.exp(anchor), a)
    weight = 0.0 if dropped else r_cap if bounds.above(r, r_cap) else r
    terms.append(Term(weight * a * logprob, by_logprob=weight * a, clipped=dropped))
  return terms


def total_variation(s, q, bounds):
  """Computes sg[min(r, cap)·keep]·A·log π.

  A token is dropped if π has moved by more than delta in the advantage's direction.
  """

  def outside(pi, mu, a):
    return bounds.above(pi - mu, s["delta_high"]) if bounds.above(a, 0) else bounds.above(mu - pi, s["delta_low"])

  return _inside_a_ball(s, q, bounds, outside)


def binary_kl(s, q, bounds):
  """Computes `total_variation` with the divergence KL(μ‖π) of the event "this token" instead."""

  def outside(pi, mu, a):
    divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    if bounds.above(a, 0):
      return bounds.above(divergence, s["delta_high"]) and bounds.above(pi, mu)
    return bounds.above(divergence, s["delta_low"]) and bounds.above(mu, pi)

  return _inside_a_ball(s, q, bounds, outside)


def quantile(xs, q):
  """Computes a linearly interpolated quantile."""
  ordered, place = sorted(xs), q * (len(xs) - 1)
  low = math.floor(place)
  high = min(low + 1, len(xs) - 1)
  return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def prefix_budget(s, q, bounds):
  """Computes r·A·keep.

  A token that moves further away is kept if its weighted divergence fits into the budget that the
  tokens before it have left.
  """
  n, terms = len(q.at), []
  divergences = [abs(math.exp(at) - math.exp(anchor)) for at, anchor in zip(q.at, q.anchor)]
  allowance = min(max(quantile(divergences, 0.9), s["budget"]), 2 * s["budget"])
  spent, earned = 0.0, 0.0
  for t in range(n):
    weight = 1 - (1 - s["w_min"]) * t / max(n - 1, 1)
    weighted = weight * divergences[t]
    a, r = q.advantages[t], math.exp(q.log_ratio[t])
    over = bounds.above(weighted, min(s["delta"], s["delta"] + allowance * earned - spent))
    dropped = over and bounds.above(a * (math.exp(q.log_ratio_at[t]) - 1), 0)
    terms.append(Term(0.0 if dropped else r * a, 0.0 if dropped else r * a, clipped=dropped))
    spent, earned = spent + weighted, earned + weight
  return terms


def gaussian(s, q, bounds):
  """Computes sg[F]·r·A.

  F falls as a Gaussian once the ratio has passed 1 in the advantage's direction. The Gaussian is
  narrower for likely tokens.
  """
  terms = []
  for x, x_at, a, anchor in zip(q.log_ratio, q.log_ratio_at, q.advantages, q.anchor):
    r, factor, width = math.exp(x_at), 1.0, s["sigma"] * math.exp(anchor) ** -s["alpha"]
    if bounds.above(a, 0):
      overshoots, width = r > 1, width * (1 + s["beta"] * a)
    else:
      overshoots, width = r < 1, width / (1 - s["beta"] * a)
    if overshoots:  # F is 1 at r = 1 on both sides, so this is no bound to avoid.
      factor = math.exp(-((r - 1) ** 2) / (2 * width**2))
    terms.append(Term(factor * math.exp(x) * a, factor * math.exp(x) * a))
  return terms


def quadratic(s, q, bounds):
  """Computes A·log π − (pull/2)·z²."""
  return [
    Term(a * logprob - s["pull"] / 2 * x * x, by_log_ratio=-s["pull"] * x, by_logprob=a)
    for x, a, logprob in zip(q.log_ratio, q.advantages, q.logprobs)
  ]


def tapered(s, q, bounds):
  """Computes sg[C]·A·log π, where C is the capped ratio if A < 0, else 1."""
  terms = []
  for x, a, logprob in zip(q.log_ratio_at, q.advantages, q.logprobs):
    r, weight, clipped = math.exp(x), 1.0, False
    if not bounds.above(a, 0):
      clipped = bounds.above(r, s["ratio_cap"])
      weight = min(r, s["ratio_cap"])
    terms.append(Term(weight * a * logprob, by_logprob=weight * a, clipped=clipped))
  return terms


def future(s, q, bounds):
  """Computes sg[w]·min(r·A, clip(r)·A), where w follows from the log-ratios of later tokens."""
  terms, n = [], len(q.advantages)
  for t, term in enumerate(hard(s, q, bounds)):
    total = 0.0
    for j in range(t, n):
      left_out = s["dual_clip"] is not None and bounds.above(math.exp(q.log_ratio_at[j]), s["dual_clip"])
      total += 0.0 if left_out else 0.5 ** ((j - t) / s["half_life"]) * q.log_ratio_at[j]
    weight = min(max(math.exp(total), 1.0), 1 + s["future_cap"])  # Continuous: no bound to avoid.
    if q.advantages[t] < 0 and bounds.above(math.exp(q.log_ratio_at[t]), s["safe_ratio"]):
      weight = 1.0
    terms.append(Term(weight * term.value, weight * term.by_log_ratio, clipped=term.clipped))
  return terms


GATES = {
  "none": none,
  "hard": hard,
  "soft": soft,
  "capped": capped,
  "gamma": gamma,
  "tv_ball": total_variation,
  "kl_ball": binary_kl,
  "prefix_budget": prefix_budget,
  "gaussian": gaussian,
  "quadratic": quadratic,
  "tapered": tapered,
  "future": future,
}

# ---------------------------------------------------------------------------------------------------------------------------------------
# Selections: (settings, tokens of the batch by place, bounds) -> set of places
# ---------------------------------------------------------------------------------------------------------------------------------------


def covariances(old, advantages):
  """Computes (log π_old − mean)·(A − mean) of each token of the batch."""
  mean_old, mean_advantage = (math.fsum(xs.values()) / len(xs) for xs in (old, advantages))
  return {place: (old[place] - mean_old) * (advantages[place] - mean_advantage) for place in old}


def word(x):
  """Returns the bits of a float32."""
  return struct.unpack("<I", struct.pack("<f", x))[0]


def chance(*xs):
  """Hashes numbers: FNV-1a over their words, and the finaliser of MurmurHash3."""
  state = 0x811C9DC5
  for x in xs:
    state = (state ^ word(x)) * 0x01000193 % 2**32
  state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
  state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
  return (state ^ state >> 16) >> 8


def random_in_band(s, old, advantages, bounds):
  """Selects tokens in a band of covariances, in the order of their hashes."""
  covs = covariances(old, advantages)
  inside = [p for p, c in covs.items() if not bounds.above(s["cov_low"], c) and not bounds.above(c, s["cov_high"])]
  inside.sort(key=lambda p: chance(old[p], advantages[p]))
  return set(inside[: max(1, math.floor(s["cov_share"] * len(covs)))])


def largest(s, old, advantages, bounds):
  """Selects the tokens of the largest covariances."""
  covs = covariances(old, advantages)
  ordered, number = sorted(covs, key=lambda p: -covs[p]), max(1, math.floor(s["cov_share"] * len(covs)))
  bounds.above(covs[ordered[number - 1]], covs[ordered[number]])
  return {p for p in ordered[:number] if bounds.above(covs[p], 0)}


SELECTIONS = {"clip_cov": random_in_band, "kl_cov": largest}

# ---------------------------------------------------------------------------------------------------------------------------------------
# Penalties and the whole loss
# ---------------------------------------------------------------------------------------------------------------------------------------


def kl(estimator, logprob, at, ref, anchor):
  """Returns value and slope of a one-sample estimate of KL(π‖π_ref), with x = log π − log π_ref."""
  x, x_at = logprob - ref, at - ref
  k3 = math.exp(-x) - 1 + x
  r = math.exp(logprob - anchor)
  return {
    "k1": (x, 1.0),
    "k2": (x * x / 2, x),
    "k3": (k3, 1 - math.exp(-x)),
    # These have the value of one estimator and the gradient of k2.
    "k1+": (x_at + (x * x - x_at * x_at) / 2, x),
    "k3+": (math.exp(-x_at) - 1 + x_at + (x * x - x_at * x_at) / 2, x),
    # The ratio is differentiated too: k3·r + (1 − u)·r = r·x.
    "weighted_k3": (r * k3, r * x),
  }[estimator]


def reference(
  name: str,
  settings: dict[str, Any],
  inputs: dict[str, list[list[float]]],
  at=None,
  *,
  correction: tuple[str, dict[str, Any]] | None = None,
) -> Result:
  """Computes loss, closed-form gradients and clip fraction of one batch.

  Stop-gradients are evaluated at `at`, by default the log-probabilities. `correction` is the name
  and the settings of one of `reference_corrections`.
  """
  s, bounds = PAPERS[name] | settings, Bounds()
  if name == "custom":
    s |= {key: x for key, x in GATE_PAPERS.get(s["gate"], {}).items() if s[key] is None}
  mask, logprobs = inputs["mask"], inputs["logprobs"]
  at = logprobs if at is None else at
  places = [[(b, t) for t, m in enumerate(row) if m] for b, row in enumerate(mask)]
  places = [seq for seq in places if seq]
  num_tokens = sum(map(len, places))
  of_prompts: dict[int, int] = {}
  for seq in places:
    b, t = seq[0]
    of_prompts[GROUPS[b][t]] = of_prompts.get(GROUPS[b][t], 0) + len(seq)
  grad = [[0.0] * len(row) for row in mask]
  value_grad = [[0.0] * len(row) for row in mask]
  losses, clips, selected = [], [], set()
  weights = {place: 1.0 for seq in places for place in seq}
  if correction is not None:
    weights = reference_corrections.weights(*correction, inputs, at, bounds)
  if name in SELECTIONS:
    of_tokens = ({(b, t): inputs[field][b][t] for seq in places for b, t in seq} for field in ("old_logprobs", "advantages"))
    selected = SELECTIONS[name](s, *of_tokens, bounds)

  for seq in places:
    weight = {
      "token_mean": 1 / num_tokens,
      "prompt_mean": 1 / len(of_prompts) / of_prompts[GROUPS[seq[0][0]][seq[0][1]]],
      "sequence_mean": 1 / len(places) / len(seq),
      "sequence_sum": 1 / len(places),
      "constant": 1 / len(places) / (s.get("max_tokens") or 1),
    }[s["weights"]]

    def take(field, seq=seq):
      return [inputs[field][b][t] for b, t in seq]

    lp, lp_at = take("logprobs"), [at[b][t] for b, t in seq]
    if name == "sft":
      losses += [-weight * x for x in lp]
      for b, t in seq:
        grad[b][t] = -weight
      continue

    anchor, advantages = take("sampler_logprobs" if s.get("anchor") == "sampler" else "old_logprobs"), take("advantages")
    z, z_at = ([x - y for x, y in zip(xs, anchor)] for xs in (lp, lp_at))
    ratio, gate = (s["ratio"], s["gate"]) if name == "custom" else METHODS[name]
    log_ratio, jacobian, clipped = RATIOS[ratio](s, z, z_at, advantages, bounds)
    log_ratio_at = RATIOS[ratio](s, z_at, z_at, advantages, bounds)[0]
    terms = GATES[gate](s, Tokens(lp, lp_at, anchor, advantages, log_ratio, log_ratio_at), bounds)
    clips += clipped if clipped else [term.clipped for term in terms]
    for i, place in enumerate(seq):
      if place in selected and "cov_kl_coef" in s:
        distance, slope = abs(z[i]), math.copysign(1.0, z[i])
        terms[i] = Term(terms[i].value - s["cov_kl_coef"] * distance, terms[i].by_log_ratio - s["cov_kl_coef"] * slope)
      elif place in selected:
        terms[i] = Term(0.0)
    for i, term in enumerate(terms):
      importance = weights[seq[i]]
      if "tis_cap" in s:
        k = math.exp(inputs["old_logprobs"][seq[i][0]][seq[i][1]] - inputs["sampler_logprobs"][seq[i][0]][seq[i][1]])
        importance *= s["tis_cap"] if bounds.above(k, s["tis_cap"]) else k
      losses.append(-weight * importance * term.value)
      for j, (b, t) in enumerate(seq):
        grad[b][t] -= weight * importance * (term.by_log_ratio * jacobian[i][j] + (term.by_logprob if i == j else 0.0))

    for i, (b, t) in enumerate(seq):
      if s["kl_coef"]:
        divergence, slope = kl(s["kl_estimator"], lp[i], lp_at[i], inputs["ref_logprobs"][b][t], anchor[i])
        losses.append(weight * s["kl_coef"] * divergence)
        grad[b][t] += weight * s["kl_coef"] * slope
      if s["entropy_coef"]:
        losses.append(-weight * s["entropy_coef"] * inputs["entropy"][b][t])
      if "value_coef" in s and "values" in inputs:
        v, old, target = (inputs[field][b][t] for field in ("values", "old_values", "returns"))
        width = math.inf if s["value_clip"] is None else s["value_clip"]
        error = (v - target) ** 2
        bounded_error = (min(max(v, old - width), old + width) - target) ** 2
        losses.append(weight * s["value_coef"] * max(error, bounded_error))
        outside = bounds.above(abs(v - old), width)
        if not (outside and bounds.above(bounded_error, error)):
          value_grad[b][t] += weight * s["value_coef"] * 2 * (v - target)

  fraction = None if not clips or clips[0] is None else sum(clips) / num_tokens
  of_tokens = [[weights.get((b, t), 0.0) for t in range(len(row))] for b, row in enumerate(mask)]
  return Result(math.fsum(losses), grad, value_grad, fraction, bounds.margin, of_tokens)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------------------------

MASK = [
  [1, 1, 1, 1, 1, 0],
  [0, 1, 1, 0, 1, 1],  # A prompt token first, a tool's output in the middle.
  [1, 0, 0, 0, 0, 0],
  [0, 0, 0, 0, 0, 0],
  [1, 1, 1, 1, 1, 1],
]
GROUPS = [[1] * 6, [2] * 6, [1] * 6, [3] * 6, [2] * 6]
"""Prompt of each token's response, in every batch."""

MARGIN = 1e-5
"""Minimum distance of every case from a bound, in the bound's own units.

It lets float32 and other orders of summation decide as float64 does.
"""


def make_inputs(seed: int, spread: float, level: str, digits: int) -> dict[str, list[list[float]]]:
  """Makes a batch with log-ratios of about `spread`.

  Values outside the mask are plausible, so that an implementation that ignores the mask fails.
  """
  # Python guarantees that the stream of its uniform draws does not change. Values are rounded, so
  # that the file shows them in full.
  uniform = random.Random(seed).random
  shape = [range(len(MASK[0]))] * len(MASK)

  def normal():
    return math.sqrt(-2 * math.log(1 - uniform())) * math.cos(2 * math.pi * uniform())

  def array(draw, digits=4):
    return [[round(draw(b, t), digits) for t in row] for b, row in enumerate(shape)]

  def logprob(logit):
    return -math.log1p(math.exp(-logit))

  logits = [[0.5 + 1.5 * normal() for _ in row] for row in shape]
  moved = [[x + spread * normal() for x in row] for row in logits]
  sampled = [[x + spread / 3 * normal() for x in row] for row in logits]
  of_rows = [normal() for _ in shape]
  values = array(lambda b, t: normal(), 3)
  return {
    "mask": MASK,
    "logprobs": array(lambda b, t: logprob(moved[b][t]), digits),
    "old_logprobs": array(lambda b, t: logprob(logits[b][t]), digits),
    "sampler_logprobs": array(lambda b, t: logprob(sampled[b][t]), digits),
    "ref_logprobs": array(lambda b, t: logprob(moved[b][t] + 0.5 * normal()), digits),
    "advantages": array(lambda b, t: of_rows[b] if level == "sequence" else normal(), 3),
    "entropy": array(lambda b, t: 0.1 + 2 * uniform(), 3),
    "values": values,
    "old_values": array(lambda b, t: values[b][t] + 0.3 * normal(), 3),
    "returns": array(lambda b, t: normal(), 3),
  }


def all_inputs() -> dict[str, dict[str, list[list[float]]]]:
  """Makes three batches: far from the old policy, near it and very near it.

  The far one has one advantage per token, the others one per sequence.
  """
  far = make_inputs(seed=1, spread=0.9, level="token", digits=4)
  # Outliers make even the widest default caps bind: r = 22 and π/μ = 33 with A < 0, r = 1/12, and
  # π_old/μ = 8 with A > 0.
  for (b, t), logprob, old, sampler, advantage in (
    ((4, 2), -0.4, -3.5, -3.9, -0.8), ((4, 4), -3.3, -0.8, -0.9, 0.7), ((0, 3), -0.45, -0.5, -2.6, 1.1),
  ):  # fmt: skip
    for field, x in (("logprobs", logprob), ("old_logprobs", old), ("sampler_logprobs", sampler), ("advantages", advantage)):
      far[field][b][t] = x
    far["ref_logprobs"][b][t] = round(logprob - 0.3, 4)
  return {
    "far": far,
    "near": make_inputs(seed=6, spread=0.45, level="sequence", digits=4),
    "very_near": make_inputs(seed=3, spread=4e-3, level="sequence", digits=6),
  }


REGULARISED = {
  "ppo": "k1", "grpo": "k2", "dr_grpo": "k3", "dapo": "k1+", "gspo": "k3+", "gspo_token": "weighted_k3", "sapo": "k1", "reinforce": "k2",
  "rloo": "k3", "reinforce_plus_plus": "k2", "cispo": "k3+", "gmpo": "k1+", "minirl": "weighted_k3", "luspo": "k2", "vespo": "k3",
  "dppo_tv": "weighted_k3", "dppo_kl": "k1", "cppo": "k2", "minpro": "k3", "maspo": "k1+", "custom": "k3+",
  "dro": "k2", "clip_cov": "k1", "kl_cov": "k3", "fipo": "k2", "topr": "k1",
}  # fmt: skip
"""KL estimator of each objective's case with penalties; together the cases have all estimators."""

CHANGES: dict[str, list[dict[str, Any]]] = {
  "ppo": [
    {"dual_clip": 1.3, "value_clip": None, "value_coef": 0.1, "weights": "sequence_mean"},
    {"clip_low": 0.1, "clip_high": 0.4, "value_clip": 0.05},
  ],
  "grpo": [
    {"kl_coef": 0.0, "clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.3},
    *({"kl_coef": 0.3, "kl_estimator": estimator} for estimator in ("k1+", "weighted_k3")),
  ],
  "dr_grpo": [{"max_tokens": 7}, {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.3}],
  "dapo": [{"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.2}, {"weights": "prompt_mean"}],
  "gspo": [{"clip_low": 0.05, "clip_high": 0.1, "weights": "token_mean"}, {"clip_low": 0.1, "clip_high": 0.05, "dual_clip": 1.15}],
  "gspo_token": [{"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.15}],
  "sapo": [{"tau_pos": 3.0, "tau_neg": 0.5}],
  "rloo": [{"clip_low": 0.5, "clip_high": 1.0, "dual_clip": 3.0}],
  "reinforce_plus_plus": [{"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5}],
  "cispo": [{"clip_low": 0.3, "clip_high": 0.5}, {"weights": "prompt_mean"}],
  "gmpo": [{"log_clip_low": 0.1, "log_clip_high": 0.2}],
  "minirl": [{"tis_cap": 1.05, "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.3}],
  "luspo": [{"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.15}],
  "vespo": [{"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.5, "lambda_neg": 1.0}],
  "dppo_tv": [{"delta_low": 0.05, "delta_high": 0.3, "ratio_cap": 1.5}, {"anchor": "old"}],
  "dppo_kl": [{"delta_low": 0.01, "delta_high": 0.1, "ratio_cap": 1.5}, {"anchor": "old"}],
  "cppo": [{"delta": 0.068, "w_min": 0.59, "budget": 0.043}, {"anchor": "old"}],
  "minpro": [{"clip_high": 0.2}],
  "maspo": [{"sigma": 0.4, "alpha": 0.6, "beta": 0.2}],
  "dro": [{"pull": 0.7}],
  "clip_cov": [{"cov_share": 0.3, "cov_low": 0.05, "cov_high": 0.9, "clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.3}],
  "kl_cov": [{"cov_share": 0.3, "cov_kl_coef": 0.4}],
  "fipo": [{"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.3, "half_life": 2.0, "future_cap": 0.6, "safe_ratio": 1.15}],
  "topr": [{"ratio_cap": 2.0, "anchor": "old"}],
  "sft": [{"weights": "sequence_mean"}, {"weights": "constant", "max_tokens": 7}],
  "custom": [
    {"ratio": "sequence", "gate": "soft", "weights": "sequence_mean"},
    {"ratio": "product", "gate": "none", "weights": "sequence_mean"},
  ],
}
"""Further settings of each objective, in addition to the defaults."""


FURTHER: list[tuple[str, dict[str, Any], str]] = [
  # These two were found by search. They tell CPPO's rule from 20 slips in it (another quantile,
  # sums that include the token, T for T − 1, ...).
  ("cppo", {"delta": 0.00067, "w_min": 0.81, "budget": 0.00065}, "very_near"),
  ("cppo", {"delta": 0.00043, "w_min": 0.55, "budget": 0.00039}, "very_near"),
  ("custom", {"ratio": "none", "gate": "none"}, "far"),
  ("custom", {"ratio": "prefix_min", "gate": "none", "anchor": "sampler"}, "far"),
  ("custom", {"ratio": "product", "gate": "capped", "clip_high": 1.0, "anchor": "sampler"}, "far"),
  ("custom", {"ratio": "product", "gate": "gamma", "lambda_pos": 2.0}, "far"),
  ("custom", {"ratio": "sequence", "gate": "gaussian", "sigma": 0.1}, "far"),
  ("custom", {"ratio": "sequence_token_gradient", "gate": "soft", "tau_pos": 2.0, "value_coef": 0.5, "value_clip": 0.2}, "far"),
  ("custom", {"gate": "tv_ball", "ratio_cap": 1.2}, "far"),
  ("custom", {"gate": "kl_ball", "anchor": "sampler"}, "far"),
  ("custom", {"gate": "prefix_budget", "w_min": 0.5}, "far"),
  ("custom", {"gate": "quadratic", "pull": 0.5, "anchor": "sampler"}, "far"),
  ("custom", {"gate": "future", "half_life": 4.0}, "far"),
  ("custom", {"gate": "tapered", "ratio_cap": 1.2}, "far"),
  ("custom", {"dual_clip": 1.5, "clip_low": 0.1}, "far"),
]
"""Cases on a single batch."""


def all_cases() -> list[tuple[str, dict[str, Any], str]]:
  """Returns each case's objective, its settings that differ from the defaults, and its batch."""
  cases = []
  for name in PAPERS:
    cases += [(name, {}, batch) for batch in ("far", "near", "very_near")] if name != "sft" else [(name, {}, "far")]
    cases += [(name, changes, batch) for changes in CHANGES.get(name, []) for batch in (("far", "near") if name != "sft" else ("far",))]
    if name != "sft":
      # Cases with penalties have other weights, which must apply to the penalties too.
      constant = {"weights": "token_mean"} if name == "dr_grpo" else {"weights": "constant", "max_tokens": 7}
      cases.append((name, {"kl_coef": 0.3, "kl_estimator": REGULARISED.get(name, "k3"), "entropy_coef": 0.01, **constant}, "near"))
      other = {"token_mean": "sequence_sum", "sequence_sum": "sequence_mean"}.get(PAPERS[name]["weights"], "token_mean")
      cases += [(name, {"weights": other}, "near")] if name != "dr_grpo" else []
  return cases + FURTHER


def reads(name: str, settings: dict[str, Any]) -> list[str]:
  """Returns the inputs that decide a case, except for the critic's."""
  s = PAPERS[name] | settings
  if name == "sft":
    return ["mask", "logprobs"]
  fields = ["mask", "logprobs", "advantages"]
  fields += ["old_logprobs"] if s.get("anchor") != "sampler" else []
  fields += ["sampler_logprobs"] if s.get("anchor") == "sampler" or "tis_cap" in s else []
  fields += ["ref_logprobs"] if s["kl_coef"] else []
  fields += ["entropy"] if s["entropy_coef"] else []
  fields += ["groups"] if s["weights"] == "prompt_mean" else []
  return fields


def table() -> dict[str, Any]:
  """Computes the contents of golden.json."""
  inputs, objectives = all_inputs(), {name: {"defaults": defaults, "cases": []} for name, defaults in PAPERS.items()}
  for name, settings, batch in all_cases():
    fields = reads(name, settings)
    # PPO also has cases without the critic, for implementations that keep it elsewhere.
    alone = [] if any(key.startswith("value_") for key in settings) else [[]]
    for critic in [*alone, *([["values", "old_values", "returns"]] if (PAPERS[name] | settings).get("value_coef") else [])]:
      result = reference(name, settings, {field: inputs[batch][field] for field in fields + critic if field != "groups"})
      assert result.margin > MARGIN, f"{name} {settings} {batch}: a bound is only {result.margin:.1e} away"
      case = {"settings": settings, "inputs": batch, "reads": fields + critic, "loss": result.loss, "grad_logprobs": result.grad_logprobs}
      case |= {"grad_values": result.grad_values} if critic else {}
      case |= {} if result.clip_fraction is None else {"clip_fraction": result.clip_fraction}
      objectives[name]["cases"].append(case)
  terms = reference_terms.sections(reference, reads, inputs, MARGIN)
  return {"format": 2, "inputs": inputs, "groups": GROUPS, "objectives": objectives} | terms


def dumps(tree: Any) -> str:
  """Formats JSON with one line per row of an array.

  Floats have Python's repr, which reads back as the same number.
  """
  text = json.dumps(tree, indent=1, allow_nan=False, ensure_ascii=False)
  return (
    re.sub(r"\[([^\[\]{}]*)\]", lambda match: "[" + ", ".join(x.strip() for x in match[1].split(",")) + "]", text)
    + "\n"
  )


if __name__ == "__main__":
  GOLDEN.write_text(dumps(table()), encoding="utf-8")
  print(f"{GOLDEN.name}: {GOLDEN.stat().st_size} bytes")
