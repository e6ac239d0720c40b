"""Lecture 8: importance ratios of stale responses, and the noise of the gradients made of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.ablations.plots import BLUE, GREY, ORANGE, SKY, letter
from experiments.claims.claim import CLAIMS, folder_of
from experiments.gradients.measure import WHOLE, measure, rows_of
from experiments.judging import described
from experiments.notebooks.pictures import Picture, Table, from_file, picture
from experiments.notebooks.sources import ROOT
from experiments.results import from_json
from experiments.studies.long_noise import bed, rules
from experiments.studies.noise.bed import programs
from jaxrl_llm import objectives
from jaxrl_llm.types import Params, TrainBatch

TOKENS = 64
SIZES = rules.sizes(TOKENS)
"""Fibonacci numbers modulo 10, 64 tokens a response."""

UPDATES = (1, 3, 7, 15)
"""Numbers of updates at which ratios are read."""

PREFIXES = (1, 2, 4, 8, 16, 32, 64)
NOISE, LONG_NOISE = (ROOT / "experiments" / "studies" / name for name in ("noise", "long_noise"))


class Stale(NamedTuple):
  """Responses of a policy, read by later policies.

  Attributes:
    batch: Responses, with advantages and old log-probabilities.
    params: Weights after each number of updates, 0 for those that drew.
    log_ratios: Log-ratios log π_θ − log π_old of the tokens of each response, by number of updates.
    advantages: Advantage of each response.
  """

  batch: TrainBatch
  params: Mapping[int, Params]
  log_ratios: Mapping[int, np.ndarray]
  advantages: np.ndarray


def go_stale(seed: int = 0, prompts: int = 32) -> Stale:
  """Imitates a teacher, draws responses, and updates the policy on others of the same batch.

  Args:
    seed: Seed of the weights, the problems and the draws.
    prompts: Number of prompts whose responses are read; each has eight.
  """
  params = bed.policies(SIZES, seed, UPDATES)
  batch = bed.responses(SIZES, params[0], seed, prompts)
  score = programs(SIZES).bed.score
  of_tokens = lambda k: np.asarray(score(params[k], batch).logprobs - batch.old_logprobs, np.float64)[:, -TOKENS:]
  return Stale(batch, params, {k: of_tokens(k) for k in UPDATES}, np.asarray(batch.advantages)[:, -1])


def spreads(log_ratios: np.ndarray, length: int) -> dict[str, float]:
  """Returns the standard deviations of three log-ratios of the first tokens of responses."""
  first = log_ratios[:, :length]
  return {"token": float(np.std(first)), "sequence": float(np.std(first.mean(axis=1))), "product": float(np.std(first.sum(axis=1)))}


def exponents(stale: Stale) -> Table:
  """Tabulates the exponents of the spreads in the length, by least squares, from 4 tokens on."""
  lengths, rows = PREFIXES[2:], []
  for k, log_ratios in stale.log_ratios.items():
    of = [spreads(log_ratios, length) for length in lengths]
    slope = lambda name, of=of: np.polyfit(np.log(lengths), np.log([row[name] for row in of]), 1)[0]
    rows.append([str(k), *(f"{slope(name):+.2f}" for name in ("token", "sequence", "product"))])
  return Table(["updates", "token ratio", "sequence ratio (mean)", "product of all"], [*rows, ["independent tokens", "0", "-1/2", "+1/2"]])


def law(stale: Stale) -> Picture:
  """Draws the spreads of three ratios against the length of the prefix."""
  alt = "Standard deviation of the log of the token, sequence and product ratios against the length, after 1, 3, 7 and 15 updates."
  return picture(_law, stale.log_ratios, height=2.4, alt=alt)


def _law(figure: Any, log_ratios: Mapping[int, np.ndarray]) -> None:
  """Draws one panel per ratio, with one line per number of updates and the law as a dashed one."""
  panels = figure.subplots(1, 3)
  kinds = (("token", "token r", 0.0), ("sequence", "sequence r, mean", -0.5), ("product", "product of all r", 0.5))
  for axes, name, (kind, title, power) in zip(panels, "abc", kinds, strict=True):
    for (k, gaps), color in zip(log_ratios.items(), (SKY, BLUE, ORANGE, GREY), strict=True):
      values = [spreads(gaps, length)[kind] for length in PREFIXES]
      axes.plot(PREFIXES, values, marker="o", markersize=3, color=color, label=f"{k} update{'s' * (k > 1)}")
    # From the last line's first point.
    axes.plot(PREFIXES, values[0] * np.power(PREFIXES, power), color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(PREFIXES, PREFIXES)
    axes.set_xlabel("tokens")
    letter(axes, name, title)
  panels[0].set_ylabel("std(log r), nats")
  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def left_out(stale: Stale, updates: int, clips: Mapping[str, Sequence[float]]) -> Table:
  """Tabulates the share of the tokens that a clip leaves out, by length of the prefix.

  Args:
    stale: Responses.
    updates: Number of updates.
    clips: Lower and upper half-width of each clip, by label. A label that begins with "GSPO" clips
      the ratio of the sequence, another one that of each token.
  """
  header, rows = ["clip", *(f"{length} tokens" for length in PREFIXES[2:])], []
  for label, (low, high) in clips.items():
    shares = []
    for length in PREFIXES[2:]:
      first = stale.log_ratios[updates][:, :length]
      ratios = np.exp(np.broadcast_to(first.mean(axis=1, keepdims=True), first.shape) if label.startswith("GSPO") else first)
      signs = np.broadcast_to(np.sign(stale.advantages)[:, None], first.shape)
      outside = np.where(signs > 0, ratios > 1 + high, ratios < 1 - low)[signs != 0]
      shares.append(f"{np.mean(outside):.1%}")
    rows.append([label, *shares])
  return Table(header, rows)


def gradient_noise(stale: Stale, updates: int, losses: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Table:
  """Tabulates the noise of stale gradients relative to that without a ratio.

  Args:
    stale: Responses.
    updates: Number of updates.
    losses: Name and settings of an objective, by label.
  """
  made = {label: objectives.make(name, **settings) for label, (name, settings) in losses.items()}
  own, params = programs(SIZES), stale.params[updates]
  rows = rows_of(measure([stale.batch], params, made, outputs_fn=own.bed.score, moments_fn=own.moments))
  header = ["gradient", "variance, relative to no ratio", "tokens left out", "responses that count"]
  return Table(header, [
    [row["objective"], f"{row['inflation']:.3g}", f"{row['clipped']:.1%}", f"{row['effective']:.0%}"]
    for row in rows if row["part"] == WHOLE
  ])  # fmt: skip


def study_figure() -> Picture:
  """Reads the figure of the study of noise, with twelve seeds at four lengths."""
  alt = "Variance of the gradient against length, by objective: it rises for the product of ratios and is flat for the others."
  return from_file(NOISE / "figures" / "noise_by_length.png", alt)


def long_figure() -> Picture:
  """Reads the figure of the study of noise on long responses."""
  alt = "Variance of the gradient, and spread of three ratios, against 16, 64 and 256 tokens."
  return from_file(LONG_NOISE / "figures" / "long_noise.png", alt)


def long_verdicts() -> Table:
  """Tabulates the stored verdicts of the study of noise on long responses."""
  return _table(from_json((LONG_NOISE / "results.json").read_text("utf-8"))["verdicts"])


def verdicts(name: str, names: Sequence[str]) -> Table:
  """Tabulates stored verdicts of a claim.

  Args:
    name: Name of the claim, such as "E6".
    names: Names of its rules without the claim's name.
  """
  stored = from_json((folder_of(CLAIMS[name]) / "results.json").read_text("utf-8"))["verdicts"]
  return _table({rule: stored[f"{name}, {rule}"] for rule in names})


def study_verdicts(names: Sequence[str]) -> Table:
  """Tabulates stored verdicts of the study of noise by their names."""
  stored = from_json((NOISE / "results.json").read_text("utf-8"))["verdicts"]
  return _table({rule: stored[rule] for rule in names})


def _table(rows: Mapping[str, Mapping]) -> Table:
  return Table(["rule", "verdict", "measured"], [[rule, row["verdict"], described(row)] for rule, row in rows.items()])
