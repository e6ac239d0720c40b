"""Pictures of objectives for lectures 1 and 5.

Tables come from the objectives' docstrings, curves and maps of the coefficient C from autodiff.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.ablations.objective_shapes import studies
from experiments.ablations.objective_shapes.coefficients import coefficients, curve, policy_term
from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, letter, two_sided
from experiments.notebooks.pictures import Picture, Table, picture
from jaxrl_llm import objectives
from jaxrl_llm.segments import token_weights
from jaxrl_llm.types import Objective

FAMILIES = {
  "no gate": ("reinforce", "sft"),
  "clip of a token": ("ppo", "grpo", "dr_grpo", "reinforce_plus_plus", "dapo", "minirl", "fipo"),
  "clip of a sequence": ("gspo", "gspo_token", "luspo", "rloo", "gmpo"),
  "smooth": ("sapo", "custom", "maspo", "vespo"),
  "capped weight": ("cispo", "minpro", "topr"),
  "trust region": ("dppo_tv", "dppo_kl", "cppo"),
  "few tokens, or a pull": ("clip_cov", "kl_cov", "dro"),
}
"""All objectives, by the kind of their gate.

Here `custom` is the sequence ratio with SAPO's gate.
"""

_COLORS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK)
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
_RATIO = np.union1d(np.linspace(0.02, 3.0, 150), 1.0)


def slots_table(names: Sequence[str]) -> Table:
  """Tabulates each objective's three slots and its paper, read from its docstrings."""
  rows = []
  for name in names:
    function = objectives.OBJECTIVES[name]
    summary = inspect.getdoc(sys.modules[function.__module__]).splitlines()[0]
    ids = re.findall(r"arXiv:(\d{4}\.\d{5})", inspect.getdoc(function))
    links = ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in ids)
    rows.append([f"`{name}`", *_slots(summary.partition(": ")[2].rstrip(".") or summary.rstrip(".")), links])
  return Table(["objective", "log-ratio", "gate", "weights", "arXiv"], rows)


def _slots(summary: str) -> list[str]:
  """Splits "ratio x gate x weights" into its three parts."""
  parts = [part.removeprefix("Any ").removeprefix("any ") for part in summary.split(" x ")]
  if len(parts) == 3:
    return [f"any {part}" if summary.startswith("Any") else part for part in parts]
  return ["none", "none", "token mean"]  # `sft` has neither a gate nor an advantage.


def weighings(lengths: Sequence[int], max_tokens: int) -> Picture:
  """Draws the weight of one token under each weighting, against the length of its response.

  Two consecutive responses belong to one prompt.

  Args:
    lengths: Lengths of the responses of a batch, in tokens.
    max_tokens: Budget of a response, in tokens.
  """
  names = {"token mean": "dapo", "prompt mean": "dapo", "sequence mean": "grpo", "sequence sum": "reinforce", "constant": "dr_grpo"}
  settings = {"constant": {"max_tokens": max_tokens}, "prompt mean": {"weights": "prompt_mean"}}
  mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.float32)
  prompts = jnp.broadcast_to(jnp.arange(len(lengths))[:, None] // 2, mask.shape)
  by_name = {}
  for label, name in names.items():
    made = objectives.make(name, **settings.get(label, {}))
    by_name[label] = np.asarray(token_weights(made, jnp.asarray(mask), None, prompts))
  alt = "Weight of a token and of a whole response against the length of the response, for five weightings."
  return picture(_weighings, by_name, lengths, height=2.2, alt=alt)


def _weighings(figure: Any, by_name: Mapping[str, np.ndarray], lengths: Sequence[int]) -> None:
  """Draws one panel for tokens and one for responses."""
  for axes, label, title, read in zip(
    figure.subplots(1, 2), "ab", ("weight of one token", "weight of the whole response"), (lambda w: w[:, 0], lambda w: w.sum(axis=1)),
    strict=True,
  ):  # fmt: skip
    for (name, weights), color, dash in zip(by_name.items(), _COLORS, _DASHES, strict=False):
      axes.plot(lengths, read(weights), marker="o", color=color, linestyle=dash, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("length of the response (tokens)")
    letter(axes, label, title)
  axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def ratio_noise(lengths: Sequence[int], spread: float, *, count: int = 2000, seed: int = 0) -> Picture:
  """Draws the spread of the ratios of tokens, of their product and of the sequence.

  The log-ratios of tokens are independent and normal, with E[r] = 1.

  Args:
    lengths: Lengths of responses, in tokens.
    spread: Standard deviation of a token's log-ratio, in nats.
    count: Number of responses of each length.
    seed: Seed of the noise.
  """
  rng, ratios = np.random.default_rng(seed), {}
  for tokens in lengths:
    z = spread * rng.standard_normal((count, tokens)) - spread**2 / 2
    ratios[tokens] = {"token": z.ravel()[:count], "product": z.sum(axis=1), "sequence": z.mean(axis=1)}
  alt = "Distributions of the token ratio, of the product and of the sequence ratio, and their spread against length."
  return picture(_ratio_noise, ratios, height=2.4, alt=alt)


def _ratio_noise(figure: Any, ratios: Mapping[int, Mapping[str, np.ndarray]]) -> None:
  """Draws histograms at the largest length, and spreads against length."""
  histogram, lines = figure.subplots(1, 2)
  labels = {"token": r"$r_t$ of a token", "product": r"$\rho=r_1\cdots r_T$", "sequence": r"$s=\rho^{1/T}$"}
  longest = max(ratios)
  bins = np.linspace(-1.0, 1.0, 81)
  for (name, label), color in zip(labels.items(), (ORANGE, GREY, BLUE), strict=True):
    histogram.hist(ratios[longest][name], bins=bins, density=True, color=color, alpha=0.55, label=label)
    lines.plot(list(ratios), [np.std(kinds[name]) for kinds in ratios.values()], marker="o", color=color, label=label)
  histogram.set_yscale("log")
  histogram.set_ylim(0.05, 100)
  histogram.set_xlabel("log of the ratio (nats)")
  histogram.set_ylabel("density")
  letter(histogram, "a", f"responses of {longest} tokens")
  lines.set_xscale("log", base=2)
  lines.set_yscale("log")
  lines.set_xticks(list(ratios), [str(tokens) for tokens in ratios])
  lines.set_xlabel("length T of the response (tokens)")
  lines.set_ylabel("spread of the log-ratio (nats)")
  lines.legend(loc="center left", bbox_to_anchor=(1, 0.5))
  letter(lines, "b", "against length")


def curves(chosen: Mapping[str, Sequence[str | tuple[str, Objective]]], *, lowest: float = -0.08, highest: float = 2.5) -> Picture:
  """Draws C against the ratio for A > 0 (above) and A < 0 (below), one column per group.

  Args:
    chosen: Groups by the title of their column. A member is the name of an objective, or a pair of
      a label and an objective.
    lowest: Lower end of the axis of C.
    highest: Upper end of the axis of C.
  """
  coefficients = {}
  for title, group in chosen.items():
    made = [(one, policy_term(one)) if isinstance(one, str) else one for one in group]
    coefficients[title] = {label: {sign: curve(objective, _RATIO, sign) for sign in (1, -1)} for label, objective in made}
  alt = "Coefficient C of A times the score against the ratio, by sign of the advantage: " + "; ".join(
    f"{title}: {', '.join(group)}" for title, group in coefficients.items()
  )
  return picture(_curves, coefficients, (lowest, highest), height=4.1, alt=alt)


def _curves(figure: Any, coefficients: Mapping[str, Mapping], limits: tuple[float, float]) -> None:
  """Draws one column per group and one row per sign of the advantage."""
  panels = figure.subplots(2, len(coefficients), sharex=True, sharey=True, squeeze=False)
  for column, (title, group) in zip(panels.T, coefficients.items(), strict=True):
    for number, (label, by_sign) in enumerate(group.items()):
      for axes, sign in zip(column, (1, -1), strict=True):
        # Earlier curves are thicker, so that curves that coincide stay visible.
        width = 1.2 + 1.1 * (len(group) - 1 - number)
        axes.plot(_RATIO, by_sign[sign], color=_COLORS[number], linewidth=width, label=label)
    for axes, sign in zip(column, (">", "<"), strict=True):
      axes.axvline(1, color=GREY, linewidth=0.7, linestyle=":")
      axes.set_xlim(0, 3)
      axes.set_ylim(*limits)
      axes.text(0.05, 0.9, f"A {sign} 0", transform=axes.transAxes, fontsize=7, color=GREY)
    column[0].set_title(textwrap.fill(title, 14))
    column[1].set_xlabel("ratio")
    column[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), handlelength=0.8, labelspacing=0.25, fontsize=6)
  figure.supylabel("coefficient C", fontsize=8)


def batch_log_ratios(*, rows: int = 16, tokens: int = 40, spread: float = 0.12, outlier: float = 2.5, seed: int = 0) -> np.ndarray:
  """Makes synthetic log-ratios of a batch, [rows, tokens].

  They consist of heavy-tailed noise and a drift of each response. The first row is calm except for
  one outlier.

  Args:
    rows: Number of responses.
    tokens: Number of tokens per response.
    spread: Spread of the noise, in nats.
    outlier: Ratio of one token of the first row.
    seed: Seed of the noise.
  """
  rng = np.random.default_rng(seed)
  z = spread * rng.standard_t(4, (rows, tokens)) / np.sqrt(2) + rng.normal(0, spread / 6, (rows, 1))
  z[0] = spread / 6 * rng.standard_normal(tokens)
  z[0, tokens // 2] = np.log(outlier)
  return z


def heat_maps(chosen: Mapping[str, Objective], log_ratio: np.ndarray, advantages: np.ndarray) -> Picture:
  """Draws C of every token of a batch, one map per objective. Black is a gradient of 0.

  Args:
    chosen: Objectives by title.
    log_ratio: Log-ratio of the tokens, [rows, tokens].
    advantages: Advantages of the responses, [rows].
  """
  maps = {title: np.abs(coefficients(objective, log_ratio, advantages)) for title, objective in chosen.items()}
  alt = "Coefficient C of every token of a batch under " + ", ".join(chosen) + "; black where it is zero."
  return picture(_heat_maps, maps, advantages, height=2.5, alt=alt)


def _heat_maps(figure: Any, maps: Mapping[str, np.ndarray], advantages: np.ndarray) -> None:
  """Draws one panel per objective."""
  panels = figure.subplots(1, len(maps), sharey=True)
  positive = int(np.sum(advantages > 0))
  for axes, (title, weights), name in zip(panels, maps.items(), "abcdef", strict=False):
    axes.set_facecolor(BLACK)
    shown = np.where(weights < studies.ZERO, np.nan, weights)
    image = axes.imshow(shown, cmap=two_sided(BLUE, "#ffffff", ORANGE), vmin=0.5, vmax=1.5, aspect="auto", interpolation="nearest")
    axes.axhline(positive - 0.5, color=GREY, linewidth=1.5)
    axes.grid(False)
    axes.set_xlabel("token")
    letter(axes, name, f"{title}: {np.mean(weights < studies.ZERO):.0%} zero")
  panels[0].set_yticks([positive / 2 - 0.5, positive + (len(advantages) - positive) / 2 - 0.5], ["A > 0", "A < 0"])
  figure.colorbar(image, ax=panels, label="C", extend="both", pad=0.01)


def zero_mass(chosen: Sequence[str], *, sequences: int = 64) -> Picture:
  """Draws the fraction of tokens without a gradient against the spread of log r.

  Args:
    chosen: Names of objectives.
    sequences: Number of sequences, with 64 tokens each.
  """
  fractions = studies.zero_mass(chosen, sequences)
  return picture(
    _zero_mass, fractions, height=2.4, width=5.2, alt="Tokens without a gradient against the spread of their log-ratios."
  )


def _zero_mass(figure: Any, fractions: Mapping[str, Sequence[float]]) -> None:
  """Draws one curve per objective."""
  axes = figure.subplots()
  for number, (name, values) in enumerate(fractions.items()):
    dash = _DASHES[number // len(_COLORS)]
    axes.plot(studies.SPREADS, [100 * x for x in values], marker="o", color=_COLORS[number % len(_COLORS)], linestyle=dash, label=name)
  axes.set_xscale("log")
  axes.set_xlabel("spread of log r (nats)")
  axes.set_ylabel("tokens with |C| < 1e-6 (%)")
  axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def smooth_limit(*, sequences: int = 600) -> Picture:
  """Draws SAPO's mean gate against the gate of the mean log-ratio, and the bound on the difference.

  Args:
    sequences: Number of synthetic sequences, of 4 to 256 tokens.
  """
  limit = studies.smooth_limit(studies.made_up_sequences(sequences))
  alt = "SAPO's mean gate and the gate of the sequence: their difference stays below the bound at any variance."
  return picture(_smooth_limit, limit, height=2.5, alt=alt)


def _smooth_limit(figure: Any, limit: Mapping[str, np.ndarray]) -> None:
  """Draws the two gates against each other, and their difference against the variance."""
  gates, bound = figure.subplots(1, 2)
  calm = limit["variance"] < 0.02
  for chosen, color, label in ((~calm, ORANGE, "variance above 0.02"), (calm, BLUE, "variance below 0.02")):
    gates.plot(limit["gate_of_mean"][chosen], limit["mean_gate"][chosen], ".", color=color, markersize=3, label=label)
  gates.plot([0, 1], [0, 1], color=BLACK, linewidth=0.8)
  gates.set_xlim(0.75, 1.01)
  gates.set_ylim(0.75, 1.01)
  gates.set_xlabel("gate of the mean log-ratio (a smooth GSPO)")
  gates.set_ylabel("mean of the token gates (SAPO)")
  gates.legend(loc="upper left")
  letter(gates, "a", "two gates for a response")
  line = np.geomspace(1e-6, 10, 50)
  bound.plot(limit["variance"], np.maximum(limit["difference"], 1e-12), ".", color=GREY, markersize=3)
  bound.plot(line, line / 4, color=BLACK, linewidth=1, label=r"$\tau^2\,\mathrm{Var}/4$")
  bound.set(xscale="log", yscale="log", xlim=(1e-6, 10), ylim=(1e-8, 1))
  bound.set_xlabel(r"variance of log r in a response (nats$^2$)")
  bound.set_ylabel("difference D")
  bound.legend(loc="lower right")
  letter(bound, "b", "and their difference")
