"""Lecture 6: what divergences prefer, how noisy sampled ones are, and runs with a teacher."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, PINK, letter
from experiments.notebooks.keep_log import LOGS
from experiments.notebooks.pictures import Picture, Table, picture
from experiments.notebooks.run_pictures import Run, checked_in
from jaxrl_llm import objectives

POSITIONS = np.linspace(-4.0, 4.0, 81)
"""A vocabulary whose ids lie on a line, so that a distribution can be drawn."""

TEACHER = np.log(0.65 * np.exp(-((POSITIONS - 1.5) ** 2) / 0.18) + 0.35 * np.exp(-((POSITIONS + 1.8) ** 2) / 0.18) + 1e-6)
"""Logits of a teacher that knows two answers."""

_ONE = np.ones((1, 1))


def student_logits(settings: Sequence[float]) -> jax.Array:
  """Returns the logits of a student that has one hump, with a centre and a log width."""
  centre, log_width = settings
  return -((POSITIONS - centre) ** 2) / (2 * jnp.exp(2 * log_width))


def fit(beta: float, *, steps: int = 800, rate: float = 0.02) -> np.ndarray:
  """Minimises the divergence from the teacher, and returns the best student's probabilities.

  The descent starts from a hump between the teacher's, and from one on each of them.
  """

  def loss(settings: jax.Array) -> jax.Array:
    return objectives.divergence(student_logits(settings)[None, None], TEACHER[None, None], _ONE, beta=beta)

  @jax.jit
  def descend(settings: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, steps, lambda _, now: now - rate * jnp.clip(jax.grad(loss)(now), -1, 1), settings)

  fitted = [descend(jnp.array(start)) for start in ((0.3, 0.0), (1.4, -1.0), (-1.7, -1.0))]
  return np.asarray(jax.nn.softmax(student_logits(min(fitted, key=loss))))


def preferences(betas: Sequence[float]) -> Picture:
  """Draws the teacher, and the student that each divergence ends with."""
  alt = f"Teacher with two humps, and one-humped students fitted with beta {', '.join(map(str, betas))}."
  return picture(_preferences, betas, height=2.4, alt=alt)


def _preferences(figure: Any, betas: Sequence[float]) -> None:
  axes = figure.subplots()
  axes.fill_between(POSITIONS, np.asarray(jax.nn.softmax(TEACHER)), color=GREY, alpha=0.35, label="teacher")
  for beta, color, line in zip(betas, (BLUE, GREEN, ORANGE, PINK), ("-", "-", "--", ":"), strict=False):
    axes.plot(POSITIONS, fit(beta), color=color, linestyle=line, label=f"student, β = {beta:g}")
  axes.set_xlabel("token")
  axes.set_ylabel("probability")
  axes.legend(loc="upper left")


def noise(sample_counts: Sequence[int], *, vocab_size: int = 264, repeats: int = 400, seed: int = 0) -> Table:
  """Tabulates how far a sampled gradient of the reverse KL is from the exact one.

  Args:
    sample_counts: Numbers of sampled tokens per estimate.
    vocab_size: Number of ids.
    repeats: Number of estimates.
    seed: Seed of both policies and of the samples.
  """
  rng = np.random.default_rng(seed)
  student = jnp.asarray(2 * rng.standard_normal(vocab_size))
  teacher = student + 0.5 * jnp.asarray(rng.standard_normal(vocab_size))
  exact = jax.grad(lambda logits: objectives.divergence(logits[None, None], teacher[None, None], _ONE, beta=1.0))(student)
  log_ratio = jax.nn.log_softmax(teacher) - jax.nn.log_softmax(student)
  rows = []
  for count in sample_counts:
    ids = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), count), student, shape=(repeats, count))
    # The policy gradient of -log π with the advantage log π_T - log π of each token.
    of_tokens = -log_ratio[ids][..., None] * (jax.nn.one_hot(ids, vocab_size) - jax.nn.softmax(student))
    error = jnp.linalg.norm(of_tokens.mean(axis=1) - exact, axis=1) / jnp.linalg.norm(exact)
    rows.append([f"{count:,}", f"{float(error.mean()):.2f}"])
  return Table(["sampled tokens", "mean error, relative to the exact gradient"], rows)


def runs(names: Mapping[str, str]) -> dict[str, tuple[Run, dict[str, Any]]]:
  """Reads checked-in logs and their configs, by label."""
  return {label: (checked_in(name), json.loads((LOGS / name / "config.json").read_text("utf-8"))) for label, name in names.items()}


def generated(run: Run, config: Mapping[str, Any]) -> dict[int, float]:
  """Returns the number of tokens that a run's policy has generated, by its step."""
  count, total, after = config["rollout"]["num_prompts"] * config["rollout"]["group_size"], 0.0, {0: 0.0}
  for row in run.rows:
    if row["phase"] == "rl":
      total += count * row["response_length/mean"]
      after[row["step"]] = total
  return after


def curves(runs: Mapping[str, tuple[Run, Mapping[str, Any]]]) -> Picture:
  """Draws accuracy and the divergence from the teacher against the number of generated tokens."""
  return picture(_curves, runs, height=2.6, alt=f"Accuracy, KL to the teacher and entropy of {', '.join(runs)} by generated tokens.")


def _curves(figure: Any, runs: Mapping[str, tuple[Run, Mapping[str, Any]]]) -> None:
  accuracy, divergence, entropy = figure.subplots(1, 3)
  panels = (
    (accuracy, "a", "held-out accuracy", "eval", "eval/accuracy"),
    (divergence, "b", "KL to the teacher (nats)", "rl", "teacher/kl"),
    (entropy, "c", "entropy (nats)", "rl", "actor/entropy"),
  )
  for axes, label, title, phase, metric in panels:
    for (name, (run, config)), color in zip(runs.items(), (GREY, BLUE, ORANGE, GREEN), strict=False):
      after = generated(run, config)
      rows = [row for row in run.rows if row["phase"] == phase and isinstance(row.get(metric), float) and row["step"] in after]
      axes.plot([after[row["step"]] / 1e3 for row in rows], [row[metric] for row in rows], color=color, label=name, marker=".")
    axes.set_xlabel("generated tokens (thousands)")
    axes.set_xlim(0, 175)
    letter(axes, label, title)
  divergence.set_yscale("log")
  handles, labels = accuracy.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def reached(runs: Mapping[str, tuple[Run, Mapping[str, Any]]], budget: int) -> Table:
  """Tabulates the last accuracy that each run has within a number of generated tokens."""
  rows = []
  for name, (run, config) in runs.items():
    after = generated(run, config)
    inside = [row for row in run.rows if row["phase"] == "eval" and after.get(row["step"], np.inf) <= budget]
    last = max(inside, key=lambda row: row["step"])
    rows.append([name, f"{last['eval/accuracy']:.1%}", f"{after[last['step']]:,.0f}"])
  return Table(["learns from", "held-out accuracy", "generated tokens"], rows)
