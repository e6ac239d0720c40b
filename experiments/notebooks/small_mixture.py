"""Lecture 4: a mixture of experts that trains in seconds, and its routes on one stale batch."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, letter
from experiments.ablations.routing_replay import bed as beds
from experiments.ablations.routing_replay import measures
from experiments.ablations.routing_replay.__main__ import HERE, from_json
from experiments.notebooks.pictures import Picture, Table, from_file, picture
from jaxrl_llm.types import Params, TrainBatch

SIZES = beds.Sizes(num_layers=2, d_model=32, d_ff=16, num_prompts=8, group_size=4, num_minibatches=1, warm_steps=60, warm_rows=32)
"""Two layers of 8 experts, of which a token visits 2."""


class Stale(NamedTuple):
  """A rollout batch drawn by a bfloat16 sampler, before and after updates on it.

  Attributes:
    batch: Batch with live routes.
    sampled: Routes of the sampler.
    before: Passes of the learner at π_old: "live", "own" (its own routes replayed) and "R3" (the
      sampler's routes replayed).
    after: Passes of the learner after the updates: "none" (live), "R2" (its routes at π_old
      replayed) and "R3".
    updates: Number of updates so far.
  """

  batch: TrainBatch
  sampled: np.ndarray
  before: Mapping[str, beds.Scored]
  after: Mapping[str, beds.Scored]
  updates: int


def warm_mixture() -> tuple[beds.Bed, Params]:
  """Makes the bed, and weights after a short imitation of a teacher of arithmetic."""
  bed = beds.make_bed(SIZES)
  return bed, beds.warm_params(bed, seed=0)


def go_stale(bed: beds.Bed, params: Params, *, updates: int, learning_rate: float) -> Stale:
  """Draws a rollout batch in bfloat16 and scores it in float32 before and after updates on it.

  Args:
    bed: Bed with the model.
    params: Weights that draw the batch and start the updates.
    updates: Number of GRPO updates, each on the whole batch and without replay.
    learning_rate: Learning rate of Adam.
  """
  rollout = beds.draw(bed, params, next(beds.problem_batches(bed, 0)), jax.random.key(0), dtype="bfloat16")
  live = bed.score(params, rollout.batch)
  own = rollout.batch._replace(routing=np.asarray(live.visited, np.int16))
  sampled = rollout.batch._replace(routing=rollout.sampled)
  before = {"live": live, "own": bed.score(params, own), "R3": bed.score(params, sampled)}
  state, trained = bed.new_state(params), rollout.batch._replace(old_logprobs=np.asarray(live.logprobs))
  for _ in range(updates):
    state, _ = bed.step(state, trained, learning_rate)
  views = {"none": rollout.batch, "R2": own, "R3": sampled}
  after = {name: bed.score(state.params, view) for name, view in views.items()}
  return Stale(rollout.batch, rollout.sampled, before, after, updates)


def route_map(stale: Stale, row: int = 0) -> Picture:
  """Draws the experts of each token of a response, before and after the updates.

  Args:
    stale: Batch before and after the updates.
    row: Row of the response.
  """
  length = int(np.sum(stale.batch.segments[row] > 0))
  text = "".join(beds.ALPHABET[i] if i < len(beds.ALPHABET) else "$" for i in stale.batch.tokens[row, :length]).replace("\n", "⏎")
  before, after = (np.asarray(scored.visited)[row, :length] for scored in (stale.before["live"], stale.after["none"]))
  alt = f"Experts that the tokens of {text} visit in each layer, before and after {stale.updates} updates."
  return picture(_route_map, before, after, text, height=2.5, alt=alt)


def _route_map(figure: Any, before: np.ndarray, after: np.ndarray, text: str) -> None:
  """Draws one panel per layer, with the tokens on the x axis and the experts on the y axis."""
  panels = figure.subplots(1, before.shape[1], sharey=True)
  for layer, (axes, name) in enumerate(zip(panels, "abcd", strict=False)):
    for token in range(len(text)):
      old, new = set(before[token, layer].tolist()), set(after[token, layer].tolist())
      for experts, color, marker in ((old & new, BLUE, "s"), (old - new, ORANGE, "v"), (new - old, GREEN, "^")):
        axes.plot([token] * len(experts), list(experts), marker, color=color, markersize=5)
    axes.set_xticks(range(len(text)), list(text), family="monospace")
    axes.set_yticks(range(SIZES.num_experts))
    axes.set_xlabel("token")
    letter(axes, name, f"layer {layer + 1}")
  panels[0].set_ylabel("expert")
  kinds = ((BLUE, "s", "before and after"), (ORANGE, "v", "only before"), (GREEN, "^", "only after"))
  handles = [panels[0].plot([], [], marker, color=color, markersize=5)[0] for color, marker, _ in kinds]
  figure.legend(handles, [label for _, _, label in kinds], loc="outside lower center", ncols=3)


def sampler_table(stale: Stale) -> Table:
  """Tabulates the bfloat16 sampler against the float32 learner at the same weights.

  The learner routes live or replays routes.
  """
  rows = []
  for label, name in (("live", "live"), ("its own routes replayed", "own"), ("the sampler's routes replayed (R3)", "R3")):
    scored = stale.before[name]
    differ = np.mean(measures.change_by_layer(scored.visited, stale.sampled, stale.batch.segments))
    tokens = measures.tokens_changed(scored.visited, stale.sampled, stale.batch.segments)
    kl = measures.mismatch(scored.logprobs, stale.batch.old_logprobs, stale.batch.mask)["k3"]
    rows.append([label, f"{differ:.2%}", f"{tokens:.1%}", f"{kl:.1e}"])
  header = [
    "the learner's pass", "experts that differ from the sampler's", "tokens routed differently in some layer",
    "k3-KL (nats per token)",
  ]  # fmt: skip
  return Table(header, rows)


def ratio_table(stale: Stale) -> Table:
  """Tabulates the importance ratios after the updates for each way to route both passes."""
  old = {"none": stale.before["live"], "R2": stale.before["own"], "R3": stale.before["R3"]}
  rows = []
  for name, label in (("none", "none: live routes"), ("R2", "R2: the learner's routes at π_old"), ("R3", "R3: the sampler's routes")):
    now, then = stale.after[name], old[name]
    changed = np.mean(measures.change_by_layer(then.visited, now.visited, stale.batch.segments))
    spread = measures.ratio_spread(np.asarray(now.logprobs) - np.asarray(then.logprobs), stale.batch.mask)
    rows.append([label, f"{changed:.1%}", f"{spread['std_log_r']:.3f}", f"{spread['max_r']:.2f}"])
  return Table(["replay", "experts changed since π_old", "spread of log r (nats)", "largest r"], rows)


def replay_is_exact(stale: Stale) -> bool:
  """Tells whether replaying the learner's own routes gives the same bits as routing live."""
  return bool(np.array_equal(stale.before["own"].logprobs, stale.before["live"].logprobs))


def gate_drift(stale: Stale) -> Picture:
  """Draws the change of log π of tokens with changed and with unchanged experts.

  Both groups appear with live and with replayed routes.
  """
  moved = ~np.all(np.sort(stale.before["live"].visited, -1) == np.sort(stale.after["none"].visited, -1), axis=(-2, -1))
  counted = np.asarray(stale.batch.mask) > 0
  # The state of the previous token scores a token, so the routes of the previous token decide.
  moved = np.pad(moved[:, :-1], ((0, 0), (1, 0)))
  changes = {
    view: np.abs(np.asarray(stale.after[view].logprobs) - np.asarray(stale.before[old].logprobs))
    for view, old in (("none", "live"), ("R2", "own"))
  }
  gates = {view: (change[counted & moved], change[counted & ~moved]) for view, change in changes.items()}
  alt = (
    "Change of the log-probability of tokens whose previous token changed or kept its experts, with and without replay."
  )
  return picture(_gate_drift, gates, height=2.3, width=5.0, alt=alt)


def _gate_drift(figure: Any, gates: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
  """Draws each group of changes as points around its median."""
  axes = figure.subplots()
  places = {("none", 0): 0, ("R2", 0): 1, ("none", 1): 2.5, ("R2", 1): 3.5}
  rng = np.random.default_rng(0)
  for (view, kind), place in places.items():
    values = np.maximum(gates[view][kind], 1e-6)
    color = ORANGE if view == "none" else BLUE
    axes.plot(place + rng.uniform(-0.2, 0.2, len(values)), values, ".", color=color, markersize=2.5, alpha=0.5)
    axes.plot([place - 0.3, place + 0.3], [np.median(values)] * 2, color=GREY if not len(values) else "#1a1a1a", linewidth=1.5)
  axes.set_yscale("log")
  axes.set_xticks(list(places.values()), ["live", "R2", "live", "R2"])
  axes.set_xlabel("experts changed                                       experts unchanged")
  axes.set_ylabel("|change of log π| (nats)")


def measured(name: str) -> Picture:
  """Reads a checked-in figure of the full ablation.

  Args:
    name: Name of the figure: "expert_drift", "sampler_mismatch" or "training".
  """
  return from_file(HERE / "figures" / f"{name}.png", f"Figure {name} of the routing-replay ablation.")


def verdicts(names: Sequence[str]) -> Table:
  """Tabulates the rules of the ablation, written before its run, and their verdicts."""
  results = from_json((HERE / "results.json").read_text("utf-8"))["verdicts"]
  return Table(["claim", "rule", "verdict"], [[name, results[name]["rule"], results[name]["verdict"]] for name in names])
