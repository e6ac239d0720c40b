"""Rules of the study of noise on responses of up to 256 tokens, written before its first counted trial.

The study of noise ends at 64 tokens, because its task takes minutes of imitation there, and leaves
open whether the noise of GRPO's gradient grows with length relative to GSPO's: its exponent is -0.20
[-0.74, 0.35]. Here the task is that of E25, Fibonacci numbers modulo 10, at 16, 64 and 256 tokens,
with half an error of the teacher a response. All else is as there: responses of a policy, measured
at the policy after 7 GRPO updates of one rollout batch at 1e-3; variance of the gradient relative to
that without a ratio; GSPO's band and GRPO's clip of 15 % calibrated on seeds of their own after 3
updates; slopes by least squares over log T.

Seen before: lecture 8's policy at 64 tokens (seed 0, after 3 and 15 updates: GRPO 1.0 and 2.3, GSPO
0.7 and 0.5 with a band of 40 times its paper's, SAPO 0.4 and 0.2, product 7,900 and 5,000), no other
length, and nothing of these seeds.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.claims.bed import Sizes

LENGTHS, SEEDS, CALIBRATION_SEEDS = (16, 64, 256), tuple(range(1740, 1752)), (1730, 1731)
UPDATES, CALIBRATED_AT, PROMPTS = 7, 3, 32
CONFIRMATORY = "slope: GRPO's noise over GSPO's grows with length"
"""The one confirmatory rule. All others are exploratory and not corrected."""


def sizes(length: int) -> Sizes:
  """Returns the bed of a length; its imitation is that of E25."""
  return Sizes(
    task="fibonacci", digits=(length, length), error_rate=0.5 / length, warm_accuracy=0.4, warm_rows=1024 // length, eval_prompts=16
  )


def measured(widths: Mapping[str, float]) -> dict[str, tuple[str, dict[str, float | str]]]:
  """Returns objectives and settings by name, with the calibrated widths of GRPO's and GSPO's clips."""
  unclipped = lambda ratio: ("custom", {"ratio": ratio, "gate": "none", "weights": "sequence_mean"})
  return {name: unclipped(name) for name in ("token", "sequence", "product")} | {
    "grpo": ("grpo", {"kl_coef": 0.0}),
    "grpo 15 %": ("grpo", {"clip_low": widths["grpo"], "clip_high": widths["grpo"], "kl_coef": 0.0}),
    "gspo 15 %": ("gspo", {"clip_low": 3e-4 * widths["gspo"], "clip_high": 4e-4 * widths["gspo"]}),
    "sapo": ("sapo", {}),
  }


def slopes(trials: Sequence[Mapping], value: Callable[[Mapping[str, Mapping]], float]) -> np.ndarray:
  """Returns the slope of a quantity of a trial's objectives over log T, for each complete seed."""
  known = {(trial["length"], trial["seed"]): trial["objectives"] for trial in trials}
  complete = [seed for seed in SEEDS if all((length, seed) in known for length in LENGTHS)]
  of_seed = lambda seed: [value(known[length, seed]) for length in LENGTHS]
  return np.array([np.polyfit(np.log(LENGTHS), of_seed(seed), 1)[0] for seed in complete])


def judge(trials: Sequence[Mapping], failed: Sequence[Sequence[int]]) -> dict[str, dict]:
  """Judges the study once all of its trials are done, but for seeds whose imitation failed."""
  done = {(trial["length"], trial["seed"]) for trial in trials} | {tuple(x) for x in failed}
  if missing := [(length, seed) for length in LENGTHS for seed in SEEDS if (length, seed) not in done]:
    return {CONFIRMATORY: judging.waits(f"{len(missing)} are left")}
  log = lambda name: lambda of: float(np.log(of[name]["inflation"]))
  over = lambda name, other: lambda of: float(np.log(of[name]["inflation"] / of[other]["inflation"]))
  spread = lambda kind: lambda of: float(np.log(of["token"][f"std_{kind}"]))
  engaged = bool(np.mean([trial["objectives"]["token"]["std_token"] for trial in trials]) > 0.01)
  above = lambda rule, value: judging.above(rule, slopes(trials, value), engaged=engaged)
  return {
    CONFIRMATORY: above("log(GRPO / GSPO at 15 %) against log T has a slope above 0", over("grpo", "gspo 15 %")),
    "slope: equal clips": above("log(GRPO at 15 % / GSPO at 15 %) against log T has a slope above 0", over("grpo 15 %", "gspo 15 %")),
    "slope: token ratio": above("the inflation of the token ratio without a clip grows with length", log("token")),
    "slope: sequence ratio": above("the inflation of the sequence ratio without a clip grows with length", log("sequence")),
    "slope: product ratio": above("the inflation of the product ratio without a clip grows with length", log("product")),
    "slope: SAPO": above("SAPO's inflation grows with length", log("sapo")),
    "spread: sequence ratio": judging.below(
      "std of the log of the sequence ratio against log T has a slope below 0", slopes(trials, spread("sequence")), engaged=engaged
    ),
    "spread: product ratio": above("std of the log of the product ratio grows with length", spread("product")),
  }  # fmt: skip
