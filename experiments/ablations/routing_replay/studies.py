"""Measured runs: the drift of experts over updates (E5), and training with replayed routes (E7)."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations.routing_replay import bed as beds
from experiments.ablations.routing_replay import measures
from jaxrl_llm.models import routing
from jaxrl_llm.types import Params, TrainBatch


class Arm(NamedTuple):
  """Arm of the training study.

  Attributes:
    updates: Number of updates per rollout batch (N).
    replay: Routes to replay: "none"; "R2", the learner's own at π_old; "R3", the sampler's.
    sampler: Dtype of the sampler. The learner's dtype is float32.
    rate: Learning rate of Adam after warm-up.
  """

  updates: int
  replay: str
  sampler: str
  rate: float


def drift(bed: beds.Bed, params: Params, seed: int, *, learning_rate: float, updates: int) -> list[dict]:
  """Measures the drift of the routes (E5).

  It makes updates of GRPO from a fresh optimizer. After each update it records the routes of tokens
  that no update trains on.

  Args:
    bed: Bed with the model.
    params: Weights to start from.
    seed: Seed of problems and samples.
    learning_rate: Learning rate of Adam.
    updates: Number of updates.

  Returns:
    One row per update: `change`, the fraction of activated experts that the update changed, mean
    over tokens and layers; `layers`, this fraction for each layer; `since_start`, the fraction of
    activated experts that differ from those before the first update; `reward`, the mean reward of
    the rollout batch; and the settings of the row.
  """
  key, count = jax.random.key(seed), bed.sizes.num_minibatches
  problems = beds.problem_batches(bed, seed)
  probe = beds.piece(beds.draw(bed, params, next(problems), jax.random.fold_in(key, 0)).batch, 0, count)
  routes = lambda params: np.asarray(bed.score(params, probe).visited)
  start = before = routes(params)
  state, rows = bed.new_state(params), []
  for update in range(updates):
    if update % count == 0:
      rollout = beds.draw(bed, state.params, next(problems), jax.random.fold_in(key, 1 + update))
    state, _ = bed.step(state, beds.piece(rollout.batch, update % count, count), learning_rate)
    after = routes(state.params)
    layers = measures.change_by_layer(before, after, probe.segments)
    since_start = float(np.mean(measures.change_by_layer(start, after, probe.segments)))
    row = {"change": float(np.mean(layers)), "layers": layers, "since_start": since_start, "reward": float(rollout.rewards.mean())}
    rows.append({"seed": seed, "depth": bed.sizes.num_layers, "learning_rate": learning_rate, "update": update + 1} | row)
    before = after
  return rows


def train(
  bed: beds.Bed, params: Params, seed: int, arm: Arm, *, warmup: int, rollouts: int, every: int, held_out: int
) -> Iterator[tuple[str, dict]]:
  """Trains one arm (E7).

  Args:
    bed: Bed with the model.
    params: Weights after the warm start.
    seed: Seed of problems and samples. All arms of a seed share them.
    arm: Arm to train.
    warmup: Number of updates over which the learning rate rises to `arm.rate`.
    rollouts: Number of rollout batches.
    every: Number of rollout batches between measurements of the ratios.
    held_out: Number of batches of test problems.

  Yields:
    Pairs of a table and a row: ("rollouts", row of a rollout batch); ("spreads", row of a measured
    update and view); ("ends", row with the accuracy on test problems at the start and at the end).
  """
  key, problems = jax.random.key(seed), beds.problem_batches(bed, seed)
  state, done, accuracy = bed.new_state(params), 0, beds.held_out(bed, params, batches=held_out)
  for index in range(rollouts):
    at = {"seed": seed} | arm._asdict() | {"rollout": index + 1}
    rollout = beds.draw(bed, state.params, next(problems), jax.random.fold_in(key, index), dtype=arm.sampler)
    live, sampled = rollout.batch, rollout.sampled
    old_live = bed.score(state.params, live)
    replayed = live._replace(routing=sampled if arm.replay == "R3" else np.asarray(old_live.visited, np.int16))
    # R2 needs no second pass, which would repeat the first one bit for bit (see `checks`).
    old_replayed = bed.score(state.params, replayed) if arm.replay == "R3" else old_live
    old, batch = (old_live, live) if arm.replay == "none" else (old_replayed, replayed)
    batch = batch._replace(old_logprobs=np.asarray(old.logprobs))
    row = {"reward": float(rollout.rewards.mean()), "tokens": float(live.mask.sum(axis=1).mean())}
    row |= {"entropy": float(np.sum(old.entropy * live.mask) / live.mask.sum())}
    row |= measures.mismatch(old.logprobs, live.old_logprobs, live.mask)
    row |= {"k3_live": measures.mismatch(old_live.logprobs, live.old_logprobs, live.mask)["k3"]}
    row |= {"sampler_change": float(np.mean(measures.change_by_layer(old_live.visited, sampled, live.segments)))}
    row |= {"sampler_tokens": measures.tokens_changed(old_live.visited, sampled, live.segments)}
    row |= {"overlap": measures.smallest_overlap(old.visited, sampled, live.segments)}

    measured, before = index % every == 0, np.asarray(old_live.visited)
    for update in range(arm.updates):
      done += 1
      state, metrics = bed.step(state, beds.piece(batch, update, arm.updates), arm.rate * min(1.0, done / warmup))
      if update == 0:
        row |= {"first_ratio": max(abs(float(metrics[f"gate/{name}"]) - 1) for name in ("min", "max"))}
        row |= {"grad_norm": float(metrics["actor/grad_norm"])}
      if measured:
        now = bed.score(state.params, live)
        views = {"live": np.asarray(now.logprobs - old_live.logprobs)}
        views["replay"] = np.asarray(bed.score(state.params, replayed).logprobs - old_replayed.logprobs)
        after = np.asarray(now.visited)
        change = float(np.mean(measures.change_by_layer(before, after, live.segments)))
        unseen = unseen_rows(live, update + 1, arm.updates)
        for view, log_ratio in views.items():
          spread = measures.ratio_spread(log_ratio[unseen], live.mask[unseen])
          yield "spreads", at | {"update": update + 1, "view": view} | spread | {"change": change}
        before = after
    yield "rollouts", at | row
  yield "ends", {"seed": seed} | arm._asdict() | {"start": accuracy, "end": beds.held_out(bed, state.params, batches=held_out)}


def unseen_rows(batch: TrainBatch, update: int, count: int) -> slice:
  """Returns the rows that no update has trained on yet, or all rows after the last update."""
  return slice(len(batch.tokens) // count * update if update < count else 0, None)


def checks(bed: beds.Bed, params: Params, seed: int) -> dict:
  """Measures the identities T38 and T39 on one rollout batch of a bfloat16 sampler.

  Returns:
    `seed`; `own_routes`, whether replaying the learner's own routes gives the same bits in the same
    program; `own_routes_gap`, the largest |r − 1| between a program without routes as input and one
    that replays them; `r2_same_program`, the largest |r − 1| of R2's first mini-batch, scored in
    the program of π_old; `r2_other_rows`, the largest |r − 1| of that mini-batch in a program
    compiled for fewer rows; `r3_overlap`, the smallest overlap of the learner's routes with the
    sampler's under R3; `live_overlap`, the smallest overlap without replay; `recorded`, the
    fraction of tokens recorded by the sampler, among those whose routes affect a later token.
  """
  problems = next(beds.problem_batches(bed, seed))
  rollout = beds.draw(bed, params, problems, jax.random.key(seed), dtype="bfloat16")
  batch, count = rollout.batch, bed.sizes.num_minibatches
  live, bare = bed.score(params, batch), bed.score(params, batch._replace(routing=None))
  own = batch._replace(routing=np.asarray(live.visited, np.int16))
  again, fewer = bed.score(params, own), bed.score(params, beds.piece(own, 0, count))
  r3 = bed.score(params, batch._replace(routing=rollout.sampled))
  # R2's first mini-batch is the first piece of the batch, so its old log-probabilities are the
  # first rows of `live`.
  gap = lambda a, b: float(np.max(np.abs(np.expm1(np.asarray(a, np.float64) - np.asarray(b, np.float64)))))
  first, travelled = len(fewer.logprobs), float(np.sum(routing.travelled(jnp.asarray(batch.segments))))
  return {
    "seed": seed,
    "own_routes": all(bool(np.array_equal(a, b)) for a, b in zip(live, again, strict=True)),
    "own_routes_gap": gap(again.logprobs, bare.logprobs),
    "r2_same_program": gap(again.logprobs[:first], live.logprobs[:first]),
    "r2_other_rows": gap(fewer.logprobs, live.logprobs[:first]),
    "r3_overlap": measures.smallest_overlap(r3.visited, rollout.sampled, batch.segments),
    "live_overlap": measures.smallest_overlap(live.visited, rollout.sampled, batch.segments),
    "recorded": float(len(measures.overlaps(rollout.sampled, rollout.sampled, batch.segments)) / travelled),
  }
