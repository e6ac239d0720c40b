"""Rules of the study, written before its first counted trial, but for `equal_drift`.

Each quantity has one value per seed. `inflation` is the noise of an objective's gradient relative
to that of the gradient without a ratio, on the same responses. Rules at one condition read 7
updates, and 64 digits; slopes are least squares over log T of all four lengths at 7 updates.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.studies.noise import protocol

K, LONG = 7, 64
CONFIRMATORY = {"slope: GRPO's noise over GSPO's grows with length": True}
"""The one confirmatory rule. All others are exploratory and not corrected."""

SAME = float(np.log(1.25))
"""Noises within a quarter of each other count as equal."""


def table(trials: Sequence[Mapping]) -> dict[tuple[int, int, str, int], dict]:
  """Returns the rows of all tokens by length, number of updates, objective and seed."""
  return {
    (trial["length"], row["k"], row["objective"], trial["seed"]): row for trial in trials for row in trial["rows"] if row["part"] == "all"
  }


def complete(trials: Sequence[Mapping], lengths: Sequence[int] = protocol.LENGTHS) -> list[int]:
  """Returns the seeds with a trial of every length."""
  return [seed for seed in protocol.SEEDS if {(length, seed) for length in lengths} <= {(x["length"], x["seed"]) for x in trials}]


def missing(trials: Sequence[Mapping], failed: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
  """Returns the lengths and seeds of the trials that a verdict waits for."""
  done = {(trial["length"], trial["seed"]) for trial in trials} | set(failed)
  return [(length, seed) for length in protocol.LENGTHS for seed in protocol.SEEDS if (length, seed) not in done]


def slopes(trials: Sequence[Mapping], value: Callable[[Callable[[str], dict]], float], k: int = K) -> np.ndarray:
  """Returns the slope of a quantity over log T for each complete seed.

  Args:
    trials: Trials.
    value: Function of `row`, which returns the row of an objective by name.
    k: Number of updates.
  """
  rows, x = table(trials), np.log(protocol.LENGTHS)
  of_seed = lambda seed: [value(lambda name, at=length: rows[at, k, name, seed]) for length in protocol.LENGTHS]
  return np.array([np.polyfit(x, of_seed(seed), 1)[0] for seed in complete(trials)])


def at(trials: Sequence[Mapping], value: Callable[[Callable[[str], dict]], float], length: int = LONG, k: int = K) -> np.ndarray:
  """Returns a quantity at one condition for each complete seed."""
  rows = table(trials)
  return np.array([value(lambda name, seed=seed: rows[length, k, name, seed]) for seed in complete(trials)])


def log_inflation(name: str) -> Callable[[Callable[[str], dict]], float]:
  """Returns the quantity log(inflation) of an objective."""
  return lambda row: float(np.log(row(name)["inflation"]))


def log_over(name: str, other: str) -> Callable[[Callable[[str], dict]], float]:
  """Returns the quantity log(inflation of one / inflation of another)."""
  return lambda row: float(np.log(row(name)["inflation"] / row(other)["inflation"]))


def judge(results: Mapping) -> dict[str, dict]:
  """Judges the study, or says what it waits for.

  Args:
    results: `trials`, and `failed`, the lengths and seeds whose imitation failed.
  """
  trials = results["trials"]
  if waits := missing(trials, [tuple(x) for x in results["failed"]]):
    total = len(protocol.LENGTHS) * len(protocol.SEEDS)
    return {"waits": {"rule": f"trials: {total - len(waits)} of {total} done", "verdict": judging.CALIBRATION}}
  above, below, within = judging.above, judging.below, judging.within
  engaged = bool(np.mean(at(trials, lambda row: row("token")["std_token"])) > 0.01)
  verdicts = {
    "slope: GRPO's noise over GSPO's grows with length": above(
      "log(GRPO / GSPO at 15 %) against log T has a slope above 0",
      slopes(trials, log_over("grpo", "gspo 15 %")), engaged=engaged,
    ),
    "slope: equal clips": above(
      "log(GRPO at 15 % / GSPO at 15 %) against log T has a slope above 0",
      slopes(trials, log_over("grpo 15 %", "gspo 15 %")), engaged=engaged,
    ),
    "slope: token ratio": above(
      "the inflation of the token ratio without a clip grows with length", slopes(trials, log_inflation("token")), engaged=engaged
    ),
    "slope: product ratio": above(
      "the inflation of the product ratio without a clip grows with length", slopes(trials, log_inflation("product")), engaged=engaged
    ),
    "sequence ratio is no ratio": within(
      "without its clip, the sequence ratio leaves the noise of no ratio within a quarter",
      at(trials, log_inflation("sequence")), -SAME, SAME, engaged=engaged,
    ),
    "clip lowers GSPO's noise": below(
      "GSPO with its clip has less noise than without", at(trials, log_over("gspo 15 %", "sequence")), engaged=engaged
    ),
    "clip at equal share": below(
      "GRPO's clip at 15 % lowers the noise of the token ratio", at(trials, log_over("grpo 15 %", "token")), engaged=engaged
    ),
    "SAPO": below("SAPO has less noise than no ratio", at(trials, log_inflation("sapo")), engaged=engaged),
    "along: GSPO above GRPO": judging.mostly(
      "a noisy step of GSPO goes further along the fresh gradient than one of GRPO, in most seeds",
      dict(enumerate(at(trials, lambda row: row("gspo 15 %")["along"] > row("grpo")["along"]))), engaged=engaged,
    ),
    "along: GSPO above no clip": judging.mostly(
      "a noisy step of GSPO goes further along the fresh gradient than one of its ratio without a clip, in most seeds",
      dict(enumerate(at(trials, lambda row: row("gspo 15 %")["along"] > row("sequence")["along"]))), engaged=engaged,
    ),
    "GSPO-token is GSPO": within(
      "with one advantage per response, GSPO-token's noise is GSPO's within 1e-3",
      at(trials, log_over("gspo_token 15 %", "gspo 15 %")), -1e-3, 1e-3, engaged=engaged,
    ),
  }  # fmt: skip
  return verdicts


OUTCOME = {"grpo": "grpo", "gspo": "gspo 15 %", "sapo": "sapo", "dapo": "dapo", "cispo": "cispo", "gmpo": "gmpo", "vespo": "vespo"}
OUTCOME |= {"dppo_tv": "dppo_tv", "minirl": "minirl"}
"""Objectives of the forecast study by their names there, and their names here."""

OUTCOME_AT = (8, 64)
"""Length and updates per rollout batch of the forecast's trials, which were complete before."""


def outcome(trials: Sequence[Mapping], forecast: Sequence[Mapping]) -> dict:
  """Returns whether the noise of an objective goes with a worse end of training.

  It is Spearman's correlation over nine objectives between the mean log(inflation) after 7 updates
  at 8 tokens and the mean held-out accuracy at the end of the forecast's trials, where each
  objective was tuned equally. The claim is that it is below 0: noisy objectives end lower. Its
  one-sided p-value is exact, over all permutations of the names that a million draws reach; 0.05
  needs a correlation of about -0.6, so that only a strong relation can be found. Nothing here was
  chosen with the noise known: of it, one trial of another seed had been seen.

  Args:
    trials: Trials of this study.
    forecast: Trials of the forecast study, with the columns of its `trials.jsonl`.
  """
  from scipy.stats import rankdata

  rows, (length, updates) = table(trials), OUTCOME_AT
  seeds = complete(trials)
  noises = [np.mean([np.log(rows[length, K, name, seed]["inflation"]) for seed in seeds]) for name in OUTCOME.values()]
  picked = lambda name, row: row["objective"] == name and (row["length"], row["updates"], row["mismatch"]) == (length, updates, "none")
  ends = [np.mean([row["end"] for row in forecast if row["stage"] == "main" and picked(name, row)]) for name in OUTCOME]
  a, b = rankdata(noises), rankdata(ends)
  correlation = float(np.corrcoef(a, b)[0, 1])
  rng = np.random.default_rng(0)
  shuffled = rng.permuted(np.tile(b, (1_000_000, 1)), axis=1)
  centred = a - np.mean(a)
  reached = shuffled @ centred / np.sqrt(np.sum(centred**2) * np.sum((b - np.mean(b)) ** 2))
  p, other = float(np.mean(reached <= correlation + 1e-12)), float(np.mean(reached >= correlation - 1e-12))
  decided = {judging.REPRODUCED: p, judging.CONTRADICTED: other}
  verdict = next((name for name, value in decided.items() if value < judging.ALPHA), judging.INCONCLUSIVE)
  told = dict(zip(OUTCOME, (f"{noise:.3f}, {end:.3f}" for noise, end in zip(noises, ends, strict=True)), strict=True))
  return {"rule": "over objectives, more noise goes with a lower end", "verdict": verdict, "spearman": correlation, "p": p, "of": told}


def laws(trials: Sequence[Mapping]) -> list[dict]:
  """Returns the exponent of each objective's inflation in length, for each number of updates."""
  return [
    {"objective": name, "k": k, "exponent": judging.interval(slopes(trials, log_inflation(name), k))}
    for name in protocol.measured(protocol.LENGTHS[0])
    for k in protocol.STALENESS
  ]


DRIFTS = (0.1, 0.12, 0.15)
"""Standard deviations of a token's log-ratio that most trials pass through, at every length."""


def equal_drift(trials: Sequence[Mapping], drifts: Sequence[float] = DRIFTS) -> list[dict]:
  """Returns the exponent of each objective's inflation in length where tokens drift equally.

  At one number of updates longer responses drift less per token. Here the log(inflation) of a seed
  and a length is taken at a given drift, by linear interpolation between the numbers of updates
  over the logarithm of the drift, if it passes through that drift. A seed's exponent is its least
  squares over at least three lengths. Written on 2026-11-29, with all verdicts known: it decides
  nothing.
  """
  rows, result = table(trials), []
  for drift in drifts:
    exponents: dict[str, list[float]] = {}
    for seed in complete(trials):
      paths = {
        length: np.log(np.maximum.accumulate([rows[length, k, "token", seed]["std_token"] for k in protocol.STALENESS]))
        for length in protocol.LENGTHS
      }
      paths = {length: path for length, path in paths.items() if path[0] <= np.log(drift) <= path[-1]}
      for name in protocol.measured(protocol.LENGTHS[0]) if len(paths) > 2 else ():
        of = lambda length, name=name, seed=seed: [np.log(rows[length, k, name, seed]["inflation"]) for k in protocol.STALENESS]
        values = [np.interp(np.log(drift), path, of(length)) for length, path in paths.items()]
        exponents.setdefault(name, []).append(np.polyfit(np.log([*paths]), values, 1)[0])
    for name, own in exponents.items():
      result.append({"objective": name, "drift": drift, "seeds": len(own), "exponent": judging.interval(np.array(own))})
  return result
