"""The message for a device that is out of memory."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import main
from jaxrl_llm.run.observe.phases import PHASES
from jaxrl_llm.run.setup import out_of_memory, start
from jaxrl_llm.run.steps import ahead, learn, sample
from tests.runs import flags, quick, tiny_config


def full(*args, **options):
  raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes.")


@pytest.fixture
def status_of(in_the_checkout, tmp_path, capsys):
  """Function that runs the command line and returns its status and its output on stderr."""

  def status_of(*args: str):
    with quick():
      status = main.main(["main", "--config=configs/gspo.py:tiny", f"--workdir={tmp_path / 'run'}", *args])
    return status, capsys.readouterr().err

  return status_of


@pytest.mark.slow
def test_a_full_device_is_one_message(status_of, monkeypatch):
  monkeypatch.setattr(start, "build_experiment", full)
  status, err = status_of()
  assert status == 1 and "Traceback" not in err, err
  assert err.startswith(
    "error: out of memory in the initialisation: RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes."
  )
  for part in ("estimated memory of each device, in MB:", "weights", "activations", "peak", "what would lower it most:\n"):
    assert part in err
  settings = [line for line in err.splitlines() if line.startswith("  --config.")]
  saved = [float(line.split(": saves ")[1].split(" of ")[0].replace(",", "")) for line in settings]
  assert len(settings) == out_of_memory.NUM_SETTINGS and saved == sorted(saved, reverse=True) and saved[-1] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("room", "function", "doing"),
  [
    (sample.held_out, "evaluate_policy", "the evaluation"),
    (ahead, "launch", "the sampler"),
    (learn, "with_logprobs", "the pass for log-probabilities"),
    (learn, "update", "the update"),
  ],
)
def test_the_message_names_the_phase_that_the_run_was_in(room, function, doing, status_of, monkeypatch):
  shown = {"warm_start.num_steps": 0, "num_steps": 1, "eval.num_prompts": 8, "eval.batch_prompts": 8, "log.tensorboard": False}
  monkeypatch.setattr(room, function, full)
  monkeypatch.setattr(out_of_memory, "advice", lambda config, vocab_size, program: [f"  about {program}"])
  status, err = status_of(*flags(shown))
  programs = {"the evaluation": "sampling", "the sampler": "sampling", "the pass for log-probabilities": "logprobs"}
  program = programs.get(doing, "update")
  assert status == 1 and f"error: out of memory in {doing}: RESOURCE_EXHAUSTED" in err and f"  about {program}\n" in err, err


@pytest.mark.exhaustive
def test_fewer_rows_at_a_time_are_advised():
  """Half of the rows is tried first, or fewer if that does not divide buckets that are given."""
  sizes = {"rollout.max_new_tokens": 64, "learner.row_tokens": 144, "warm_start.num_steps": 0, "warm_start.row_buckets": None}
  config_of = lambda **learner: tiny_config("gspo", sizes | {f"learner.{name}": value for name, value in learner.items()})

  def tried(*, open_rows=False, **learner):
    with quick():
      settings = list(out_of_memory._candidates(config_of(**learner), 264, open_rows=open_rows))
    return [value for field, value in settings if field == "learner.rows_per_device"]

  assert tried(row_buckets=(9, 18)) == [9, 3, 1] and tried(row_buckets=(9, 18), rows_per_device=9) == [3, 1]
  assert tried(row_buckets=(7, 18)) == [1] and tried(row_buckets=(7, 18), open_rows=True) == [9, 4, 2, 1]
  assert tried(row_buckets=(7, 18), rows_per_device=1) == tried(row_buckets=(7, 18), rows_per_device=1, open_rows=True) == []
  with quick():
    lines = out_of_memory.advice(config_of(row_buckets=(7, 18)), 264, program="update", open_rows=True)
  assert any(line.startswith("  --config.learner.rows_per_device=9: saves ") for line in lines), lines


def test_the_program_of_every_phase_is_in_the_estimate():
  programs = set()
  for num_sampling in (0, 1):
    with quick(2):
      programs |= set(out_of_memory.footprint(tiny_config("gspo", {"mesh.sampler": num_sampling}), vocab_size=264).programs)
  assert {phase.program for phase in PHASES.values()} == programs | {None}


@pytest.mark.slow
def test_a_device_that_is_really_full(monkeypatch, status_of):
  """XLA raises its own error for an array that fits no machine."""
  monkeypatch.setattr(start, "build_experiment", lambda config: jnp.zeros((2**45,), jnp.int8).block_until_ready())
  monkeypatch.setattr(out_of_memory, "advice", lambda config, vocab_size, program: ["  --config.seed=1"])
  status, err = status_of()
  assert status == 1 and "Traceback" not in err, err
  assert (
    "out of memory in the initialisation: RESOURCE_EXHAUSTED" in err
    and "what would lower it most:\n  --config.seed=1" in err
  )


def test_other_errors_of_the_runtime_pass_through():
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), out_of_memory.explained(tiny_config(), lambda: "update"):
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")
