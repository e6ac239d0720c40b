"""The memory model against what XLA says of the programs that it compiles; and the message for a device that is full."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl_llm import main
from jaxrl_llm.config import policy
from jaxrl_llm.devices import compilation_cache, hosts
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import memory, programs
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.models import ModelConfig, preset
from jaxrl_llm.run import out_of_memory, start
from tests.runs import ROOT, quick, tiny_config

TINY = preset("tiny", vocab_size=264)
MEDIUM = TINY._replace(num_layers=4, d_model=256, num_heads=8, num_kv_heads=4, d_ff=768, vocab_size=4096)

# How far the model may be off, below and above.
LOW, HIGH = 0.75, 1.3


def mesh_of(**sizes: int) -> Mesh:
  shape = [sizes.get(axis, 1) for axis in mesh_lib.AXES]
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, mesh_lib.AXES, axis_types=(AxisType.Auto,) * len(shape))


def program_of(name: str, shape: ModelConfig, mesh: Mesh, overrides: dict | None = None):
  """A program before it is compiled, and the estimate."""
  sizes = {"learner.row_tokens": 256, "learner.row_buckets": (16,), "learner.updates_per_rollout": 1, "warm_start.row_buckets": (16,)}
  config = tiny_config("gspo", sizes | (overrides or {}))
  objective = policy.make_objective(config)
  needs = fields_needed(config, objective)
  made = getattr(programs.make_programs(config, mesh, shape, objective, needs=needs), name)
  return made.jitted.trace(*made.signatures[0]), memory.footprint(config, shape, mesh, mesh, objective, needs=needs)


CASES = {
  "tiny, everything kept": (TINY._replace(attention="xla"), {}, {}),
  "medium, on eight devices": (MEDIUM._replace(remat="full"), {"fsdp": 4, "tensor": 2}, {"learner.micro_batches": 2}),
  "experts, on eight devices": (preset("tiny-moe", vocab_size=4096), {"expert": 4, "fsdp": 2}, {}),
}


@pytest.mark.parametrize("case", ["tiny, everything kept", *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])])
def test_update_needs_what_is_predicted(case):
  shape, sizes, overrides = CASES[case]
  program, found = program_of("warm_step", shape, mesh_of(**sizes), overrides)
  measured = program.lower().compile().memory_analysis()
  assert LOW < sum(found.programs["update"].values()) / measured.temp_size_in_bytes < HIGH
  assert sum(found.held.values()) == pytest.approx(measured.argument_size_in_bytes, rel=0.05)
  # The state is donated: an update needs no second copy of weights and moments.
  assert measured.alias_size_in_bytes >= 0.99 * (found.held["weights"] + found.held["optimizer moments"])


def test_log_probabilities_need_what_is_predicted():
  program, found = program_of("logprobs", MEDIUM, mesh_of())
  assert LOW < sum(found.programs["logprobs"].values()) / program.lower().compile().memory_analysis().temp_size_in_bytes < HIGH


def test_gradients_of_bfloat16_weights_add_up_in_float32():
  shape = TINY._replace(param_dtype="bfloat16")
  program, found = program_of("warm_step", shape, mesh_of(), {"learner.micro_batches": 4})
  over_pieces = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan" and eqn.params["length"] == 4]
  carried = [x.aval for eqn in over_pieces for x in eqn.outvars if x.aval.ndim >= 2]  # Matrices, and not what is logged of each piece.
  assert carried and {x.dtype.name for x in carried} == {"float32"}
  assert (shape.vocab_size, shape.d_model) in [x.shape for x in carried]
  assert found.programs["update"]["accumulated gradients"] > 1.9 * found.programs["update"]["gradients"]


def test_kept_bytes_are_those_of_the_policy():
  kept = {name: memory.kept(TINY._replace(remat=name, attention="xla"), 64).of_row for name in ("none", "dots", "full")}
  stream = 64 * TINY.d_model * 4
  # "full" keeps what goes into each layer, and what leaves the last.
  assert kept["full"] == pytest.approx((TINY.num_layers + 1) * stream, rel=0.3)
  width = 2 * TINY.d_model + (TINY.num_heads + 2 * TINY.num_kv_heads) * TINY.head_dim + 3 * TINY.d_ff
  assert kept["full"] < kept["dots"] <= TINY.num_layers * 64 * 4 * width * 1.1
  assert kept["none"] > 2 * kept["dots"]


def test_a_mesh_divides_what_it_splits():
  config = tiny_config("ppo")
  whole, split = (
    memory.footprint(config, MEDIUM, mesh, mesh, policy.make_objective(config), needs=frozenset({"values"}))
    for mesh in (mesh_of(), mesh_of(fsdp=2, tensor=2, context=2))
  )
  for kind in ("weights", "optimizer moments", "critic and its moments"):
    assert split.held[kind] == pytest.approx(whole.held[kind] / 4, rel=0.01)
  assert split.programs["update"]["activations"] == pytest.approx(whole.programs["update"]["activations"] / 8, rel=0.5)


@pytest.fixture
def status_of(monkeypatch, tmp_path, capsys):
  """Runs the command line and gives its status and what it wrote to stderr."""
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(compilation_cache, "cache_compilations", lambda: None)
  monkeypatch.setattr(hosts, "start", lambda: None)  # Which comes before the devices are used, and here they are.

  def status_of(*args: str):
    with quick():
      status = main.main(["main", "--config=configs/gspo.py:tiny", f"--workdir={tmp_path / 'run'}", *args])
    return status, capsys.readouterr().err

  return status_of


def test_a_full_device_is_one_message(status_of, monkeypatch):
  def full(config):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes.")

  monkeypatch.setattr(start, "build", full)
  status, err = status_of()
  assert status == 1 and "Traceback" not in err, err
  assert err.startswith("error: out of memory in making the first state: RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes.")
  for part in ("estimated memory of each device, in MB:", "weights", "activations", "peak", "what would lower it most:\n"):
    assert part in err
  settings = [line for line in err.splitlines() if line.startswith("  --config.")]
  saved = [float(line.split(": ")[1].split(" MB less of ")[0].replace(",", "")) for line in settings]
  assert len(settings) == out_of_memory.NUM_SETTINGS and saved == sorted(saved, reverse=True) and saved[-1] > 0


def test_every_place_that_a_message_names_is_there():
  functions = {name for file in out_of_memory.FILES for name in vars(importlib.import_module("jaxrl_llm." + file[:-3].replace("/", ".")))}
  assert set(out_of_memory.PROGRAMS) <= functions


def test_a_really_full_device(monkeypatch, status_of):
  """XLA's own error, for an array that no machine has room for."""
  monkeypatch.setattr(start, "build", lambda config: jnp.zeros((2**45,), jnp.int8).block_until_ready())
  monkeypatch.setattr(out_of_memory, "advice", lambda config, vocab_size, program: ["  --config.seed=1"])
  status, err = status_of()
  assert status == 1 and "Traceback" not in err, err
  assert "out of memory in making the first state: RESOURCE_EXHAUSTED" in err and "what would lower it most:\n  --config.seed=1" in err


def test_other_errors_of_the_runtime_go_on():
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), out_of_memory.explained(tiny_config()):
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")
