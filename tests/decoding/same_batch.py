"""One batch of one config and one seed, for tests that draw it in different places.

`python -m tests.decoding.same_batch FOLDER DRIVER` draws it in one of several processes, on the
devices of all of them.
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from jaxrl_llm.config.check import config_problems
from jaxrl_llm.devices import hosts
from jaxrl_llm.rollouts.arrivals import gather
from jaxrl_llm.rollouts.jobs import Job
from jaxrl_llm.run.setup.experiment import Experiment, build_experiment
from jaxrl_llm.types import Rollouts
from tests.decoding.sampler.nano import weights_of
from tests.runs import tiny_config

TENSOR, EXPERT = {"mesh.fsdp": 4, "mesh.tensor": 2}, {"mesh.fsdp": 2, "mesh.expert": 4}
# A mixture whose routes are kept, fewer rows than responses, prompts that share more than a chunk,
# and stops that end about half of the responses.
CONFIG = {
  "model.preset": "nano-moe", "moe.replay": "R3", "task.shots": 2, "rollout.prompt_buckets": (64,), "rollout.slots": 16,
  "rollout.temperature": 0.9, "rollout.top_k": 60, "rollout.top_p": 0.97, "rollout.stop_strings": tuple("abcdefgh"),
  "learner.row_tokens": 144, "learner.row_buckets": (16,), "warm_start.num_steps": 0,
}  # fmt: skip


def config_of(driver: str = "auto", changes: dict[str, Any] | None = None) -> ConfigDict:
  """Returns the config, with a driver and with changes of where it draws."""
  config = tiny_config("gspo", CONFIG | {"rollout.driver": driver} | (changes or {}))
  assert config_problems(config) == []
  return config


def weights(experiment: Experiment) -> PyTree:
  """Returns weights by which each token has a distribution of its own, on the learner's devices."""
  values, like = weights_of(experiment.learner.model), experiment.learner.abstract_state.params
  return jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), values, like)


def job_of(experiment: Experiment) -> Job:
  """Returns the batch, with the shortest and the longest prompts of its task."""
  examples = sorted(experiment.task.train, key=lambda example: len(example["prompt"]))
  chosen = [example for pair in zip(examples[:4], examples[-4:], strict=True) for example in pair]
  return experiment.drawing.train.job(chosen, jax.random.key(experiment.config.seed), None)


def draw(experiment: Experiment, *, between: Callable[[], None] = lambda: None) -> Rollouts:
  """Draws the batch as a run does; `between` is called while it waits for samplers."""
  drawing, job = experiment.drawing, job_of(experiment)
  with drawing.queue as queue:
    queue.publish(weights(experiment), 0, between=between)
    playing = queue.begin(drawing.train.play, job, 0)
    return gather(playing, job, drawing.tokenizer, prompt_buckets=drawing.prompt_buckets)[0].rollouts


def main(folder: pathlib.Path, driver: str) -> None:
  """Draws the batch and saves it, in each process."""
  hosts.join_processes()
  drawn = draw(build_experiment(config_of(driver, EXPERT)))
  np.savez(folder / f"{jax.process_index()}.npz", **{name: x for name, x in drawn._asdict().items() if x is not None})


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), sys.argv[2])
