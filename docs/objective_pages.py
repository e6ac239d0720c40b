"""A page of the site for each objective: definition, curve, config, and what is stored of it.

Everything is made from the docstring, the code and the studies' stored rows.
"""

import functools
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 460, 260
BOUNDS = (0.25, 2.5)
"""Smallest and largest ratio of a curve."""

NUM_RATIOS = 141
COLOURS = {1: "#1d4ed8", -1: "#be185d"}
WITHOUT_CURVE = ("custom", "sft", "clip_cov", "kl_cov")
"""Objectives whose gradient at a token does not follow from its ratio and advantage alone."""


def pages() -> dict[str, str]:
  """Returns the Markdown of every page by its path, the index included."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")  # To look for an accelerator is slow.
  from jaxrl_llm.objectives import OBJECTIVES

  made = {f"objectives/{name}.md": page(name) for name in OBJECTIVES}
  lines = ["# Every objective", "", "A page each, made from docstrings and stored results.", ""]
  for name, factory in OBJECTIVES.items():
    first = factory.__doc__.partition("\n")[0]
    lines.append(f"- [`{name}`]({name}.md): {first.removeprefix('Builds ')}")
  return {"objectives/index.md": "\n".join(lines) + "\n"} | made


def configs() -> dict[str, str]:
  """Returns the path of the config of each objective that has one of its name."""
  from jaxrl_llm.objectives import OBJECTIVES

  return {name: f"configs/{name}.py" for name in OBJECTIVES if (ROOT / "configs" / f"{name}.py").exists()}


def page(name: str) -> str:
  """Writes the page of an objective."""
  from jaxrl_llm.objectives import OBJECTIVES

  parts = [f"# {name}", "", f"::: {OBJECTIVES[name].__module__}.{name}", ""]
  if name in configs():
    parts += [f"The laptop job with it: `python -m jaxrl_llm.main --config=configs/{name}.py` ([config](../configs/{name}.py)).", ""]
  if name not in WITHOUT_CURVE:
    about = "The coefficient of ∇log π, over A, of a response of one token against its ratio: "
    about += "with a positive advantage in blue, with a negative one in pink. Settings are the defaults."
    parts += ["## What it does to a token", "", svg(curves(name)), "", about, ""]
  parts += [*ladder(name), *board(name)]
  return "\n".join(parts)


def curves(name: str) -> dict[int, tuple[Sequence[float], Sequence[float]]]:
  """Computes the coefficient of a token's ∇log π, over A, against its ratio, by autodiff.

  Args:
    name: Key of `objectives.OBJECTIVES`; its settings are the defaults, without a KL penalty.

  Returns:
    Ratios and coefficients, by the sign of the advantage.
  """
  from experiments.ablations.objective_shapes.coefficients import curve, policy_term

  objective = policy_term(name, **({"max_tokens": 1} if name == "dr_grpo" else {}))
  ratios = np.geomspace(*BOUNDS, NUM_RATIOS)
  return {sign: (ratios.tolist(), curve(objective, ratios, sign).tolist()) for sign in (1, -1)}


def svg(drawn: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> str:
  """Draws curves as SVG: text in the page's own colour, so that it reads in the dark as well."""
  values = [y for _, ys in drawn.values() for y in ys]
  low, high = min(0.0, *values), max(1.0, *values)
  x = lambda ratio: 45 + (WIDTH - 60) * (ratio - BOUNDS[0]) / (BOUNDS[1] - BOUNDS[0])
  y = lambda value: HEIGHT - 35 - (HEIGHT - 55) * (value - low) / (high - low)
  lines = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" font-size="12" fill="currentColor">']
  lines.append("<title>Coefficient of a token against its ratio</title>")
  for value in sorted({low, 0.0, 1.0, high}):
    lines.append(f'<line x1="45" x2="{WIDTH - 15}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="currentColor" stroke-opacity="0.2"/>')
    lines.append(f'<text x="38" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
  for ratio in (0.5, 1, 1.5, 2, 2.5):
    lines.append(f'<text x="{x(ratio):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{ratio:g}</text>')
  lines.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">ratio r</text>')
  for sign, (xs, ys) in drawn.items():
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))
    lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[sign]}" stroke-width="2"/>')
  return "\n".join([*lines, "</svg>"])


def ladder(name: str) -> list[str]:
  """Returns a table of the objective's rows of the staleness ladder (E20), if it has any."""
  from experiments import judging

  own = [row for row in _trials() if row["objective"] == name]
  if not own:
    return []
  lines = ["## Stale data, at one learning rate", ""]
  lines += ["| updates per rollout batch | held-out accuracy at the end | 95 % over seeds | seeds |", "| --- | --- | --- | --- |"]
  for updates in sorted({row["per_rollout"] for row in own}):
    ends = list(judging.solved(own, per_rollout=updates).values())
    at = judging.interval(ends)
    lines.append(f"| {updates} | {at['mean']:.1%} | {at['low']:.1%} to {at['high']:.1%} | {len(ends)} |".replace("%", " %"))
  guessed = " Its band was guessed." if name in ("gspo", "gspo_token") else ""
  about = "33 thousand weights, responses of 4 to 8 tokens, a rate chosen with GRPO."
  return [*lines, "", f"{about}{guessed} [The study](../experiments/claims/staleness/README.md).", ""]


@functools.cache
def _trials() -> list[dict]:
  from experiments.results import from_json

  return from_json((ROOT / "experiments/claims/staleness/results.json").read_text())["trials"]


def board(name: str) -> list[str]:
  """Returns the objective's row of the leaderboard, where each is tuned equally, if it has one."""
  rows = [line for line in (ROOT / "experiments/studies/forecast/LEADERBOARD.md").read_text().splitlines() if line.startswith("|")]
  own = [line for line in rows if line.split("|")[1].strip() == name]
  if not own:
    return []
  about = "Area under the held-out accuracy curve minus GRPO's, in points; of GRPO the area itself. "
  about += "T are tokens, N updates of a rollout batch."
  link = "[All objectives](../experiments/studies/forecast/LEADERBOARD.md)."
  return ["## Tuned equally", "", *rows[:2], *own, "", f"{about} {link}", ""]
