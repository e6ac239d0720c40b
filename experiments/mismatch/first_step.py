"""Where the numbers of a config's sampler and learner begin to differ, in its first RL step."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.mismatch.vectors import LEARNER, SAMPLER, Vectors
from jaxrl_llm.learner.needs import needed_by_logprobs
from jaxrl_llm.models.taps import tapped
from jaxrl_llm.run.setup.start import start_run
from jaxrl_llm.run.steps.grading import assess
from jaxrl_llm.run.steps.learn import end_imitation, learn_from, prepare
from jaxrl_llm.run.steps.sample import launch, wait
from jaxrl_llm.train import warm_start


def measure(config: ConfigDict) -> dict[str, Any]:
  """Draws the first rollout batch of a config, scores it with the same weights, and compares.

  The programs are those of a run, with taps in the sampler and in the pass that scores. The
  config's warm start comes first.

  Returns:
    `responses` and `tokens`, the numbers of them; `equal`, the share of the tokens whose
    log-probabilities are equal in bits, and `in_update`, the same by the first update, whose
    program computes gradients and has no taps; `mean`, `p99` and `largest`, of the gap in nats; and
    `shares`, see `Vectors.shares`.
  """
  with tempfile.TemporaryDirectory() as folder:
    run = start_run(config, Path(folder), command="experiments.mismatch")
    learner, ordered = run.experiment.learner, run.experiment.mesh.size == 1
    vectors = Vectors(learner.model.config, ordered=ordered)
    with run.phases, run.experiment.drawing.queue, run.grader, run.progress, run.writer, run.samples:
      warm_start(run)
      end_imitation(run)
      run.phases.begin_step(1, "rollout")
      # A program is compiled when it first runs: here.
      with tapped(vectors.take):
        vectors.side = SAMPLER
        batch = assess(run, wait(run, 0, launch(run, 0))[0])
        jax.effects_barrier()
        vectors.side = None
        prepared = prepare(run, batch, 0)
        jax.effects_barrier()
        vectors.side = LEARNER
        own = [np.asarray(learner.logprobs(run.state.params, needed_by_logprobs(x)).logprobs) for x in prepared.placed]
        shares = vectors.shares(prepared.layouts[0].shape[1])
        vectors.side = None
      update = learn_from(run, batch, 0).updates[0]
  counted = [np.asarray(x.mask) > 0 for x in prepared.placed]
  of_learner, of_sampler = (
    np.concatenate([x[mask] for x, mask in zip(of, counted, strict=True)])
    for of in (own, [np.asarray(x.sampler_logprobs) for x in prepared.placed])
  )
  gap = np.abs(of_learner.astype(np.float64) - of_sampler)
  sizes = {"responses": len(batch.counted), "tokens": len(gap)}
  gaps = {"mean": float(np.mean(gap)), "p99": float(np.quantile(gap, 0.99)), "largest": float(np.max(gap))}
  equal = {"equal": float(np.mean(gap == 0)), "in_update": update["rollout_corr/bits_equal"]}
  return sizes | equal | gaps | {"shares": [share._asdict() for share in shares]}
