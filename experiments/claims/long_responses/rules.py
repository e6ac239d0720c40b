"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

GSPO's paper (arXiv:2507.18071) says that the importance ratios of single tokens are noise that
accumulates over long responses until training collapses, and that a ratio of the sequence does not.
If so, GSPO's lead over GRPO grows with length.

Bed: Fibonacci numbers modulo 10 (`claims.fibonacci`), so that one task has responses of 16, 64 and
256 tokens. Every token follows from the two before it. The teacher's error rate is half an error a
response at each length, so that all policies begin alike and length alone differs. 16 updates of
each rollout batch, by Adam at 1e-3. "samples": an update has 32 responses at each length; "tokens":
it has 2,048 tokens, so 128, 32 and 8 responses. The 64 tokens are the same arms in both. GRPO clips
at 0.2, SAPO has its paper's temperatures, and GSPO's bands clip about 15 % of the tokens, its
paper's share. "reinforce" has no ratio at all: what it loses by stale samples is no ratio's noise.

The claim is engaged if GRPO's clip binds on long responses at all: on 0.1 % of the tokens or more
(its paper has 0.13 %).

Looked at before, on seeds 900 and 901, in trials of 96 updates at several bands: the share that
GSPO clips (16 tokens at 90 times its paper's band: 16 and 17 %; 64 tokens at 36 times: 18 and 16 %;
256 tokens at 24 times: 10 %, one seed; 34 % in the first 32 updates at 16 times) and k3. And
accuracies of 40 trials at 16 and 64 tokens and of one at 256, with one and half an error a response,
4 and 16 updates a batch, rates of 3e-4 to 2e-3 and narrower bands: GSPO ended 0.2 below GRPO to 0.25
above it, and SAPO lower than both at 16 updates a batch. The imitation of 256 tokens takes one to two minutes of a core,
a trial of 256 tokens one, which set the number of updates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import judging
from experiments.claims.bed import Arm, Sizes

SEEDS = tuple(range(1700, 1724))
CONFIRMATORY = {"E25": "E25, samples: GSPO's lead over GRPO grows from 16 to 256"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""

LEARNING_RATE, STALE, CLIPPED = 1e-3, 16, 1e-3
SIZES = Sizes(task="fibonacci", warm_accuracy=0.4, updates=64, evaluations=4, eval_prompts=16, end_prompts=48)
PROMPTS = {("samples", 16): 4, ("samples", 64): 4, ("samples", 256): 4, ("tokens", 16): 16, ("tokens", 256): 1}
"""Prompts of a mini-batch by what stays equal and the tokens of a response."""
BANDS = {16: 90.0, 64: 40.0, 256: 24.0}
"""GSPO's bands in units of its paper's, by the tokens of a response."""


def _ways(tokens: int) -> dict[str, Arm]:
  band = (("clip_low", 3e-4 * BANDS[tokens]), ("clip_high", 4e-4 * BANDS[tokens]))
  return {
    "grpo": Arm("grpo", (("kl_coef", 0.0),)), "gspo": Arm("gspo", band), "sapo": Arm("sapo"), "reinforce": Arm("reinforce")
  }  # fmt: skip


def arms() -> list[tuple[dict, Arm]]:
  """Returns every objective at every length, with equal samples and with equal tokens."""
  return [
    ({"equal": equal, "tokens": tokens, "objective": name}, arm._replace(per_rollout=STALE, learning_rate=LEARNING_RATE))
    for equal, tokens in PROMPTS
    for name, arm in _ways(tokens).items()
    if equal == "samples" or name != "reinforce"
  ]


def sized(sizes: Sizes, names: Mapping[str, Any]) -> Sizes:
  """Returns the sizes of an arm; the imitation of every length sees 1,024 tokens a step."""
  tokens = names["tokens"]
  return sizes._replace(
    task="fibonacci", digits=(tokens, tokens), error_rate=0.5 / tokens, num_prompts=PROMPTS[names["equal"], tokens],
    warm_rows=1024 // tokens,
  )  # fmt: skip


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided."""
  trials: Sequence[Mapping] = results["trials"]

  def column(equal: str, tokens: int, objective: str, value=None) -> dict[int, Any]:
    names = {"equal": "samples" if tokens == 64 else equal, "tokens": tokens, "objective": objective}
    rows = [row for row in trials if all(row[name] == x for name, x in names.items())]
    return judging.solved(rows) if value is None else {row["seed"]: value(row) for row in rows}

  verdicts = {}
  for equal in ("samples", "tokens"):
    clipped = float(np.mean(list(column(equal, 256, "grpo", lambda row: row["clipped"]).values())))
    engaged = dict(engaged=clipped >= CLIPPED, clipped=clipped)
    lead = lambda tokens, more, less, equal=equal: judging.paired(column(equal, tokens, more), column(equal, tokens, less))
    for more, less in (("gspo", "grpo"), ("gspo", "sapo")):
      title = f"{more.upper()}'s lead over {less.upper()}"
      rule = f"held-out accuracy at the end of {more} minus that of {less}, at 256 tokens minus at 16, above 0"
      grown = lead(256, more, less) - lead(16, more, less)
      verdicts[f"E25, {equal}: {title} grows from 16 to 256"] = judging.above(rule, grown, **engaged)
      for tokens in (16, 64, 256) if equal == "samples" else (16, 256):
        rule = f"held-out accuracy at the end, {more} minus {less}, above 0"
        verdicts[f"E25, {equal}: {title} at {tokens}"] = judging.above(rule, lead(tokens, more, less), **engaged)
    for objective in ("grpo", "gspo", "sapo"):
      fallen = [column(equal, tokens, objective, lambda row: judging.fell(row["curve"])) for tokens in (256, 16)]
      rule = f"more seeds of {objective} collapse (`judging.fell`) at 256 tokens than at 16"
      verdicts[f"E25, {equal}: {objective.upper()} collapses more at 256 than at 16"] = judging.more_often(rule, *fallen, **engaged)
  for tokens in (16, 64, 256):
    rule = "held-out accuracy at the end, no ratio minus grpo, above 0"
    gap = judging.paired(column("samples", tokens, "reinforce"), column("samples", tokens, "grpo"))
    verdicts[f"E25, samples: no ratio above GRPO at {tokens}"] = judging.above(rule, gap)
  return verdicts
