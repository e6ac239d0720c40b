"""One config and one seed: the same tokens and routes everywhere, and the learner's numbers."""

import base64
import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.engine.fleet import make_engines
from jaxrl_llm.learner.needs import needed_by_logprobs
from jaxrl_llm.learner.packing import arrange, pack
from jaxrl_llm.models import save_hf
from jaxrl_llm.pretrained.tokenizer_files import files_of
from jaxrl_llm.rollouts.jobs import turn_seed
from jaxrl_llm.rollouts.trajectories import trajectories
from jaxrl_llm.run.jobs.serving import open_checkpoint
from jaxrl_llm.run.setup.experiment import Experiment, build_experiment
from jaxrl_llm.run.setup.sampler_processes import use_samplers
from jaxrl_llm.types import Rollouts
from jaxrl_llm.workdir import claim
from tests.decoding.same_batch import EXPERT, TENSOR, config_of, draw, job_of, weights
from tests.marks import few
from tests.runs import ROOT, environment, free_address, joined, quick
from tests.serve.fake_engine import GENERATE, ask, serving


class Reference(NamedTuple):
  """What the sampler draws on one device, and what the learner computes for it.

  Attributes:
    experiment: The experiment on one device.
    rollouts: Rollouts of the sampler.
    logprobs, routes: Those of each response, by a forward pass of the learner that no route leads.
  """

  experiment: Experiment
  rollouts: Rollouts
  logprobs: list[np.ndarray]
  routes: list[np.ndarray]


@pytest.fixture(scope="module")
def reference():
  with quick():
    experiment = build_experiment(config_of("drain"))
    rollouts = draw(experiment)
    sequences, section = trajectories(rollouts), experiment.config.learner
    layout = arrange(sequences, row_tokens=section.row_tokens, row_buckets=section.row_buckets, share_prompts=True)
    batch = jax.tree.map(jnp.asarray, pack(sequences, layout))
    batch = batch._replace(routing=jnp.full_like(batch.routing, -1))
    scored = jax.device_get(experiment.learner.logprobs(weights(experiment), needed_by_logprobs(batch)))
  own = [(row, slots[sequence.num_prompt :]) for sequence, row, slots in zip(sequences, layout.rows, layout.slots, strict=True)]
  assert len(np.unique(rollouts.mask.sum(axis=1))) > 6 and len(np.unique(rollouts.prompt_mask.sum(axis=1))) > 1
  assert 0.2 < np.mean(rollouts.stopped) < 0.8
  return Reference(experiment, rollouts, *([scores[place] for place in own] for scores in (scored.logprobs, scored.routing)))


def assert_as_drawn(drawn, reference):
  """Asserts tokens, ends and routes of the reference, and numbers and routes of the learner."""
  for name in ("prompts", "tokens", "mask", "reasons"):
    np.testing.assert_array_equal(getattr(drawn, name), getattr(reference.rollouts, name), err_msg=name)
  np.testing.assert_array_equal(np.sort(drawn.routing), np.sort(reference.rollouts.routing))
  responses = drawn.routing[:, drawn.prompts.shape[1] :]
  for i, (mask, logprobs, routes) in enumerate(zip(drawn.mask, reference.logprobs, reference.routes, strict=True)):
    np.testing.assert_allclose(drawn.logprobs[i][mask], logprobs, atol=1e-5, rtol=0)
    # The last token was not fed.
    np.testing.assert_array_equal(np.sort(responses[i][mask][:-1]), np.sort(routes[:-1]))


def test_the_drain_on_one_device(reference):
  assert_as_drawn(reference.rollouts, reference)


PLACES = [("loop", {}), ("drain", TENSOR), ("loop", EXPERT), ("loop", TENSOR), ("drain", EXPERT)]


@pytest.mark.parametrize(
  ("driver", "mesh"), few(PLACES, 0, 1, 2, rest="slow"), ids=lambda x: x if isinstance(x, str) else ",".join(x) or "one device"
)
def test_both_drivers_on_one_device_and_on_meshes(driver, mesh, reference):
  with quick(8 if mesh else 1):
    drawn = draw(build_experiment(config_of(driver, mesh)))
  assert_as_drawn(drawn, reference)


@pytest.mark.slow
def test_a_served_checkpoint(reference, tmp_path):
  """Each response is a call of its own, with the seed of the run's request."""
  experiment, expected = reference.experiment, reference.rollouts
  model, job, tokenizer = experiment.learner.model, job_of(experiment), experiment.task.tokenizer
  with files_of(tokenizer) as files:
    save_hf(tmp_path / "policy", model, weights(experiment), tokenizer_from=files)
  draws = job.draws
  sampling = dict(temperature=draws.temperature, top_k=draws.top_k, top_p=draws.top_p, stop=list(draws.stops), logprobs=1)
  with quick():
    opened = open_checkpoint(str(tmp_path / "policy"))
    sizes = dict(slots=8, context=128, max_requests=64)
    engine = make_engines(opened.model, opened.params, tokenizer=opened.tokenizer, records_routes=True, **sizes)

  def asked(i):
    prompt = expected.prompts[i][expected.prompt_mask[i]].tolist()
    settings = sampling | {"seed": turn_seed(job.seeds[i], 0), "max_tokens": draws.max_new_tokens}
    status, _, answer = ask(service, GENERATE, {"token_ids": prompt, "sampling_params": settings}, timeout=120)
    assert status == 200, answer
    return answer["choices"][0]

  with serving(engine, tokenizer=opened.tokenizer) as service, ThreadPoolExecutor(12) as callers:
    choices = list(callers.map(asked, range(len(job.seeds))))
  drawn, width = jax.tree.map(np.copy, expected), expected.prompts.shape[1]
  for i, choice in enumerate(choices):
    size, told = len(choice["token_ids"]), choice["routed_experts"]
    assert choice["finish_reason"] == ("stop" if expected.stopped[i] else "length")
    drawn.tokens[i], drawn.logprobs[i], drawn.routing[i] = tokenizer.pad_id, 0, -1
    drawn.tokens[i, :size], drawn.mask[i] = choice["token_ids"], np.arange(drawn.mask.shape[1]) < size
    drawn.logprobs[i, :size] = [x["logprob"] for x in choice["logprobs"]["content"]]
    routes = np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])
    drawn.routing[i, width - expected.prompt_mask[i].sum() :][: len(routes)] = routes
  assert_as_drawn(drawn, reference)


@contextlib.contextmanager
def started(folder, *line, count):
  """Runs a program in one or two processes of four devices each, and ends them."""
  address, processes = free_address(), []
  try:
    for index in range(count):
      env = environment(4) | (joined(address, index) if count > 1 else {})
      with open(folder / f"{index}.log", "w") as log:
        processes.append(subprocess.Popen([sys.executable, "-m", *line], cwd=ROOT, env=env, stdout=log, stderr=log))
    yield processes
  finally:
    for process in processes:
      process.kill()
      process.wait()


def logs(folder):
  return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


@pytest.mark.exhaustive  # `run/test_multihost.py` has two processes that draw conversations.
@pytest.mark.parametrize("driver", ["loop", "drain"])
def test_two_processes_of_four_devices(driver, reference, tmp_path):
  with started(tmp_path, "tests.decoding.same_batch", str(tmp_path), driver, count=2) as processes:
    assert [process.wait(timeout=600) for process in processes] == [0, 0], logs(tmp_path)
  for index in range(2):
    with np.load(tmp_path / f"{index}.npz") as saved:
      assert_as_drawn(reference.rollouts._replace(**saved), reference)


@pytest.mark.slow
@pytest.mark.parametrize("count", few([1, 2], 0))
def test_a_sampler_of_other_processes(count, reference, tmp_path):
  """Each four of its devices share the experts and the heads."""
  config = config_of(changes={"rollout.samplers": 1, "mesh.sampler_expert": 2, "mesh.sampler_tensor": 2})
  claim.claim(tmp_path, config.to_dict())
  with started(tmp_path, "jaxrl_llm.cli.join", str(tmp_path), count=count) as processes, quick():

    def between():
      assert all(process.poll() is None for process in processes), logs(tmp_path)

    experiment = build_experiment(config)
    use_samplers(config, experiment, tmp_path, note=lambda line: None)
    drawn = draw(experiment, between=between)
  assert_as_drawn(drawn, reference)
