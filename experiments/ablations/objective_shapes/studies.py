"""Measurements for the claims E2, E3, E12, E13 and E14.

Arrays are float64 if the caller has enabled it in JAX.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations.objective_shapes.coefficients import OLD_PROBABILITY, coefficients, curve, policy_term
from experiments.ablations.ratio_lab import bed as beds
from experiments.ablations.ratio_lab.measures import GRPO_CLIP, sequence_clip
from jaxrl_llm import objectives
from jaxrl_llm.types import Objective

SPREADS = (0.003, 0.01, 0.03, 0.1, 0.3)
ZERO = 1e-6  # Tokens with a smaller |C| count as tokens without gradient.
OUTLIER = 2.5
NUM_TOKENS = 64
BED_RATE, BED_UPDATES, BED_SEEDS = 3e-4, (1, 2, 4, 8, 16), (0, 1, 2)
SHOWN_UPDATES = 8  # Number of updates before the heat maps, which show the first seed.


def shapes(points: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Computes C(r) of objectives for both signs of A.

  Args:
    points: Number of ratios from 0.02 to 3. The ratio 1 is added to them.
    names: Names of the objectives.

  Returns:
    For each objective `ratio`; `positive` and `negative`, C for A > 0 and A < 0;
    `reads_probability`, whether C depends on π_old.
  """
  ratio = np.union1d(np.linspace(0.02, 3.0, points), 1.0)
  curves = {}
  for name in names:
    objective = policy_term(name)
    positive, negative = (curve(objective, ratio, sign) for sign in (1, -1))
    others = (curve(objective, ratio, sign, OLD_PROBABILITY / 3) for sign in (1, -1))
    # Rounding can move a few points across the edge of a band. A different band moves many.
    reads_probability = any(np.mean(~np.isclose(x, y)) > 0.02 for x, y in zip((positive, negative), others, strict=True))
    curves[name] = {"ratio": ratio, "positive": positive, "negative": negative, "reads_probability": reads_probability}
  return curves


def zero_mass(names: Sequence[str], sequences: int, spreads: Sequence[float] = SPREADS, seed: int = 0) -> dict[str, list[float]]:
  """Measures the fraction of tokens without gradient (E12).

  A sequence has 64 tokens with normal log r and E[r] = 1. A is +1 for half of the sequences and -1
  for the others.

  Args:
    names: Names of the objectives.
    sequences: Number of sequences.
    spreads: Standard deviations of log r.
    seed: Seed of the sequences.

  Returns:
    For each objective the fraction of tokens with |C| < 1e-6 at each spread.
  """
  rng = np.random.default_rng(seed)
  noise = rng.standard_normal((sequences, NUM_TOKENS))
  advantages = np.where(np.arange(sequences) % 2, -1.0, 1.0)
  fractions = {}
  for name in names:
    objective = policy_term(name)
    # No probability exceeds 1.
    log_ratios = (np.minimum(spread * noise - spread**2 / 2, -np.log(OLD_PROBABILITY)) for spread in spreads)
    fractions[name] = [float(np.mean(np.abs(coefficients(objective, z, advantages)) < ZERO)) for z in log_ratios]
  return fractions


def token_variant(batches: int = 20, seed: int = 0) -> dict[str, float]:
  """Compares the gradients of GSPO and GSPO-token (E2).

  The clip is wide enough to keep about half of the sequences. Every batch has sequences on both
  sides of it.

  Args:
    batches: Number of random batches.
    seed: Seed of the batches.

  Returns:
    The largest difference between the two gradients over the largest gradient of a batch, maximum
    over the batches, by kind of advantages: "equal" within a sequence, or 0 on its first half
    ("unequal").
  """
  rng = np.random.default_rng(seed)
  clip = dict(clip_low=3e-3, clip_high=4e-3)
  largest = {"equal": 0.0, "unequal": 0.0}

  def gradient_of(name: str):
    """Compiles the gradient of an objective in log π."""
    objective = policy_term(name, **clip)
    return jax.jit(jax.grad(lambda x, a: objectives.value(objective, x, jnp.zeros_like(x), a, jnp.ones_like(x))[0]))

  gradients = [gradient_of(name) for name in ("gspo", "gspo_token")]
  for _ in range(batches):
    z = 0.05 * rng.standard_normal((16, 32))
    equal = np.broadcast_to(rng.standard_normal((16, 1)), z.shape)
    for kind, advantages in (("equal", equal), ("unequal", equal * (np.arange(32) >= 16))):
      whole, token = (np.asarray(gradient(z, advantages)) for gradient in gradients)
      largest[kind] = max(largest[kind], float(np.max(np.abs(whole - token)) / np.max(np.abs(whole))))
  return largest


def bed_snapshots(sizes: beds.Sizes, seed: int, updates: Sequence[int] = BED_UPDATES, num_tokens: int = NUM_TOKENS):
  """Makes the bed of the ratio lab and its snapshots for a seed.

  Args:
    sizes: Sizes of the bed.
    seed: Seed of the language, the weights and the samples.
    updates: Numbers of updates after which the policy is measured, rising.
    num_tokens: Length of the responses.

  Returns:
    The bed, and a list with one snapshot for each number of updates.
  """
  bed = beds.make_bed(sizes)
  language = beds.make_language(sizes.vocab_size, np.random.default_rng([seed, 0]))
  params = beds.warm_params(bed, language, seed)
  settings = dict(num_tokens=num_tokens, learning_rate=BED_RATE, measure_at=tuple(updates), key=jax.random.key(seed))
  return bed, list(beds.snapshots(bed, language, params, **settings))


def variation(log_ratio: np.ndarray, advantages: np.ndarray) -> dict[str, np.ndarray]:
  """Measures the variation of C within sequences under GRPO and GSPO (E3).

  Args:
    log_ratio: Measured log-ratios of the tokens, [N, T].
    advantages: Advantages of the responses, [N].

  Returns:
    `grpo` and `gspo`, C of the tokens, [N, T]; `grpo_variation` and `gspo_variation`, the standard
    deviation of C over its mean within each sequence that is not clipped as a whole.
  """
  low, high = sequence_clip(log_ratio.shape[1])
  rules = {
    "grpo": policy_term("grpo", clip_low=GRPO_CLIP[0], clip_high=GRPO_CLIP[1]),
    "gspo": policy_term("gspo", clip_low=low, clip_high=high),
  }
  signs = np.where(advantages >= 0, 1.0, -1.0)
  by_rule = {name: coefficients(rule, log_ratio, signs) for name, rule in rules.items()}
  for name in rules:
    kept = by_rule[name][np.any(by_rule[name] != 0, axis=1)]
    by_rule[f"{name}_variation"] = np.std(kept, axis=1) / np.mean(kept, axis=1)
  return by_rule


def gate(distance: np.ndarray, tau: float = 1.0) -> np.ndarray:
  """Computes SAPO's gate w at a distance |r − 1|, as C/r of the objective itself."""
  ratio = 1 + np.abs(distance)
  return curve(policy_term("sapo", tau_pos=tau), ratio.ravel(), 1).reshape(ratio.shape) / ratio


def smooth_limit(log_ratios: Sequence[np.ndarray], tau: float = 1.0) -> dict[str, np.ndarray]:
  """Measures the distance of SAPO's token gates from a single gate per sequence (E13).

  Args:
    log_ratios: Log-ratios of the tokens of each sequence. Lengths may differ.
    tau: Temperature of the gate (τ).

  Returns:
    For each sequence `variance`, Var_i of the log-ratio; `difference`, D_i = |mean_t g(z_t) −
    g(mean_t z_t)| with g(z) the gate at distance |z|; `mean_gate` and `gate_of_mean`, the two terms
    of D_i; and `bound`, τ²·Var_i/4. For each token `swap`, the error |w(r) − g(log r)| of reading
    the distance as log r, and `swap_bound`, (2τ/3√3)·(r − 1 − log r).
  """
  z = np.concatenate(log_ratios).astype(np.float64)
  lengths = np.array([len(x) for x in log_ratios])
  starts = np.cumsum(lengths) - lengths
  mean = lambda x: np.add.reduceat(x, starts) / lengths
  log_s = mean(z)
  of_tokens, gate_of_mean = gate(z, tau), gate(log_s, tau)
  mean_gate = mean(of_tokens)
  variance = mean(np.square(z - np.repeat(log_s, lengths)))
  return {
    "variance": variance,
    "mean_gate": mean_gate,
    "gate_of_mean": gate_of_mean,
    "difference": np.abs(mean_gate - gate_of_mean),
    "bound": tau**2 / 4 * variance,
    "swap": np.abs(gate(np.expm1(z), tau) - of_tokens),
    "swap_bound": 2 * tau / (3 * np.sqrt(3)) * (np.expm1(z) - z),
  }


def made_up_sequences(count: int, seed: int = 0) -> list[np.ndarray]:
  """Makes up the log-ratios of sequences of 4 to 256 tokens.

  A third of the sequences is normal, a third is heavy-tailed, and a third is calm with one outlier.
  The spreads cover 2.5 decades.
  """
  rng = np.random.default_rng(seed)
  sequences = []
  for index in range(count):
    tokens, spread = int(2 ** rng.uniform(2, 8)), 10 ** rng.uniform(-2.5, 0.0)
    z = spread * (rng.standard_normal(tokens) if index % 3 == 0 else rng.standard_t(3, tokens))
    if index % 3 == 2:
      z = 0.02 * rng.standard_normal(tokens)
      z[rng.integers(tokens)] += spread * rng.choice((-2.0, 2.0))
    sequences.append(np.clip(z + rng.normal(0, spread / 3), -3, 3))
  return sequences


def cosines(bed: beds.Bed, snapshots: Sequence[beds.Snapshot], seed: int) -> list[dict[str, float]]:
  """Measures angles in weight space between SAPO's gradient and those of other methods (E13).

  Args:
    bed: Bed that made the snapshots.
    snapshots: Snapshots with the responses on which the gradients are computed.
    seed: Seed of the snapshots, for the rows.

  Returns:
    One row per snapshot, with the cosines between SAPO's gradient and those of `smooth_gspo`
    (`custom` with the sequence's ratio and a soft gate), `gspo` (clip by the √T rule) and `grpo`.
  """
  rows = []
  for snapshot in snapshots:
    num_tokens = snapshot.log_ratio.shape[1]
    low, high = sequence_clip(num_tokens)
    others = {
      "smooth_gspo": policy_term("custom"),
      "gspo": policy_term("gspo", clip_low=low, clip_high=high),
      "grpo": policy_term("grpo", clip_low=GRPO_CLIP[0], clip_high=GRPO_CLIP[1]),
    }
    sapo = weight_gradient(bed, policy_term("sapo"), snapshot)
    median_variance = float(np.median(np.var(snapshot.log_ratio, axis=1)))
    row = {"seed": seed, "updates": snapshot.updates, "median_variance": median_variance}
    for name, objective in others.items():
      other = weight_gradient(bed, objective, snapshot)
      row[name] = float(sapo @ other / (np.linalg.norm(sapo) * np.linalg.norm(other)))
    rows.append(row)
  return rows


def weight_gradient(bed: beds.Bed, objective: Objective, snapshot: beds.Snapshot) -> np.ndarray:
  """Computes the gradient of an objective in the weights over a snapshot, as one vector."""
  batch, prompt = snapshot.batch, beds.PROMPT_TOKENS
  log_ratio, advantages = snapshot.log_ratio, np.asarray(batch.advantages[:, -1])
  signs = np.where(advantages >= 0, 1.0, -1.0)
  weights = np.asarray(objective.weigh(jnp.ones(log_ratio.shape), None))
  # The gradient in log π is computed first and then pulled back through the model, so that one
  # program of the model serves all objectives.
  in_logprobs = -coefficients(objective, log_ratio, signs) * weights * advantages[:, None]
  in_logprobs = np.pad(in_logprobs, ((0, 0), (prompt, 0))).astype(np.float32)
  total, rows = 0.0, bed.sizes.eval_rows
  for start in range(0, len(batch.tokens), rows):
    piece = jax.tree.map(lambda x, start=start: x[start : start + rows], batch)
    gradient = bed.pull_back(snapshot.params, piece, in_logprobs[start : start + rows])
    total = total + np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(gradient)])
  return total


OUTLIER_COUNTS = (0, 1, 2, 4, 8, 16, 32)


def outliers(counts: Sequence[int] = OUTLIER_COUNTS, draws: int = 200, seed: int = 0) -> dict[str, dict[str, list[float]]]:
  """Measures the effect of outliers on the gradient of a sequence (E14).

  Outliers have r = 2.5, and the other ones of the 64 tokens have a spread of 0.01.

  Args:
    counts: Numbers of outliers in a sequence.
    draws: Number of random sequences.
    seed: Seed of the sequences.

  Returns:
    For each method, by number of outliers: `positive` and `negative`, the norm of the gradient in
    log π over its on-policy norm, for A > 0 and A < 0; `others`, the norm over the other tokens,
    over the on-policy norm of the same tokens, for A > 0; `outlier`, C of an outlier over C
    on-policy, for A > 0 (None without outliers). Norms are root mean squares over the sequences,
    and `outlier` is a mean.
  """
  low, high = sequence_clip(NUM_TOKENS)
  methods = {
    "gspo": policy_term("gspo", clip_low=low, clip_high=high),
    "sapo": policy_term("sapo"),
    "grpo": policy_term("grpo", clip_low=GRPO_CLIP[0], clip_high=GRPO_CLIP[1]),
    "gmpo": policy_term("gmpo"),
    "cispo": policy_term("cispo"),
    "sapo_tau5": policy_term("sapo", tau_pos=5.0, tau_neg=5.0),
  }
  noise = 0.01 * np.random.default_rng(seed).standard_normal((draws, NUM_TOKENS))
  norm = lambda c: float(np.sqrt(np.mean(np.square(c))))
  shares = {}
  for name, objective in methods.items():
    rows: dict[str, list] = {"positive": [], "negative": [], "others": [], "outlier": []}
    for count in counts:
      z = noise.copy()
      z[:, :count] = np.log(OUTLIER)
      positive, negative = (coefficients(objective, z, np.full(draws, sign)) for sign in (1.0, -1.0))
      rows["positive"].append(norm(positive))
      rows["negative"].append(norm(negative))
      rows["others"].append(norm(positive[:, count:]))
      rows["outlier"].append(float(np.mean(positive[:, :count])) if count else None)
    shares[name] = rows
  return shares


def hand_example() -> dict[str, float]:
  """Computes the example of the reference: four tokens, r = (1.02, 1.01, 0.99, 2.5), τ = 1."""
  z = np.log([1.02, 1.01, 0.99, 2.5])
  at = smooth_limit([z])
  names = ("variance", "mean_gate", "gate_of_mean", "difference", "bound")
  return {"s": float(np.exp(np.mean(z)))} | {name: float(at[name][0]) for name in names}
