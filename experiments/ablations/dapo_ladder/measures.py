"""Measures of a trial from its metrics and samples, and paired differences of two rungs."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.rewards.final_answer import final_answer
from jaxrl_llm.tasks.sets import arithmetic
from jaxrl_llm.text_types import Completion


def steps(rows: Sequence[Mapping], *, num_sequences: int) -> list[dict]:
  """Returns the RL steps.

  Args:
    rows: Rows of `metrics.jsonl`.
    num_sequences: Number of sequences that a step learns from.

  Returns:
    For each step `entropy` (nats a token), `tokens_mean` of a response, `truncated` (fraction of
    the responses), `clip_up` and `clip_down` (fraction of the tokens with A > 0 or A < 0 on which
    the clip binds), `drawn`, response tokens drawn by the step, and `rounds` in which they were
    drawn.
  """
  table = []
  for row in rows:
    if row["phase"] == "rl":
      table.append(
        {
          "step": row["step"],
          "entropy": row["actor/entropy"],
          "tokens_mean": row["response_length/mean"],
          "truncated": row["response_length/clip_ratio"],
          "clip_up": row["actor/pg_clipfrac_pos"],
          "clip_down": row["actor/pg_clipfrac_neg"],
          "drawn": row.get("group/response_tokens_drawn", row["response_length/mean"] * num_sequences),
          "rounds": row.get("group/rounds", 1.0),
        }
      )
  return table


def evals(rows: Sequence[Mapping]) -> list[dict]:
  """Returns the evaluations: RL step, held-out accuracy, mean length of a response."""
  return [
    {"step": row["step"], "accuracy": row["eval/accuracy"], "tokens_mean": row["eval/response_length/mean"]}
    for row in rows
    if row["phase"] == "eval"
  ]


def seconds(rows: Sequence[Mapping]) -> float:
  """Returns the wall time of a trial's RL steps, without evaluations."""
  return sum(row["timing_s/step"] for row in rows if row["phase"] == "rl")


def looks(samples: Sequence[Mapping], *, group_size: int) -> list[dict]:
  """Returns the rollout batches of which every response was written down.

  Args:
    samples: Rows of `samples.jsonl`, G consecutive ones for each prompt.
    group_size: G.

  Returns:
    For each RL step looked at: `right`, fraction of the responses; `tokens_right` and
    `tokens_wrong`, mean lengths (None of none); `mixed`, fraction of the groups in which some are
    right and some are wrong; `cut_right`, fraction of the truncated responses that had written
    every line of the working correctly until they were cut, `cut_advantage`, the mean advantage
    that these were given, and `cut_count`, their number.
  """
  table = []
  for step in sorted({row["step"] for row in samples}):
    mine = [row for row in samples if row["step"] == step]
    right = np.array([is_right(row) for row in mine])
    tokens = np.array([row["num_tokens"] for row in mine])
    groups = right.reshape(-1, group_size).mean(axis=1)
    cut = [row for row in mine if not row["stopped"]]
    unlucky = [row["advantage"] for row in cut if works(row)]
    table.append(
      {
        "step": step,
        "right": float(right.mean()),
        "tokens_right": _mean(tokens[right]),
        "tokens_wrong": _mean(tokens[~right]),
        "mixed": float(np.mean((groups > 0) & (groups < 1))),
        "cut_count": len(unlucky),
        "cut_right": len(unlucky) / len(cut) if cut else None,
        "cut_advantage": _mean(unlucky),
      }
    )
  return table


def is_right(row: Mapping) -> bool:
  """Returns whether a sample earns the reward of a right answer.

  A penalty on its length does not count.
  """
  completion = Completion(row["response"], tuple(row["token_ids"]), row["num_tokens"], row["stopped"])
  return final_answer(completion, row) == 1


def works(row: Mapping) -> bool:
  """Returns whether all lines of a response that was cut are right or copies of the line before.

  The unfinished last line does not count.
  """
  *lines, _ = row["response"].split("\n")
  lines = [line for i, line in enumerate(lines) if i == 0 or line != lines[i - 1]]
  expected = arithmetic.working(row["prompt"].strip()).split("\n")
  return bool(lines) and lines == expected[: len(lines)]


def _mean(values: Sequence[float]) -> float | None:
  return float(np.mean(values)) if len(values) else None


def trend(rows: Sequence[Mapping], name: str) -> float:
  """Returns the slope of a quantity against the RL step.

  Steps without it are left out. With fewer than two steps the slope is 0.
  """
  points = [(row["step"], row[name]) for row in rows if row[name] is not None]
  return float(np.polyfit(*zip(*points, strict=True), 1)[0]) if len(points) > 1 else 0.0


def at_tokens(steps: Sequence[Mapping], evals: Sequence[Mapping], budget: float) -> float:
  """Returns the held-out accuracy of one trial once it has drawn a number of response tokens.

  It is interpolated linearly between two evaluations.
  """
  drawn = np.cumsum([0.0, *(row["drawn"] for row in sorted(steps, key=lambda row: row["step"]))])
  points = sorted((drawn[row["step"]], row["accuracy"]) for row in evals)
  return float(np.interp(budget, *zip(*points, strict=True)))
