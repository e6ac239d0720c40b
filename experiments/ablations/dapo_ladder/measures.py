"""Measures of a trial, computed from its metrics and samples."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.rewards.final_answer import final_answer
from jaxrl_llm.tasks.sets import arithmetic
from jaxrl_llm.text_types import Completion


def steps(rows: Sequence[Mapping], *, num_sequences: int) -> list[dict]:
  """Extracts the measures of the RL steps from the metrics.

  Args:
    rows: Rows of `metrics.jsonl`.
    num_sequences: Number of sequences that a step learns from.

  Returns:
    One row per step: `step`; `entropy`, in nats per token; `tokens_mean`, the mean length of a
    response; `truncated`, the fraction of truncated responses; `clip_up` and `clip_down`, the
    fractions of the tokens with A > 0 and A < 0 on which the clip binds; `drawn`, the number of
    response tokens that the step drew; `rounds`, the number of rounds that drew them.
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
  """Extracts the evaluations: RL step, held-out accuracy, mean length of a response."""
  return [
    {"step": row["step"], "accuracy": row["eval/accuracy"], "tokens_mean": row["eval/response_length/mean"]}
    for row in rows
    if row["phase"] == "eval"
  ]


def seconds(rows: Sequence[Mapping]) -> float:
  """Sums the wall time of a trial's RL steps, without evaluations."""
  return sum(row["timing_s/step"] for row in rows if row["phase"] == "rl")


def looks(samples: Sequence[Mapping], *, group_size: int) -> list[dict]:
  """Measures the rollout batches whose responses were all logged.

  Args:
    samples: Rows of `samples.jsonl`, G consecutive rows per prompt.
    group_size: Number of samples per prompt (G).

  Returns:
    One row per logged RL step: `step`; `right`, the fraction of right responses; `tokens_right`
    and `tokens_wrong`, the mean lengths of right and wrong responses (None if there are none);
    `mixed`, the fraction of the groups with both right and wrong responses; `cut_right`, the
    fraction of the truncated responses whose complete lines are all correct (None if none was
    truncated); `cut_count`, the number of these responses; `cut_advantage`, their mean advantage.
  """
  table = []
  for step in sorted({row["step"] for row in samples}):
    batch = [row for row in samples if row["step"] == step]
    right = np.array([is_right(row) for row in batch])
    tokens = np.array([row["num_tokens"] for row in batch])
    groups = right.reshape(-1, group_size).mean(axis=1)
    cut = [row for row in batch if not row["stopped"]]
    sound_advantages = [row["advantage"] for row in cut if works(row)]
    table.append(
      {
        "step": step,
        "right": float(right.mean()),
        "tokens_right": _mean(tokens[right]),
        "tokens_wrong": _mean(tokens[~right]),
        "mixed": float(np.mean((groups > 0) & (groups < 1))),
        "cut_count": len(sound_advantages),
        "cut_right": len(sound_advantages) / len(cut) if cut else None,
        "cut_advantage": _mean(sound_advantages),
      }
    )
  return table


def is_right(row: Mapping) -> bool:
  """Returns whether a sample's final answer is right, whatever the penalty on its length."""
  completion = Completion(row["response"], tuple(row["token_ids"]), row["num_tokens"], row["stopped"])
  return final_answer(completion, row) == 1


def works(row: Mapping) -> bool:
  """Checks that each line of a truncated response is correct or copies the line before.

  The unfinished last line does not count. A response without a complete line is not sound.
  """
  *lines, _ = row["response"].split("\n")
  lines = [line for i, line in enumerate(lines) if i == 0 or line != lines[i - 1]]
  expected = arithmetic.working(row["prompt"].strip()).split("\n")
  return bool(lines) and lines == expected[: len(lines)]


def _mean(values: Sequence[float]) -> float | None:
  return float(np.mean(values)) if len(values) else None


def trend(rows: Sequence[Mapping], name: str) -> float:
  """Fits the slope of a quantity against the RL step.

  Steps at which the quantity is None are left out. With fewer than two steps the slope is 0.
  """
  points = [(row["step"], row[name]) for row in rows if row[name] is not None]
  return float(np.polyfit(*zip(*points, strict=True), 1)[0]) if len(points) > 1 else 0.0


def at_tokens(steps: Sequence[Mapping], evals: Sequence[Mapping], budget: float) -> float:
  """Interpolates the held-out accuracy of a trial at a number of drawn response tokens.

  The accuracy is linear between two evaluations and constant beyond the last one.
  """
  drawn = np.cumsum([0.0, *(row["drawn"] for row in sorted(steps, key=lambda row: row["step"]))])
  points = sorted((drawn[row["step"]], row["accuracy"]) for row in evals)
  return float(np.interp(budget, *zip(*points, strict=True)))
