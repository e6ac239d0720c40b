"""The learner's part of a run: rows, log-probabilities, advantages, updates."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm import models
from jaxrl_llm.advantages.estimators import Credit
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.mesh import num_row_shards, own_row_shards, place_tokens
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.needs import needed_by_critic, needed_by_logprobs, needed_by_step
from jaxrl_llm.learner.programs import step_options, teaches_itself
from jaxrl_llm.objectives.penalties import adapted_coef, adapted_entropy_coef, kl_estimate
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import trajectories, versions
from jaxrl_llm.rollouts.batch import written_mask
from jaxrl_llm.rollouts.jobs import Examples
from jaxrl_llm.run.setup.saved_state import CRITIC, copy
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps.beliefs import remembered, with_beliefs
from jaxrl_llm.run.steps.grading import with_signal
from jaxrl_llm.run.steps.rows import arrange, live_routes, row_options
from jaxrl_llm.run.steps.teach import add_teacher_advantages, teacher_params, with_teachers_prompts
from jaxrl_llm.segments import token_weights
from jaxrl_llm.types import Metrics, Objective, TaughtRows, TrainBatch
from jaxrl_llm.workdir import summary

MEASURED = frozenset({"old_entropy", "old_score_norm"})
"""Fields of a batch that the learner's pass before the updates measures, beside log π_old."""

ENTROPY_STEP = 0.005
"""Change of an adaptive entropy coefficient per RL step, if the config names none."""


class Prepared(NamedTuple):
  """A graded rollout batch as the updates of an RL step read it.

  Attributes:
    batch: The rollout batch with its advantages.
    taken: True for the sequences of the batch that updates are made of.
    minibatches: Those sequences, for each update.
    layouts: Their places.
    placed: Rows of each update on the devices.
    of_updates: Metrics of each update's rows.
    metrics: Metrics of the batch.
    role_baselines: Baselines of the roles after the batch; None if the estimator has none.
    beliefs: What the run remembers of each prompt after the batch; None if the estimator has no
      beliefs.
  """

  batch: batch_lib.Batch
  taken: Bool[np.ndarray, " N"]
  minibatches: list[list[packing.Trajectory]]
  layouts: list[packing.Layout]
  placed: list[TrainBatch]
  of_updates: list[dict[str, Any]]
  metrics: dict[str, Any]
  role_baselines: list[float] | None
  beliefs: dict[str, dict[str, Any]] | None


class Learned(NamedTuple):
  """Results of an RL step's updates.

  Attributes:
    batch: The rollout batch with its advantages.
    taken: True for the sequences of the batch that updates were made of.
    layouts: Places of those sequences, for each update.
    placed: Rows of each update on the devices.
    updates: Metrics of each update.
    metrics: Metrics of the batch and of all updates.
    num_tokens: Number of tokens of those sequences, prompts included.
  """

  batch: batch_lib.Batch
  taken: Bool[np.ndarray, " N"]
  layouts: list[packing.Layout]
  placed: list[TrainBatch]
  updates: list[dict[str, float]]
  metrics: dict[str, Any]
  num_tokens: int


def end_imitation(run: Run) -> None:
  """Prepares a run for RL.

  Makes a fresh optimizer, freezes the reference and initialises the critic, by default with the
  policy's trunk.
  """
  run.state = run.experiment.learner.restart(run.state.params)
  if run.reference is not None:
    run.reference = copy(run.state.params)
  if run.critic is not None:
    run.critic = run.experiment.learner.critic.init(jax.random.fold_in(run.key, CRITIC), run.state.params)


def learn_from(run: Run, batch: batch_lib.Batch, step: int, *, between: Callable[[], None] = lambda: None) -> Learned:
  """Updates the policy, and any critic, on a graded rollout batch.

  Args:
    run: RL run.
    batch: Graded batch.
    step: RL step, from 0.
    between: Function called before each phase but the first. If it raises, nothing has changed.
  """
  prepared, phases = prepare(run, batch, step, between=between), run.phases
  between()

  phases.begin("update")
  if prepared.role_baselines is not None:
    run.record.role_baselines = prepared.role_baselines
  if prepared.beliefs is not None:
    run.record.beliefs = prepared.beliefs
  placed = [x._replace(advantages=phases.poison("update", x.advantages)) for x in prepared.placed]
  updates = [update(run, minibatch, step) for minibatch in placed[:-1]]
  noise = gradient_noise(run, placed[-1], step)  # Of the stalest update.
  updates.append(update(run, placed[-1], step))
  # One wait for all updates of the step. The exact numbers of an update's comparison replace the
  # teacher's estimates.
  updates = [summary.to_floats(known | metrics) for known, metrics in zip(prepared.of_updates, updates, strict=True)]

  phases.begin("other")
  metrics, num_tokens = summary.combine(updates) | prepared.metrics | noise, sum(len(x.tokens) for own in prepared.minibatches for x in own)
  learned = Learned(prepared.batch, prepared.taken, prepared.layouts, placed, updates, metrics, num_tokens)
  if run.witness is not None:
    run.witness(learned, step)
  return learned


def prepare(run: Run, batch: batch_lib.Batch, step: int, *, between: Callable[[], None] = lambda: None) -> Prepared:
  """Packs a graded rollout batch and adds log-probabilities and advantages; changes no weights.

  Args:
    run: RL run.
    batch: Graded batch.
    step: RL step, from 0.
    between: Function called before the second phase.
  """
  mesh, phases, num_updates = run.experiment.mesh, run.phases, run.config.learner.updates_per_rollout
  phases.begin("old_logprobs")
  credit = compute_credit(run, batch, {}) if run.config.learner.skip_zero_advantages else None
  taken = trained_sequences(credit, len(batch.counted), num_updates)
  gallery = run.experiment.drawing.gallery
  pictures = None
  if gallery is not None:
    of_prompts = gallery.pictures(batch.examples[:: batch.group_size], run.state.params)
    pictures = [own for own in of_prompts for _ in range(batch.group_size)]
  group_size = batch.group_size if "groups" in run.experiment.needs else None
  lags = versions.lags(batch.rollouts, step) if "lag" in run.experiment.needs else None
  options = dict(pictures=pictures, group_size=group_size, replies=run.config.learner.echo_coef > 0, lags=lags)
  drawn = trajectories.trajectories(batch.rollouts, batch.counted, **options)
  sequences = packing.split(drawn, num_updates)
  minibatches = [only(x, kept) for x, kept in zip(sequences, np.split(taken, num_updates), strict=True)]
  examples = packing.split(batch.examples, num_updates)
  layouts, taught = arrange_all(run, minibatches, examples)
  packed = [packing.pack(x, layout, gallery and gallery.rows) for x, layout in zip(minibatches, layouts, strict=True)]
  packed = [x._replace(taught=rows) for x, rows in zip(packed, taught, strict=True)]
  if credit is not None:
    written = written_mask(batch.rollouts) & batch.counted[:, None]
    of_updates = zip(np.split(written.astype(np.float32), num_updates), np.split(taken, num_updates), strict=True)
    shares = [shares_of_weight(run.experiment.objective, *x, group_size=batch.group_size) for x in of_updates]
    shares = [[np.full(len(x.tokens), x_share) for x, x_share in zip(*of, strict=True)] for of in zip(minibatches, shares, strict=True)]
    laid = [packing.lay(share, layout) for share, layout in zip(shares, layouts, strict=True)]
    packed = [x._replace(importance=importance) for x, importance in zip(packed, laid, strict=True)]
  bare = [place_tokens(mesh, minibatch) for minibatch in packed]
  computed = [with_logprobs(run, x, step) for x in with_written_mask(run, batch, bare, layouts)]
  placed, route_metrics = [x._replace(mask=own.mask) for (x, _), own in zip(computed, bare, strict=True)], [of for _, of in computed]
  # The sampler's log-probabilities have kept their place, unless the learner computed others.
  reads = read_by_credit(run, recomputed=placed[0].old_logprobs is not bare[0].old_logprobs)
  between()

  phases.begin("advantages")
  batch, placed, credited = add_credit(run, batch, layouts, placed, taken, reads, credit)
  placed, teacher_metrics, of_teachers = add_teacher_advantages(run, placed, minibatches, layouts, examples)
  metrics = batch_lib.metrics(batch) | credited.metrics | of_teachers
  metrics |= {"perf/packing_waste": packing.packing_waste(layouts), "perf/prompts_saved": packing.prompts_saved(layouts)}
  if batch.rollouts.versions is not None:
    metrics |= versions.metrics(batch.rollouts, step, most=run.config.rollout.staleness)
  if credit is not None:
    metrics["actor/frac_zero_advantages"] = float(1 - np.mean(taken))
  of_updates = [of_routes | of_teacher for of_routes, of_teacher in zip(route_metrics, teacher_metrics, strict=True)]
  role_baselines = None if credited.role_baselines is None else credited.role_baselines.tolist()
  beliefs = None if credited.beliefs is None else remembered(run, batch, credited.beliefs)
  return Prepared(batch, taken, minibatches, layouts, placed, of_updates, metrics, role_baselines, beliefs)


def read_by_credit(run: Run, *, recomputed: bool) -> dict[str, Callable[[TrainBatch], jax.Array]]:
  """Returns the learner's outputs from which advantages are computed, by name.

  `recomputed` says whether log π_old is the learner's rather than the sampler's.
  """
  reads = {}
  if recomputed and (run.config.reward.kl_coef > 0 or run.experiment.mismatch_weights):
    reads["old_logprobs"] = lambda x: x.old_logprobs
  if run.config.reward.kl_coef > 0:
    reads["ref_logprobs"] = lambda x: x.ref_logprobs
  if run.critic is not None:
    reads["values"] = lambda x: x.old_values
  for name in run.experiment.estimator.needs & MEASURED:
    reads[name] = lambda x, name=name: getattr(x, name)
  return reads


def with_written_mask(run: Run, batch: batch_lib.Batch, bare: list[TrainBatch], layouts: list[packing.Layout]) -> list[TrainBatch]:
  """Returns mini-batches for the learner's pass, in which all tokens count that statistics read.

  These are the tokens of all sequences if log-probabilities or entropies enter a statistic, else
  those that are learned from.

  Args:
    run: RL run.
    batch: Graded batch.
    bare: The mini-batches on the devices.
    layouts: Places of all sequences of the batch; where outputs are read, no update leaves out any.
  """
  if np.all(batch.counted) or not {"old_logprobs", "ref_logprobs", *MEASURED} & read_by_credit(run, recomputed=True).keys():
    return bare
  written = trajectories.whole_sequences(written_mask(batch.rollouts).astype(np.float32), batch.rollouts)
  laid = map(packing.lay, packing.split(written, len(bare)), layouts)
  return [x._replace(mask=place_tokens(run.experiment.mesh, mask)) for x, mask in zip(bare, laid, strict=True)]


def arrange_all(
  run: Run, minibatches: Sequence[list[packing.Trajectory]], examples: Sequence[Examples]
) -> tuple[list[packing.Layout], list[TaughtRows | None]]:
  """Arranges the sequences of every update in rows.

  Returns:
    The places, and for an update that compares the policy with a teacher that has prompts of its
    own, the rows that the teacher reads.
  """
  if not step_options(run.config)["taught"]:
    return [arrange(run, x) for x in minibatches], [None for _ in minibatches]
  layouts, rows = [], []
  for sequences, of_update in zip(minibatches, examples, strict=True):
    taught = with_teachers_prompts(run, sequences, of_update)
    both = packing.arrange_taught(sequences, taught, **row_options(run))
    layouts.append(both[0])
    rows.append(packing.pack_taught(sequences, both, taught))
  return layouts, rows


def with_logprobs(run: Run, batch: TrainBatch, step: int) -> tuple[TrainBatch, Metrics]:
  """Adds the learner's outputs that updates need: log π_old, entropy, log π_ref, values, routes.

  They come from the learner before its updates. Only what is read is computed.

  Args:
    run: RL run.
    batch: Packed and placed batch; `routing` holds the sampler's routes, if it recorded any.
    step: RL step, from 0.

  Returns:
    The batch, whose `routing` holds the routes that updates replay; and metrics of the routes,
    empty for a dense model.
  """
  config, learner, params = run.config, run.experiment.learner, run.state.params
  needs, replay, sampled = run.experiment.needs, config.moe.replay, batch.routing
  batch = batch._replace(routing=sampled if replay == "R3" else None)
  bare = needed_by_logprobs(batch)
  metrics: Metrics = {}
  # No condition skips this pass: the sampler is another program, whose weights, cache or products
  # may be rounded, and its numbers never stand in for the learner's.
  recomputed = config.learner.old_logprobs == "learner" and "old_logprobs" in needs
  measured = MEASURED & needs
  if recomputed or measured or replay == "R2" or measures_routes(run, step):
    own = learner.logprobs(params, bare)
    batch = batch._replace(**{name: getattr(own, name.removeprefix("old_")) for name in measured})
    if recomputed:
      batch = batch._replace(old_logprobs=own.logprobs)
    if replay == "R2":
      batch = batch._replace(routing=own.routing)
    if learner.routes is not None:
      metrics = learner.routes.describe(own.routing, batch.segments, sampled, batch.routing)
  reference = run.reference
  if "ref_logprobs" in needs and learner.model.config.lora is not None:
    reference = models.reference(params)  # The base under the adapters.
  if reference is not None and "ref_logprobs" in needs:
    bare = bare._replace(routing=live_routes(run, batch))
    batch = batch._replace(ref_logprobs=learner.logprobs(reference, bare).logprobs)
  if run.critic is not None:
    batch = batch._replace(old_values=learner.critic.values(run.critic.params, bare._replace(routing=None)))
  return batch, metrics


def measures_routes(run: Run, step: int) -> bool:
  """Returns whether an RL step measures how the experts change."""
  every = run.config.moe.measure_every
  return every > 0 and step % every == 0


def trained_sequences(credit: Credit | None, num_sequences: int, num_updates: int) -> Bool[np.ndarray, " N"]:
  """Returns which sequences updates are made of: those with an advantage, or all for `None`.

  An update has at least one sequence, so that its metrics have values.
  """
  if credit is None:
    return np.ones(num_sequences, bool)
  taken = np.any(credit.advantages != 0, axis=1).reshape(num_updates, -1)
  taken[~taken.any(axis=1), 0] = True
  return taken.reshape(-1)


def only(items: Sequence[Any], kept: Bool[np.ndarray, " n"]) -> list[Any]:
  """Returns the items that are kept.

  Example:
    >>> only("abc", np.array([True, False, True]))
    ['a', 'c']
  """
  return list(itertools.compress(items, kept))


def shares_of_weight(
  objective: Objective, mask: Float[np.ndarray, "N R"], taken: Bool[np.ndarray, " N"], *, group_size: int
) -> Float[np.ndarray, " n"]:
  """Returns the part that each sequence of an update keeps of its weight in the update of all.

  Sequences without an advantage add nothing to a loss, but count in its denominators. With these
  shares as `TrainBatch.importance`, an update without them has the same loss and gradient.

  Args:
    objective: Objective, which weighs the tokens.
    mask: 1 for the tokens that count, of all sequences of the update.
    taken: True for the n sequences that the update is made of.
    group_size: Number of consecutive samples per prompt.

  Example:
    >>> from jaxrl_llm.objectives.dapo import dapo
    >>> mask, taken = np.float32([[1, 1], [1, 0], [1, 0]]), np.array([True, False, True])
    >>> shares_of_weight(dapo(), mask, taken, group_size=3).tolist()
    [0.75, 0.75]
  """
  groups = jnp.broadcast_to(jnp.arange(len(mask))[:, None] // group_size, mask.shape)
  objective = objective._replace(weigh=jax.jit(objective.weigh))
  of_tokens = (token_weights(objective, jnp.asarray(x), None, groups) for x in (mask, mask * taken[:, None]))
  among_all, by_themselves = (np.sum(np.asarray(x), axis=1)[taken] for x in of_tokens)
  return np.where(by_themselves > 0, among_all / np.where(by_themselves > 0, by_themselves, 1), 1)


def compute_credit(run: Run, batch: batch_lib.Batch, learned: Mapping[str, list[np.ndarray]]) -> Credit:
  """Computes the advantages of a rollout batch, and any value targets, on the host.

  Args:
    run: RL run.
    batch: Graded batch.
    learned: The learner's outputs that the advantages need, for each sequence: `old_logprobs`,
      `ref_logprobs`, `values` and those in `MEASURED` of its tokens, prompt included.
  """
  config, experiment, needs = run.config, run.experiment, run.experiment.needs
  in_reward, coef, metrics = config.reward.kl_coef > 0, run.record.kl_coef, {}
  evidence = trajectories.evidence(
    batch,
    rewards=experiment.rewards,
    by_steps="step_rewards" in needs,
    by_states="step_states" in needs,
    kl=partial(kl_estimate, estimator=config.reward.kl_estimator or "k1") if in_reward else None,
    kl_coef=coef if in_reward else 0.0,
    mismatch_weights=experiment.mismatch_weights,
    **learned,
  )
  if run.record.role_baselines is not None:
    evidence = evidence._replace(role_baselines=np.float32(run.record.role_baselines))
  if run.record.beliefs is not None:
    evidence = with_beliefs(run, batch, evidence)
  if in_reward:
    # Of all responses that lose reward by it, learned from or not: `adapt_coefficients` reads it.
    mean = float(np.sum(evidence.kl * evidence.written) / max(np.sum(evidence.written), 1))
    metrics |= {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coef}
  credit = jax.device_get(experiment.credit(evidence))
  return credit._replace(metrics=metrics | {name: float(x) for name, x in credit.metrics.items()})


def add_credit(
  run: Run,
  batch: batch_lib.Batch,
  layouts: list[packing.Layout],
  placed: list[TrainBatch],
  taken: Bool[np.ndarray, " N"],
  reads: Mapping[str, Callable[[TrainBatch], jax.Array]],
  credit: Credit | None,
) -> tuple[batch_lib.Batch, list[TrainBatch], Credit]:
  """Adds advantages and value targets to the rollout batch and its packed mini-batches.

  Args:
    run: RL run.
    batch: Graded batch.
    layouts: Places of the sequences of each mini-batch.
    placed: The mini-batches on the devices.
    taken: True for the sequences of the batch that are in the mini-batches.
    reads: What the credit is computed from, of `placed`; see `read_by_credit`.
    credit: Credit from `compute_credit`; None computes it here.

  Returns:
    The batch, the mini-batches, and the credit.
  """

  def lifted(read):
    """Returns a packed array of every mini-batch, unpacked to one array per sequence."""
    arrays = hosts.to_host([read(x) for x in placed])
    return [x for array, layout in zip(arrays, layouts, strict=True) for x in packing.lift(array, layout)]

  credit = credit or compute_credit(run, batch, {name: lifted(read) for name, read in reads.items()})

  def laid(responses):
    """Yields per-token values of the responses, in the rows of every mini-batch."""
    sequences, start = only(trajectories.whole_sequences(responses, batch.rollouts), taken), 0
    for layout in layouts:
      yield place_tokens(run.experiment.mesh, packing.lay(sequences[start : start + len(layout.rows)], layout))
      start += len(layout.rows)

  placed = [x._replace(advantages=values) for x, values in zip(placed, laid(credit.advantages), strict=True)]
  if credit.returns is not None:
    placed = [x._replace(returns=values) for x, values in zip(placed, laid(credit.returns), strict=True)]
  return batch._replace(advantages=credit.advantages, signal=with_signal(run, batch, shaped=True)), placed, credit


def update(run: Run, batch: TrainBatch, step: int) -> dict[str, jax.Array]:
  """Updates the policy and any critic; during the critic's warm-up, the critic alone."""
  config, experiment, metrics = run.config, run.experiment, {}
  measured = None
  if measures_routes(run, step):
    measured = needed_by_logprobs(batch._replace(routing=live_routes(run, batch)))
    before = experiment.learner.logprobs(run.state.params, measured).routing
  if run.critic is not None:
    run.critic, metrics = experiment.learner.critic.step(run.critic, needed_by_critic(batch, experiment.objective.needs))
  if run.critic is None or step >= (config.critic.value_warmup_steps or 0):
    num_held = len(batch.tokens) // num_row_shards(experiment.mesh) * len(own_row_shards(experiment.mesh))
    everywhere = lambda coef: place_tokens(experiment.mesh, np.full((num_held, batch.tokens.shape[1]), coef, np.float32))
    if config.kl.target is not None:
      batch = batch._replace(kl_coefs=everywhere(run.record.kl_coef))
    if config.entropy.target is not None:
      batch = batch._replace(entropy_coefs=everywhere(run.record.entropy_coef))
    batch = needed_by_step(batch, experiment.objective.needs, **step_options(config))
    others = [teacher_params(run, "")] if config.teacher.gkd_coef and not teaches_itself(config) else []
    run.state, policy_metrics = experiment.learner.rl_step(run.state, batch, *others)
    metrics |= policy_metrics
  if measured is not None:
    after = experiment.learner.logprobs(run.state.params, measured).routing
    metrics["moe/expert_change/update"] = experiment.learner.routes.compare(before, batch.segments, after)
  return metrics


def gradient_noise(run: Run, batch: TrainBatch, step: int) -> dict[str, float]:
  """Measures noise and signal of the gradients of an update's responses, in the steps that do."""
  every = run.config.log.gradient_noise_every
  if not every or step % every:
    return {}
  needs = run.experiment.objective.needs | {"groups"}
  return run.experiment.learner.gradient_noise(run.state.params, needed_by_step(batch, needs, adaptive_kl=False))


def token_scores(run: Run, learned: Learned) -> list[dict[str, np.ndarray]]:
  """Returns per-token scores of a step's sequences under the policy after the step's updates.

  The viewer shows them. Each sequence has its arrays by name, prompt included; one that no update
  was made of has none.
  """
  needs, packed = run.experiment.objective.needs, []
  for batch in learned.placed:
    packed.append(
      run.experiment.learner.token_scores(run.state.params, needed_by_step(batch, needs, adaptive_kl=False))
    )
  rows = []
  for arrays, layout in zip(hosts.to_host(packed), learned.layouts, strict=True):
    lifted = {name: packing.lift(array, layout) for name, array in arrays._asdict().items()}
    rows += [{name: x[i] for name, x in lifted.items()} for i in range(len(layout.rows))]
  scores = iter(rows)
  return [next(scores) if taken else {} for taken in learned.taken]


def adapt_coefficients(run: Run, row: dict[str, Any]) -> None:
  """Moves adaptive coefficients of divergence and entropy, given those of the step's updates.

  Nothing moves if the critic trained alone.
  """
  config, record = run.config, run.record
  divergence = row.get("actor/reward_kl_penalty" if config.reward.kl_coef else "actor/ref_kl")
  if config.kl.target is not None and divergence is not None:
    sizes = dict(horizon=config.kl.horizon or 10_000, num_sequences=config.rollout.num_prompts * config.rollout.group_size)
    record.kl_coef = adapted_coef(record.kl_coef, divergence, target=config.kl.target, **sizes)
  entropy = row.get("actor/entropy")
  if config.entropy.target is not None and entropy is not None:
    step = config.entropy.step or ENTROPY_STEP
    record.entropy_coef = adapted_entropy_coef(record.entropy_coef, entropy, target=config.entropy.target, step=step)
