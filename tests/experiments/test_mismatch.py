"""Where sampler and learner differ: the command, its refusals, and faults that it must place."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mismatch import __main__ as command
from experiments.mismatch.vectors import LEARNER, LOGITS, SAMPLER, Vectors
from jaxrl_llm.models import preset
from jaxrl_llm.models.taps import tap, tapped
from tests.runs import ROOT, environment, succeed

CONFIG = "--config=configs/gspo.py:tiny"


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "--config and --run: found neither, expected one"),
    ([CONFIG, "--run=runs/a"], "--config and --run: found both, expected one"),
    ([CONFIG, "--jsn=a"], "unknown argument '--jsn=a'; did you mean 'json'?"),
    ([CONFIG, "--json=no_such_folder/a.json"], "--json: found no folder"),
    (["--run=no_such_run"], "--run: found no RL run in no_such_run"),
    (["--run=runs/a", "--config.seed=1"], "config.seed: found with --run, expected none"),
    ([CONFIG, "--config.rollout.staleness=1", "--config.mesh.sampler=1"], "config.rollout.staleness: found 1, expected 0 for"),
    ([CONFIG, "--config.numerics.exact=True", "--config.mesh.context=2"], "config.mesh.context"),
  ],
)
def test_bad_flags_are_refused_before_anything_is_loaded(flags, message, capsys):
  assert command.main(flags) == 2
  assert message in capsys.readouterr().err


def steps(x, wrong, layers):
  """Shows vectors as a model does, with a fault in one place."""
  for layer in range(layers):
    for name in ("q in", "q", "k", "v", "o in", "o", "gate in", "gate", "up", "down in", "down"):
      x = tap(name, x * 1.5 + (1 if (layer, name) == wrong else 0))
  return x


@pytest.mark.parametrize(("wrong", "place"), [((1, "o in"), ("attention", 1)), ((0, "down"), ("down", 0)), (None, None), ("head", LOGITS)])
def test_the_part_and_the_layer_of_a_fault_are_named(wrong, place):
  config = preset("nano", vocab_size=264)
  layers, vectors = config.num_layers, Vectors(config, ordered=True)
  rows = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)), jnp.float32)

  def sample(x):  # A token at a time, and a row that has ended.
    x = tap("head in", steps(jnp.pad(x, ((0, 1), (0, 0))), wrong, layers))
    tap("head", x * 2 + (wrong == "head"))

  def learn(x):  # Rows, padded on the right, and a chunk of states that is padded, too.
    x = steps(jnp.pad(x, ((0, 0), (0, 1), (0, 0))), None, layers)
    for name, values in (("segments", jnp.array([[1, 1, 1, 0]] * 2)), ("prefixes", jnp.zeros((2, 4), int))):
      tap(name, values, 0)
    tap("counted", jnp.array([[True, True, False, False]] * 2), 0)
    tap("states", x)
    tap("head", tap("head in", x.reshape(8, 4)) * 2)

  with tapped(vectors.take):
    vectors.side = SAMPLER
    for t in range(2):
      jax.jit(sample)(rows[:, t])
    jax.effects_barrier()
    vectors.side = LEARNER
    jax.jit(learn)(rows)
    shares = vectors.shares(4)
  assert [x.layer for x in shares[:-2]] == sorted(x.layer for x in shares[:-2])
  first = next((x for x in shares if x.equal < 1), None)
  if place is None:
    assert first is None
  elif place == LOGITS:
    assert (first.part, first.equal) == (LOGITS, 0)
  else:
    assert ((first.part, first.layer), first.equal, first.count) == (place, 0, 4)


@pytest.mark.slow
def test_an_exact_sampler_has_computed_every_vector_of_the_learner(tmp_path):
  options = ("--config.numerics.exact=True", "--config.warm_start.num_steps=20", "--config.rollout.driver=drain")
  options += ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2", f"--json={tmp_path / 'a.json'}")
  printed = run(CONFIG, *options, devices=8)
  numbers = json.loads((tmp_path / "a.json").read_text())
  assert "first difference: none" in printed and numbers["equal"] == numbers["in_update"] == 1 and numbers["largest"] == 0
  assert {x["equal"] for x in numbers["shares"]} == {1} and min(x["count"] for x in numbers["shares"]) >= numbers["tokens"]


@pytest.mark.slow
def test_every_token_of_an_asynchronous_run_is_that_of_the_weights_that_drew_it(tmp_path):
  options = {
    "numerics.exact": True, "num_steps": 4, "warm_start.num_steps": 0, "reward.at_random": 0.5, "rollout.staleness": 4, "rollout.slots": 2,
    "rollout.update_in_flight": "recompute", "rollout.max_new_tokens": 64, "learner.row_tokens": None, "learner.row_buckets": None,
    "learner.learning_rate": 1e-3, "log.tensorboard": False,
  }  # fmt: skip
  succeed(CONFIG, *(f"--config.{name}={value}" for name, value in options.items()), f"--workdir={tmp_path / 'run'}")
  printed = run(f"--run={tmp_path / 'run'}", f"--json={tmp_path / 'a.json'}")
  numbers = json.loads((tmp_path / "a.json").read_text())
  assert numbers["differing"] == 0 and {x["equal"] for x in numbers["lags"]} == {1} and len(numbers["lags"]) > 1, printed


def run(*flags: str, devices: int = 1) -> str:
  """Runs the command, which must find no difference, and returns what it prints."""
  args = [sys.executable, "-m", "experiments.mismatch", *flags]
  result = subprocess.run(args, cwd=ROOT, env=environment(devices), capture_output=True, text=True, timeout=300)
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout
