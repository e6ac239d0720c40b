"""The page of an update's responses, each token in the colour of its part of the loss."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.report import TEMPLATES
from jaxrl_llm.report.data import MAX_TOKENS, thin_sample
from jaxrl_llm.report.page import build_page
from jaxrl_llm.run.jobs.blame.table import Blamed, counted, number, of_tokens
from jaxrl_llm.run.jobs.bundle.opened import OpenBundle
from jaxrl_llm.workdir import disk

_DIGITS = 9  # Those of float32, so that the tokens of a part add up to its loss.


def write(path: Path, opened: OpenBundle, blamed: Blamed, *, source: str, **chosen: Any) -> None:
  """Writes the page, with the viewer of a run's report.

  Args:
    path: File to write.
    opened: The bundle.
    blamed: Update of the bundle, taken apart.
    source: Run and step, or bundle, as it was named.
    **chosen: Arguments of `data`.
  """
  disk.replace(path, build_page(*TEMPLATES["run"], data(opened, blamed, **chosen) | {"made_from": source}))


def data(opened: OpenBundle, blamed: Blamed, *, most: int, group: int | None = None, response: int | None = None) -> dict[str, Any]:
  """Returns the data of the page, in the form of `report_data`.

  Args:
    opened: The bundle.
    blamed: First update of the bundle, taken apart.
    most: Maximum number of parts.
    group: Group whose responses are shown; None for all.
    response: Response that is shown; None for all.
  """
  shares, about, rows = blamed.shares, opened.about, []
  is_chosen = lambda x: (group is None or x["group"] == group) and (response is None or x["response"] == response)
  chosen = [i for i in blamed.order if any(map(is_chosen, blamed.parts[i]))]
  for rank, i in enumerate(chosen[:most]):
    share, agreement = shares.shares[i], shares.agreement[i]
    for x in filter(is_chosen, blamed.parts[i]):
      losses, of_loss, _ = of_tokens(opened, blamed, x)
      name = f"{blamed.by} {x[blamed.by]}"
      rows.append({
        "step": about["step"], "phase": "rl", "rank": rank, "label": f"{name}: share {number(share)}, agreement {number(agreement)}",
        "prompt": x.get("prompt"), "response": x["text"], "reward": x["reward"], "advantage": x["advantage"],
        "num_tokens": len(x["tokens"]), "number in the step": x["response"], "group": x["group"],
        f"share of the {blamed.by}": number(share), f"agreement of the {blamed.by}": number(agreement),
        "loss": float(f"{np.sum(losses):.6g}"), "tokens": x["tokens"], "blame/loss": losses.tolist(), "blame/share": of_loss.tolist(),
      })  # fmt: skip
  largest, budget, notes = max((abs(loss) for row in rows for loss in row["blame/loss"]), default=0.0), MAX_TOKENS, []
  for k, row in enumerate(rows):
    budget -= row["num_tokens"]
    rows[k] = thin_sample(row, keep_tokens=budget >= 0, digits=_DIGITS) | {"blame/largest": largest}
  norm = math.sqrt(shares.total)
  notes.append(f"Update {opened.update + 1}: loss {np.sum(shares.losses):.6g}, gradient norm {norm:.6g}, {counted(blamed)}.")
  if len(chosen) > most:
    notes.append(f"The first {most} of {len(chosen)} are shown (--most).")
  if budget < 0:
    notes.append(f"Only the first {MAX_TOKENS:,} tokens have colours.")
  elsewhere = len(opened.responses) - sum(map(len, blamed.parts))
  if elsewhere:
    notes.append(f"{elsewhere} responses of the step are in other updates, or in none.")
  config = flatten(about["config"])
  header = {
    "objective": config.get("objective.name"), "task": config.get("task.name"), "workdir": about["run"],
    "model": config.get("model.path") or config.get("model.preset"), "status": f"update {opened.update + 1} of RL step {about['step']}",
  }  # fmt: skip
  return {"header": header, "samples": rows, "config": config, "versions": about["stack"].get("versions") or {}, "notes": notes}
