"""Reference of the corrections: the weight of each token's policy term, from the formulas.

As `reference`, it imports nothing of the package. Each correction is a function `(settings, tokens,
bounds) -> weight by place`, where tokens are those of the batch that count.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

Place = tuple[int, int]

OLD_ENTROPY = [
  [0.31, 1.42, 0.07, 2.11, 0.88, 3.01],
  [2.95, 0.64, 1.19, 2.75, 0.02, 1.63],
  [1.05, 2.87, 0.44, 0.91, 1.77, 0.15],
  [3.12, 0.58, 2.02, 1.31, 0.73, 2.44],
  [0.19, 1.88, 0.52, 1.27, 2.36, 0.97],
]
"""Entropy of the old policy at each token of every batch, in nats."""

DEFAULTS: dict[str, dict[str, Any]] = {
  "top_entropy": {"share": 0.2},
  "m2po": {"threshold": 0.04},
  "off_policy_mask": {"anchor": "old"},
  "geometric_rejection": {"low": 0.999, "high": 1.001},
  "rejection": {"estimator": "k3", "over": "sequence_mean"},
  "tis": {"cap": 2.0, "floor": 0.0, "level": "token"},
  "mis": {"cap": 2.0, "level": "token"},
  "icepop": {"low": 0.5, "high": 5.0},
  "kpop": {"bound": 2.0},
  "sequence_tv": {"cap": 2.0},
}
"""Every default, written down a second time. A setting that is missing has none."""

GSPO = ("gspo", {"clip_low": 0.05, "clip_high": 0.1})
PENALISED = ("dapo", {"kl_coef": 0.3, "entropy_coef": 0.01, "weights": "sequence_mean"})
CASES = [
  # Correction, objective and its settings, settings of the correction, batch.
  ("top_entropy", ("dapo", {}), {"share": 0.3}, "far"),
  ("top_entropy", ("dapo", {}), {"share": 0.1}, "near"),
  ("top_entropy", PENALISED, {"share": 0.3}, "near"),
  ("top_entropy", GSPO, {"share": 0.5}, "near"),
  ("m2po", ("dapo", {}), {}, "far"),
  ("m2po", GSPO, {"threshold": 0.002}, "near"),
  ("m2po", PENALISED, {"threshold": 0.003}, "near"),
  ("off_policy_mask", ("dapo", {}), {"delta": 0.05}, "far"),
  ("off_policy_mask", GSPO, {"delta": 0.01, "anchor": "sampler"}, "near"),
  ("geometric_rejection", ("dapo", {}), {"low": 0.8, "high": 1.1}, "far"),
  ("rejection", ("sapo", {}), {"limit": 0.03}, "far"),
  ("rejection", ("dapo", {}), {"limit": 0.35, "estimator": "k1", "over": "token"}, "far"),
  ("rejection", GSPO, {"limit": 0.06, "estimator": "k1", "over": "sequence_sum"}, "near"),
  ("rejection", ("dapo", {}), {"limit": 0.1, "estimator": "k2", "over": "sequence_max"}, "far"),
  ("rejection", ("dapo", {}), {"limit": 0.1, "estimator": "k1", "over": "sequence_max"}, "near"),
  ("tis", ("dapo", {}), {}, "far"),
  ("tis", PENALISED, {"cap": 1.1, "floor": 0.9}, "near"),
  ("tis", ("sapo", {}), {"cap": 1.5, "floor": 0.95, "level": "sequence"}, "near"),
  ("mis", ("dapo", {}), {"cap": 1.1, "level": "sequence"}, "near"),
  ("mis", ("dapo", {}), {}, "far"),
  ("icepop", ("dapo", {}), {"low": 0.8}, "far"),
  ("kpop", ("dapo", {}), {}, "far"),
  # One token of each is far in one direction alone.
  ("kpop", ("sapo", {}), {"bound": 0.8}, "far"),
  ("kpop", ("dapo", {}), {"bound": 0.0178}, "far"),
  ("sequence_tv", ("dapo", {}), {"low": 0.0, "high": 0.2}, "far"),
  ("sequence_tv", ("sapo", {}), {"low": 0.04, "high": 0.07, "cap": 1.05}, "near"),
]


class Tokens(NamedTuple):
  """Counted tokens of a batch.

  `sequences` holds the places of each sequence, the other fields map a place to a number.
  """

  sequences: list[list[Place]]
  advantages: dict[Place, float]
  current: dict[Place, float]
  old: dict[Place, float]
  sampler: dict[Place, float]


def log_ks(q: Tokens) -> dict[Place, float]:
  """Returns log k = log π_old − log μ of each token."""
  return {place: q.old[place] - q.sampler[place] for place in q.old}


def top_entropy(s, q, bounds):
  """Keeps the tokens whose entropy reaches the (1 − share)-quantile."""
  entropies = {(b, t): OLD_ENTROPY[b][t] for b, t in q.old}
  ordered, place = sorted(entropies.values()), (1 - s["share"]) * (len(entropies) - 1)
  low = math.floor(place)
  high = min(low + 1, len(ordered) - 1)
  threshold = ordered[low] + (place - low) * (ordered[high] - ordered[low])
  return {p: 0.0 if bounds.above(threshold, h) else 1.0 for p, h in entropies.items()}


def m2po(s, q, bounds):
  """Drops the token of the largest (log k)² until the mean of the rest is small."""
  rest = {place: x * x for place, x in log_ks(q).items()}
  while rest and not bounds.above(s["threshold"], math.fsum(rest.values()) / len(rest)):
    rest.pop(max(rest, key=rest.get))
  return {place: float(place in rest) for place in q.old}


def off_policy_mask(s, q, bounds):
  """Drops tokens with A < 0 of sequences that the current policy has left behind."""
  anchor, weights = {"old": q.old, "sampler": q.sampler}[s["anchor"]], {}
  for places in q.sequences:
    divergence = math.fsum(anchor[p] - q.current[p] for p in places) / len(places)
    left = bounds.above(divergence, s["delta"])
    weights |= {p: 0.0 if left and q.advantages[p] < 0 else 1.0 for p in places}
  return weights


def geometric_rejection(s, q, bounds):
  """Drops sequences whose geometric mean of k leaves a band."""
  weights, log_k = {}, log_ks(q)
  for places in q.sequences:
    ratio = math.prod(math.exp(log_k[p]) for p in places) ** (1 / len(places))
    dropped = bounds.above(s["low"], ratio) or bounds.above(ratio, s["high"])
    weights |= dict.fromkeys(places, float(not dropped))
  return weights


def rejection(s, q, bounds):
  """Drops tokens or sequences by an estimate of KL(μ‖π_old)."""
  estimate = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[s["estimator"]]
  weights, log_k = {}, log_ks(q)
  for places in q.sequences:
    xs = {p: estimate(log_k[p]) for p in places}
    if s["over"] == "token":
      weights |= {p: float(not bounds.above(abs(x), s["limit"])) for p, x in xs.items()}
      continue
    statistic = {
      "sequence_sum": math.fsum(xs.values()),
      "sequence_mean": math.fsum(xs.values()) / len(xs),
      "sequence_max": max(map(abs, xs.values())),
    }[s["over"]]
    weights |= dict.fromkeys(places, float(not bounds.above(abs(statistic), s["limit"])))
  return weights


def by_level(s, q):
  """Returns the k of each token, at the level of the settings."""
  log_k = log_ks(q)
  if s["level"] == "token":
    return {p: math.exp(x) for p, x in log_k.items()}
  return {p: math.exp(math.fsum(log_k[other] for other in places)) for places in q.sequences for p in places}


def tis(s, q, bounds):
  """Computes clip(k, floor, cap)."""
  return {
    p: s["cap"] if bounds.above(k, s["cap"]) else s["floor"] if bounds.above(s["floor"], k) else k for p, k in by_level(s, q).items()
  }


def mis(s, q, bounds):
  """Computes k, or 0 above the cap."""
  return {p: 0.0 if bounds.above(k, s["cap"]) else k for p, k in by_level(s, q).items()}


def icepop(s, q, bounds):
  """Computes k, or 0 outside the band."""
  ks = {p: math.exp(x) for p, x in log_ks(q).items()}
  return {p: 0.0 if bounds.above(s["low"], k) or bounds.above(k, s["high"]) else k for p, k in ks.items()}


def binary(p: float, q: float) -> float:
  """Computes the divergence of "this token or another" from probabilities."""
  return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def kpop(s, q, bounds):
  """Computes k, or 0 if the divergence in either direction is large."""
  weights = {}
  for place in q.old:
    old, sampler = (min(max(math.exp(x[place]), 1e-8), 1 - 1e-8) for x in (q.old, q.sampler))
    far = bounds.above(max(binary(old, sampler), binary(sampler, old)), s["bound"])
    weights[place] = 0.0 if far else math.exp(q.old[place] - q.sampler[place])
  return weights


def sequence_tv(s, q, bounds):
  """Computes min(k, cap), or 0 at tokens that widen the distance of a sequence outside the band."""
  weights, log_k = {}, log_ks(q)
  for places in q.sequences:
    distance = math.fsum(abs(math.exp(log_k[p]) - 1) for p in places) / len(places)
    outside = bounds.above(s["low"], distance) or bounds.above(distance, s["high"])
    for p in places:
      k = math.exp(log_k[p])
      capped = s["cap"] if bounds.above(k, s["cap"]) else k
      weights[p] = 0.0 if outside and bounds.above(log_k[p] * q.advantages[p], 0) else capped
  return weights


CORRECTIONS = {
  "top_entropy": top_entropy,
  "m2po": m2po,
  "off_policy_mask": off_policy_mask,
  "geometric_rejection": geometric_rejection,
  "rejection": rejection,
  "tis": tis,
  "mis": mis,
  "icepop": icepop,
  "kpop": kpop,
  "sequence_tv": sequence_tv,
}


def weights(name: str, settings: dict[str, Any], inputs: dict[str, Any], at: list[list[float]], bounds: Any) -> dict[Place, float]:
  """Computes the weight of each counted token; the current policy's log-probabilities are `at`."""
  sequences = [[(b, t) for t, m in enumerate(row) if m] for b, row in enumerate(inputs["mask"])]
  places = [p for sequence in sequences for p in sequence]
  take = lambda x: {(b, t): x[b][t] for b, t in places} if x is not None else {}
  fields = [take(inputs.get(field)) for field in ("advantages", "old_logprobs", "sampler_logprobs")]
  tokens = Tokens([sequence for sequence in sequences if sequence], fields[0], take(at), *fields[1:])
  return CORRECTIONS[name](DEFAULTS[name] | settings, tokens, bounds)


def fields_of(name: str, settings: dict[str, Any]) -> list[str]:
  """Returns the inputs that decide the weights, beyond those of a case without the correction."""
  if name == "top_entropy":
    return ["old_entropy"]
  if name == "off_policy_mask":
    return {"old": ["old_logprobs"], "sampler": ["sampler_logprobs"]}[(DEFAULTS[name] | settings)["anchor"]]
  return ["old_logprobs", "sampler_logprobs"]


def section(evaluate: Callable[..., Any], reads: Callable[..., list[str]], inputs: dict[str, Any], margin: float) -> dict[str, Any]:
  """Computes the section of corrections; the arguments are those of `reference_terms.sections`."""
  entries = {name: {"defaults": defaults, "cases": []} for name, defaults in DEFAULTS.items()}
  entries["top_entropy"]["old_entropy"] = OLD_ENTROPY
  for name, (objective, of_objective), settings, batch in CASES:
    fields = list(dict.fromkeys([*reads(objective, of_objective), *fields_of(name, settings)]))
    arrays = {field: inputs[batch][field] for field in fields if field != "old_entropy"}
    result = evaluate(objective, of_objective, arrays, correction=(name, settings))
    assert result.margin > margin, f"{name} {settings} of {objective}: a bound is only {result.margin:.1e} away"
    case = {"objective": objective, "objective_settings": of_objective, "settings": settings, "inputs": batch, "reads": fields}
    case |= {"weights": result.weights, "loss": result.loss, "grad_logprobs": result.grad_logprobs}
    entries[name]["cases"].append(case)
  return entries
