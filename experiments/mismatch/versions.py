"""Whether the learner computes what the sampler recorded, with the weights that drew each token."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.reliability.asynchronous import VARIES
from experiments.reliability.attempts import mismatches
from jaxrl_llm import train
from jaxrl_llm.config.fields import flatten
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.needs import needed_by_logprobs
from jaxrl_llm.rollouts import schedule, trajectories, versions
from jaxrl_llm.run.setup.start import Run, start_run
from jaxrl_llm.run.steps.learn import Learned, only
from jaxrl_llm.types import Params, TrainBatch, TrainState


class OfLag(NamedTuple):
  """Tokens drawn by weights of one age, and how many of them the learner repeats.

  Attributes:
    lag: Age in RL steps.
    tokens: Number of tokens.
    equal: Share of those whose log-probabilities are equal in bits.
    largest: Largest gap in nats.
  """

  lag: int
  tokens: int
  equal: float
  largest: float


class Versions:
  """The weights of the last RL steps of a run, and what they say of each step's tokens.

  Args:
    run: Run that has not begun its RL steps. Its updates are watched from now on.

  Attributes:
    gaps: Gap of each token in nats, by the lag of its weights; 0 if its numbers are equal in bits.
    several: Number of responses that several versions drew.
  """

  def __init__(self, run: Run):
    self._run, self._params, self._update = run, {}, run.experiment.learner.rl_step
    self.gaps: dict[int, list[np.ndarray]] = {}
    self.several = 0
    run.experiment = run.experiment._replace(learner=run.experiment.learner._replace(rl_step=self._keep))
    run.witness = self._compare

  def _keep(self, state: TrainState, batch: TrainBatch, *others: Params) -> Any:
    version = self._run.record.rl_steps
    if version not in self._params:
      # Copies: the state is donated.
      self._params = {own: x for own, x in self._params.items() if own >= version - self._run.config.rollout.staleness}
      self._params[version] = jax.tree.map(lambda x: np.array(x), state.params)
    return self._update(state, batch, *others)

  def _compare(self, learned: Learned, step: int) -> None:
    run, rollouts = self._run, learned.batch.rollouts
    if rollouts.versions is None:
      rollouts = versions.of_one_version(rollouts, step)
    # From 1, since 0 is what no weights drew.
    of_tokens = only(trajectories.whole_sequences(rollouts.versions + 1, rollouts), learned.taken)
    self.several += sum(len(set(x[x > 0])) > 1 for x in of_tokens)
    places = iter(of_tokens)
    for batch, layout in zip(learned.placed, learned.layouts, strict=True):
      drawn = packing.lay([next(places) for _ in layout.rows], layout).astype(int) - 1
      counted, sampled = np.asarray(batch.mask) > 0, np.asarray(batch.sampler_logprobs)
      for version in np.unique(drawn[counted]).tolist():
        params = jax.tree.map(lambda held, x: jax.device_put(held, x.sharding), self._params[version], run.state.params)
        own = np.asarray(run.experiment.learner.logprobs(params, needed_by_logprobs(batch)).logprobs)
        at = counted & (drawn == version)
        self.gaps.setdefault(step - version, []).append(np.abs(own[at].astype(np.float64) - sampled[at]))

  def of_lags(self) -> list[OfLag]:
    """Returns a row for each lag."""
    rows = []
    for lag in sorted(self.gaps):
      gaps = np.concatenate(self.gaps[lag])
      rows.append(OfLag(lag, len(gaps), float(np.mean(gaps == 0)), float(np.max(gaps))))
    return rows


def repeat(config: ConfigDict, workdir: Path) -> dict[str, Any]:
  """Repeats a finished run, in one process, and compares every token that it has learned from.

  A run whose responses go on with new weights is repeated by its schedule.

  Args:
    config: The run's config, without sampler processes.
    workdir: Folder of the run.

  Returns:
    `lags`, a row for each lag (`OfLag`); `several`, the number of responses that several versions
    of the weights drew; and `differing`, the number of rows of metrics, samples and weights that
    differ from the run's.

  Raises:
    ReplayDiffersError: If the repeated run draws other tokens.
  """
  with tempfile.TemporaryDirectory() as folder:
    run = start_run(config, Path(folder), command="experiments.mismatch")
    if recorded := schedule.read(workdir):
      written = Path(folder), schedule.checksum_of(flatten(config))
      run.experiment.drawing.queue.schedule = schedule.Schedule(*written, first=0, repeated=recorded)
    watched = Versions(run)
    train.proceed(run)
    differing = mismatches(workdir, Path(folder), varies=VARIES)
  return {"lags": [row._asdict() for row in watched.of_lags()], "several": watched.several, "differing": differing}
