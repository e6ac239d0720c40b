"""Reference: every estimator of advantages as scalar loops, and the table of golden cases.

  python -m tests.advantages.reference     writes jaxrl_llm/advantages/golden.json

The loops are written from the definitions, without the shortcuts of the package: the best of k is a
mean over all subsets, and GAE a double sum. Nothing here imports the package, so that the two can
disagree. Means are exact fractions, so that equal rewards have no deviation at all.
"""

import itertools
import math
import pathlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tests.advantages.cases import all_cases, all_inputs
from tests.objectives.reference import dumps

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "jaxrl_llm" / "advantages" / "golden.json"

PAPERS: dict[str, dict[str, Any]] = {
  "group": {"normalize_std": True},
  "leave_one_out": {},
  "rloo_n": {"min_valid": 3},
  "maxrl": {},
  "batch_scaled": {},
  "opo": {},
  "otb": {},
  "pass_at_k": {"pass_k": 2, "normalize_std": True},
  "per_reward": {"normalize_std": True},
  "steps": {"normalize_std": True},
  "gigpo": {"episode_weight": 1.0, "step_weight": 1.0, "gamma": 0.95, "normalize_std": True},
  "hierarchical": {"challenge": 1.0},
  "gtpo": {"entropy_share": 0.1, "right_above": 0.5},
  "rae": {"num_roles": 2, "decay": 0.95, "zero_sum": True},
  "spo": {"half_drift": 0.06, "memory_low": 0.875, "memory_high": 0.96},
  "returns": {"gamma": 1.0},
  "gae": {"gamma": 1.0, "lam": 1.0, "critic_lam": 1.0, "length_alpha": None},
}
"""Every default, written down a second time, so that a changed default fails the test."""

STD_EPS, VARIANCE_EPS, SMALLEST_ENTROPY = 1e-6, 1e-8, 1e-6
"""Constants beside a standard deviation and beside a variance, and the floor of an entropy."""

# ---------------------------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------------------------


def mean(xs: Sequence[float]) -> Fraction:
  """Computes an exact mean."""
  return sum(map(Fraction, xs), Fraction(0)) / len(xs)


def deviations(xs: Sequence[float]) -> list[float]:
  """Computes the distances from the mean."""
  return [float(Fraction(x) - mean(xs)) for x in xs]


def variance(xs: Sequence[float]) -> float:
  """Computes the unbiased variance, which is 0 for a single number."""
  return math.fsum(d * d for d in deviations(xs)) / max(len(xs) - 1, 1)


def scaled(xs: Sequence[float], by_std: bool) -> list[float]:
  """Computes the distances from the mean, in units of the standard deviation if asked."""
  scale = math.sqrt(variance(xs)) + STD_EPS if by_std else 1.0
  return [d / scale for d in deviations(xs)]


def whitened(xs: dict[Any, float]) -> dict[Any, float]:
  """Normalises numbers to mean 0 and variance 1."""
  scale = math.sqrt(variance([*xs.values()]) + VARIANCE_EPS) if xs else 1.0
  return dict(zip(xs, (d / scale for d in deviations([*xs.values()])))) if xs else {}


def by_prompt(x: dict[str, Any], size: int) -> list[list[int]]:
  """Returns the samples of each prompt that have a reward."""
  valid = x.get("valid", [True] * len(x["mask"]))
  return [[i for i in range(start, start + size) if valid[i]] for start in range(0, len(x["mask"]), size)]


def statistic(x: dict[str, Any]) -> dict[str, Any]:
  """Returns a batch in which all tokens count that statistics are over, learned from or not."""
  return x | {"mask": x.get("written", x["mask"])}


def counted(row: Sequence[int]) -> list[int]:
  """Returns the places of the counted tokens of a response."""
  return [t for t, m in enumerate(row) if m]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Estimators per response: (settings, inputs, group size) -> {sample: advantage}
# ---------------------------------------------------------------------------------------------------------------------------------------


def penalised(x: dict[str, Any]) -> list[float]:
  """Computes R_i − kl_coef·Σ_t kl_{i,t}."""
  if "kl" not in x:
    return x["rewards"]
  return [r - x["kl_coef"] * math.fsum(kl[t] for t in counted(row)) for r, kl, row in zip(x["rewards"], x["kl"], x["mask"])]


def group(s, x, size):
  """Computes (R_i − mean R)/(std R + eps)."""
  rewards, result = penalised(x), {}
  for samples in by_prompt(x, size):
    result |= dict(zip(samples, scaled([rewards[i] for i in samples], s["normalize_std"]))) if samples else {}
  return result


def leave_one_out(s, x, size):
  """Computes R_i minus the mean of the others, if there are enough of them."""
  rewards, result = penalised(x), {}
  for samples in by_prompt(x, size):
    if len(samples) >= s.get("min_valid", 2):
      result |= {i: float(Fraction(rewards[i]) - mean([rewards[j] for j in samples if j != i])) for i in samples}
  return result


def maxrl(s, x, size):
  """Computes (R_i − mean R)/mean R, or 0 if the mean is 0, with a negative reward as 0."""
  result = {}
  for samples in by_prompt(x, size):
    rewards = [max(x["rewards"][i], 0.0) for i in samples]
    if samples and mean(rewards) > 0:
      result |= {i: d / float(mean(rewards)) for i, d in zip(samples, deviations(rewards))}
  return result


def batch_scaled(s, x, size):
  """Computes (R_i − mean R of the prompt)/(std of these over the batch + eps)."""
  centred = group({"normalize_std": False}, x, size)
  scale = math.sqrt(math.fsum(d * d for d in centred.values()) / (len(centred) - 1)) + STD_EPS
  return {i: d / scale for i, d in centred.items()}


def opo(s, x, size):
  """Computes R_i minus the mean reward of a token that the prompt's samples wrote."""
  rewards, result = penalised(x), {}
  for samples in by_prompt(x, size):
    of_tokens = [rewards[i] for i in samples for _ in counted(x["mask"][i])]
    result |= {i: float(Fraction(rewards[i]) - mean(of_tokens)) for i in samples} if of_tokens else {}
  return result


def pass_at_k(s, x, size):
  """Computes (mean best of the subsets with i − mean best)/(std of the best + eps)."""
  rewards, result = penalised(x), {}
  for samples in by_prompt(x, size):
    best = {subset: max(rewards[i] for i in subset) for subset in itertools.combinations(samples, s["pass_k"])}
    all_best = mean([*best.values()])
    spread = math.sqrt(math.fsum(d * d for d in deviations([*best.values()])) / len(best))
    scale = spread + STD_EPS if s["normalize_std"] else 1.0
    result |= {i: float(mean([b for subset, b in best.items() if i in subset]) - all_best) / scale for i in samples}
  return result


def per_reward(s, x, size):
  """Computes the weighted sum of the normalised rewards, over its deviation in the batch."""
  each = [group(s, {"rewards": part} | {key: x[key] for key in ("mask", "valid") if key in x}, size) for part in x["parts"]]
  weights = x.get("weights", [1.0] * len(each))
  sums = {i: math.fsum(weight * part[i] for weight, part in zip(weights, each)) for i in each[0]}
  scale = math.sqrt(math.fsum(a * a for a in sums.values()) / (len(sums) - 1) + VARIANCE_EPS)
  return {i: a / scale for i, a in sums.items()}


def spo(s, x, size):
  """Computes the whitened distances of the rewards from their prompt's expected pass rate."""
  distances = {}
  for first, samples in zip(range(0, len(x["mask"]), size), by_prompt(x, size)):
    alpha, beta = x["beliefs"][first]
    distances |= {i: x["rewards"][i] - alpha / (alpha + beta) for i in samples}
  return whitened(distances)


def new_beliefs(s, x, size):
  """Computes the beliefs after the batch."""
  result = []
  for first, samples in zip(range(0, len(x["mask"]), size), by_prompt(x, size)):
    alpha, beta = x["beliefs"][first]
    kept = min(max(2 ** (-x["drift"][first] / s["half_drift"]), s["memory_low"]), s["memory_high"]) if samples else 1.0
    outcomes = [min(max(x["rewards"][i], 0.0), 1.0) for i in samples]
    result.append([kept * alpha + math.fsum(outcomes), kept * beta + math.fsum(1 - r for r in outcomes)])
  return result


# ---------------------------------------------------------------------------------------------------------------------------------------
# Estimators per token: (settings, inputs, group size) -> {(sample, place): advantage}
# ---------------------------------------------------------------------------------------------------------------------------------------


def steps(s, x, size):
  """Computes the sum of the normalised rewards of the steps that have not ended yet."""
  result = {}
  for samples in by_prompt({"mask": x["mask"]}, size):
    ends = [(i, t) for i in samples for t in counted(x["step_ends"][i])]
    rewards = dict(zip(ends, scaled([x["step_rewards"][i][t] for i, t in ends], s["normalize_std"]))) if ends else {}
    for i in samples:
      for t in counted(x["mask"][i]):
        result[i, t] = math.fsum(r for (j, end), r in rewards.items() if j == i and end >= t)
  return result


def by_state(x):
  """Returns the ends of the steps that began in each state, in order."""
  result: dict[int, list[tuple[int, int]]] = {}
  for i, row in enumerate(x["step_ends"]):
    for t in counted(row) if x.get("valid", [True] * len(x["mask"]))[i] else ():
      result.setdefault(x["step_states"][i][t], []).append((i, t))
  return result


def of_steps(x, worth):
  """Gives the number of the step that ends at (i, t) to all tokens of the step."""
  result = {}
  for i, row in enumerate(x["mask"]):
    for t in range(len(row)):
      later = [end for j, end in worth if j == i and end >= t]
      result[i, t] = worth[i, min(later)] if later else 0.0
  return result


def gigpo(s, x, size):
  """Adds to a response's advantage that of each step among those of its state."""
  to_go = {}
  for i, row in enumerate(x["step_ends"]):
    ends = counted(row)
    for n, t in enumerate(ends):
      to_go[i, t] = math.fsum(s["gamma"] ** k * x["step_rewards"][i][end] for k, end in enumerate(ends[n:]))
  worth = {}
  for ends in by_state(x).values():
    worth |= dict(zip(ends, scaled([to_go[end] for end in ends], s["normalize_std"])))
  of_responses, tokens = group(s, x, size), of_steps(x, worth)
  return {(i, t): s["episode_weight"] * of_responses.get(i, 0.0) + s["step_weight"] * a for (i, t), a in tokens.items()}


def hierarchical(s, x, size):
  """Computes the distance of each step's reward from the mean of its state's."""
  states, paid = by_state(x), {}
  for ends in states.values():
    for i, t in ends:
      behind = [end for end in counted(x["step_ends"][i]) if end > t]
      paid[i, t] = x["step_rewards"][i][t]
      if behind:
        attempts = states[x["step_states"][i][behind[0]]]
        rate = math.fsum(min(max(x["step_rewards"][j][end], 0.0), 1.0) for j, end in attempts) / len(attempts)
        paid[i, t] += s["challenge"] * 4 * rate * (1 - rate)
  worth = {}
  for ends in states.values():
    worth |= dict(zip(ends, deviations([paid[end] for end in ends])))
  return of_steps(x, worth)


def gtpo(s, x, size):
  """Computes tokens' rewards from the entropies at their place, whitened per outcome."""
  shaped: dict[bool, dict] = {True: {}, False: {}}
  for samples in by_prompt({"mask": x["mask"]}, size):
    for t, right in itertools.product(range(len(x["mask"][0])), (True, False)):
      there = [i for i in samples if x["mask"][i][t] and (x["rewards"][i] > s["right_above"]) == right]
      entropies = {i: max(x["old_entropy"][i][t], SMALLEST_ENTROPY) for i in there}
      weights = entropies if right else {i: 1 / h for i, h in entropies.items()}
      for i in there:
        reward = 1 + s["entropy_share"] * len(there) * weights[i] / math.fsum(weights.values())
        shaped[right][i, t] = reward if right else -reward
  return whitened(shaped[True]) | whitened(shaped[False])


def otb(s, x, size):
  """Computes R_i minus the mean of the rewards at the token's place, by squared norms so far."""
  result = {}
  gradients = lambda i, t: Fraction(x["old_score_norm"][i][t]) * (Fraction(x["importance"][i][t]) ** 2 if "importance" in x else 1)
  for samples in by_prompt(x, size):
    for place in range(len(x["mask"][0])):
      there = {i: counted(x["mask"][i]) for i in samples if len(counted(x["mask"][i])) > place}
      weights = {i: sum(gradients(i, t) for t in tokens[: place + 1]) for i, tokens in there.items()}
      baseline = sum(w * Fraction(x["rewards"][i]) for i, w in weights.items()) / (sum(weights.values()) or 1)
      result |= {(i, tokens[place]): float(Fraction(x["rewards"][i]) - baseline) for i, tokens in there.items()}
  return result


def games(s, x):
  """Computes the advantages of each game against the running baselines, and the last baselines."""
  baselines, result = list(x.get("role_baselines", [0.0] * s["num_roles"])), {}
  roles = range(s["num_roles"])
  for i, row in enumerate(x["mask"]):
    if not x.get("valid", [True] * len(x["mask"]))[i]:
      continue
    won, tokens, turn = [0.0] * len(roles), [], 0
    for t, (m, end) in enumerate(zip(row, x["step_ends"][i])):
      role = turn % len(roles)
      tokens += [(t, role)] if m or end else []
      won[role] += x["step_rewards"][i][t] if end else 0.0
      turn += end
    for p in {role for _, role in tokens}:
      lost = math.fsum(won[q] for q in roles if q != p) / (len(roles) - 1) if s["zero_sum"] else 0.0
      baselines[p] = s["decay"] * baselines[p] + (1 - s["decay"]) * (won[p] - lost)
      result |= {(i, t): won[p] - lost - baselines[p] for t, role in tokens if role == p}
  return result, baselines


def token_rewards(x: dict[str, Any], i: int) -> dict[int, float]:
  """Computes R·[last token] − kl_coef·kl_t of a response."""
  places = counted(x["mask"][i])
  return {t: (x["rewards"][i] if t == places[-1] else 0.0) - (x["kl_coef"] * x["kl"][i][t] if "kl" in x else 0.0) for t in places}


def returns(s, x, size):
  """Computes Σ_k γ^k·r_{t+k}."""
  result = {}
  for i in range(len(x["mask"])):
    rewards = [*token_rewards(x, i).items()]
    for n, (t, _) in enumerate(rewards):
      result[i, t] = math.fsum(s["gamma"] ** k * r for k, (_, r) in enumerate(rewards[n:]))
  return result


def generalized(x, gamma, lam_of):
  """Computes Σ_k (γλ)^k·δ_{t+k} with δ_t = r_t + γ·V_{t+1} − V_t."""
  result = {}
  for i, row in enumerate(x["mask"]):
    rewards, places = token_rewards(x, i), counted(row)
    values = [*(x["values"][i][t] for t in places), 0.0]
    deltas = [rewards[t] + gamma * values[n + 1] - values[n] for n, t in enumerate(places)]
    for n, t in enumerate(places):
      result[i, t] = math.fsum((gamma * lam_of(len(places))) ** k * delta for k, delta in enumerate(deltas[n:]))
  return result


def gae(s, x, size):
  """Computes the policy's advantages."""
  alpha = s["length_alpha"]
  return generalized(x, s["gamma"], lambda length: s["lam"] if alpha is None else max(0.0, 1 - 1 / (alpha * length)))


def targets(s, x):
  """Computes the critic's targets: its own advantages plus its values."""
  return {(i, t): a + x["values"][i][t] for (i, t), a in generalized(x, s["gamma"], lambda length: s["critic_lam"]).items()}


ESTIMATORS = {
  "group": group, "leave_one_out": leave_one_out, "rloo_n": leave_one_out, "maxrl": maxrl, "batch_scaled": batch_scaled,
  "opo": opo, "otb": otb, "pass_at_k": pass_at_k, "per_reward": per_reward, "steps": steps, "gigpo": gigpo,
  "hierarchical": hierarchical, "gtpo": gtpo,
  "rae": lambda s, x, size: games(s, x)[0],
  "spo": spo, "returns": returns, "gae": gae,
}  # fmt: skip


def on_tokens(numbers: dict, mask: list[list[int]]) -> dict[tuple[int, int], float]:
  """Gives each counted token its own number, or that of its response; 0 without either."""
  return {(i, t): float(numbers.get((i, t), numbers.get(i, 0.0))) for i, row in enumerate(mask) for t in counted(row)}


def rows(numbers: dict[tuple[int, int], float], mask: list[list[int]]) -> list[list[float]]:
  """Arranges numbers of tokens as [N, R], with 0 outside the mask."""
  return [[numbers.get((i, t), 0.0) if m else 0.0 for t, m in enumerate(row)] for i, row in enumerate(mask)]


def reference(name: str, settings: dict[str, Any], group_size: int, x: dict[str, Any]) -> dict[str, Any]:
  """Computes the results of one case from the inputs that it reads."""
  s, learned = {"whiten": False} | PAPERS[name] | settings, x["mask"]
  x = statistic(x)
  advantages = on_tokens(ESTIMATORS[name](s, x, group_size), x["mask"])
  result: dict[str, Any] = {"advantages": rows(whitened(advantages) if s["whiten"] else advantages, learned)}
  result |= {"returns": rows(targets(s, x), learned)} if name == "gae" else {}
  result |= {"new_beliefs": new_beliefs(s, x, group_size)} if name == "spo" else {}
  return result | ({"new_role_baselines": games(s, x)[1]} if name == "rae" else {})


def table() -> dict[str, Any]:
  """Computes the contents of golden.json."""
  inputs, estimators = all_inputs(), {name: {"defaults": {"whiten": False} | s, "cases": []} for name, s in PAPERS.items()}
  for name, batch, settings, group_size, reads in all_cases([*PAPERS]):
    result = reference(name, settings, group_size, {field: inputs[batch][field] for field in reads})
    case = {"settings": settings, "inputs": batch, "group_size": group_size, "reads": reads}
    estimators[name]["cases"].append(case | result)
  return {"format": 1, "inputs": inputs, "estimators": estimators}


if __name__ == "__main__":
  GOLDEN.write_text(dumps(table()), encoding="utf-8")
  print(f"{GOLDEN.name}: {GOLDEN.stat().st_size} bytes")
