"""The memory model against XLA's own analysis of the compiled programs."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl_llm.config import policy
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import memory, programs
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.models import ModelConfig, preset
from tests.marks import few
from tests.runs import tiny_config

TINY = preset("tiny", vocab_size=264)
MEDIUM = TINY._replace(num_layers=4, d_model=256, num_heads=8, num_kv_heads=4, d_ff=768, vocab_size=4096)

# Bounds on the estimate divided by the measurement.
LOW, HIGH = 0.75, 1.3


def mesh_of(**sizes: int) -> Mesh:
  shape = [sizes.get(axis, 1) for axis in mesh_lib.AXES]
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, mesh_lib.AXES, axis_types=(AxisType.Auto,) * len(shape))


def program_of(name: str, shape: ModelConfig, mesh: Mesh, overrides: dict | None = None):
  """Returns a traced program and the estimate."""
  sizes = {"learner.row_tokens": 256, "learner.row_buckets": (16,), "learner.updates_per_rollout": 1, "warm_start.row_buckets": (16,)}
  config = tiny_config("gspo", sizes | (overrides or {}))
  objective = policy.make_objective(config)
  needs = fields_needed(config, objective)
  made = getattr(programs.make_programs(config, mesh, shape, objective, needs=needs), name)
  return made.jitted.trace(*made.signatures[0]), memory.footprint(config, shape, mesh, mesh, objective, needs=needs)


CASES = {
  "tiny, everything kept": (TINY._replace(attention="xla"), {}, {}),
  "medium, on eight devices": (MEDIUM._replace(remat="full"), {"fsdp": 4, "tensor": 2}, {"learner.rows_per_device": 2}),
  "experts, on eight devices": (preset("tiny-moe", vocab_size=4096), {"expert": 4, "fsdp": 2}, {}),
}


@pytest.mark.parametrize("case", ["tiny, everything kept", *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])])
def test_an_update_needs_the_predicted_memory(case):
  shape, sizes, overrides = CASES[case]
  program, estimate = program_of("warm_step", shape, mesh_of(**sizes), overrides)
  measured = program.lower().compile().memory_analysis()
  # With experts over devices, a layer keeps its inputs alone for the backward pass. The estimate
  # traces one device, which keeps more.
  high = 1.6 if sizes.get("expert", 1) > 1 else HIGH
  assert LOW < sum(estimate.programs["update"].values()) / measured.temp_size_in_bytes < high
  assert sum(estimate.held.values()) == pytest.approx(measured.argument_size_in_bytes, rel=0.05)
  # The state is donated, so an update needs no second copy of weights and moments.
  assert measured.alias_size_in_bytes >= 0.99 * (estimate.held["weights"] + estimate.held["optimizer moments"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_tokens", few([None, 128], 0))
def test_the_exact_divergence_of_152k_ids_needs_no_more_memory_than_the_sampled_one(head_tokens):
  """Both runs hold the teacher, but only the exact form reads it in the update."""
  shape = preset("tiny", vocab_size=151_936)._replace(num_layers=2, d_model=64, head_tokens=head_tokens)
  sizes, peak = {"learner.row_tokens": 256, "learner.row_buckets": (4,), "rollout.num_prompts": 2}, {}
  for form, coefs in {"sampled": (1.0, 0.0), "exact": (0.0, 1.0)}.items():
    config = tiny_config("opd", sizes | dict(zip(("teacher.opd_coef", "teacher.gkd_coef"), coefs, strict=True)))
    objective, mesh = policy.make_objective(config), mesh_of()
    options = dict(needs=fields_needed(config, objective), teachers={"": shape})
    made = programs.make_programs(config, mesh, shape, objective, **options)
    measured = made.rl_step.jitted.trace(*made.rl_step.signatures[0]).lower().compile().memory_analysis()
    estimate = memory.footprint(config, shape, mesh, mesh, objective, **options)
    held = 0 if form == "exact" else estimate.held["teacher"]
    peak[form] = measured.argument_size_in_bytes + measured.temp_size_in_bytes + held
    assert LOW < sum(estimate.programs["update"].values()) / measured.temp_size_in_bytes < 1.7
  assert peak["exact"] < 1.2 * peak["sampled"]


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_device", [None, 4])
def test_log_probabilities_need_the_predicted_memory(rows_per_device):
  program, estimate = program_of("logprobs", MEDIUM, mesh_of(), {"learner.rows_per_device": rows_per_device})
  assert (
    LOW
    < sum(estimate.programs["logprobs"].values()) / program.lower().compile().memory_analysis().temp_size_in_bytes
    < HIGH
  )


def test_gradients_of_bfloat16_weights_accumulate_in_float32():
  shape = TINY._replace(param_dtype="bfloat16")
  program, estimate = program_of("warm_step", shape, mesh_of(), {"learner.rows_per_device": 4})
  over_micro_batches = [
    eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan" and eqn.params["length"] == 4
  ]
  # Only matrices count, not the logged values of each micro-batch.
  carried = [x.aval for eqn in over_micro_batches for x in eqn.outvars if x.aval.ndim >= 2]
  assert carried and {x.dtype.name for x in carried} == {"float32"}
  assert (shape.vocab_size, shape.d_model) in [x.shape for x in carried]
  assert estimate.programs["update"]["accumulated gradients"] > 1.9 * estimate.programs["update"]["gradients"]


def test_kept_bytes_are_those_of_the_policy():
  kept = {name: memory.kept(TINY._replace(remat=name, attention="xla"), 64)[0] for name in ("none", "dots", "full")}
  stream = 64 * TINY.d_model * 4
  # "full" keeps the input of each layer and the output of the last.
  assert kept["full"] == pytest.approx((TINY.num_layers + 1) * stream, rel=0.3)
  width = 2 * TINY.d_model + (TINY.num_heads + 2 * TINY.num_kv_heads) * TINY.head_dim + 3 * TINY.d_ff
  assert kept["full"] < kept["dots"] <= TINY.num_layers * 64 * 4 * width * 1.1
  assert kept["none"] > 2 * kept["dots"]


@pytest.mark.slow
def test_a_mesh_divides_the_memory_that_it_shards():
  config = tiny_config("ppo")
  whole, split = (
    memory.footprint(config, MEDIUM, mesh, mesh, policy.make_objective(config), needs=frozenset({"values"}))
    for mesh in (mesh_of(), mesh_of(fsdp=2, tensor=2, context=2))
  )
  for kind in ("weights", "optimizer moments", "critic and its moments"):
    assert split.held[kind] == pytest.approx(whole.held[kind] / 4, rel=0.01)
  assert split.programs["update"]["activations"] == pytest.approx(whole.programs["update"]["activations"] / 8, rel=0.5)


def test_a_sampler_with_its_own_devices_spreads_experts_and_in_the_loop_the_vocabulary():
  config, shape = tiny_config("gspo", {"model.preset": "nano-moe"}), preset("nano-moe", vocab_size=264)

  def of_sampler(**sizes: int) -> dict[str, float]:
    learner, sampler = mesh_lib.make_meshes(fsdp=4, sampler=4, **sizes)
    return memory.footprint(config, shape, learner, sampler, policy.make_objective(config), needs=frozenset()).of_sampler

  whole, spread = of_sampler(), of_sampler(sampler_expert=4)
  experts, vocabulary = shape.num_layers * 8 * 3 * shape.d_model * 32 * 4, 264 * shape.d_model * 4
  assert whole["weights"] == whole["weights laid out for decoding"]
  assert whole["weights"] - spread["weights"] == experts * 3 / 4
  assert spread["weights"] - spread["weights laid out for decoding"] == vocabulary * 3 / 4


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 4}], ids=["one device", "four devices"])
def test_slots_are_the_largest_number_that_fits(sizes):
  mesh = mesh_of(**sizes)
  shards = mesh_lib.num_row_shards(mesh)
  plan = {"rollout.num_prompts": 32, "rollout.group_size": 4, "rollout.max_new_tokens": 256, "eval.batch_prompts": 1, "eval.samples": 1}

  def estimate(slots=None):
    config = tiny_config("gspo", plan | {"rollout.slots": slots})
    return config, memory.footprint(config, TINY, mesh, mesh, policy.make_objective(config), needs=frozenset())

  def needed(slots: int) -> float:
    _, of_slots = estimate(slots)
    return sum((of_slots.held | of_slots.programs["sampling"]).values())

  config, any_number = estimate()
  fit = lambda limit: memory.slots_that_fit(config, TINY, mesh, any_number, limit=limit)
  assert fit(1e12) == 128
  assert fit(needed(32) / 0.9 + 1) == 32
  assert fit(needed(32) / 0.9 - 1) == 16
  assert fit(1.0) == shards


def test_an_open_policy_recomputes_the_least_that_fits():
  mesh, shape = mesh_of(), TINY._replace(attention="xla")
  objective = policy.make_objective(tiny_config("gspo"))
  peak_of = lambda remat: memory.footprint(tiny_config("gspo"), shape._replace(remat=remat), mesh, mesh, objective, needs=frozenset()).peak

  def chosen(limit: float | None) -> str:
    config = tiny_config("gspo", {"model.remat": "auto", "rollout.slots": 8})
    fitted = memory.fitted(config, shape, mesh, mesh, objective, limit=limit, needs=frozenset())
    assert fitted == shape._replace(remat=config.model.remat)
    return config.model.remat

  assert chosen(None) == chosen(1e12) == "none"
  for name in ("none", "dots"):
    assert chosen(peak_of(name) / 0.9 + 1) == name
    assert chosen(peak_of(name) / 0.9 - 1) != name
  assert chosen(peak_of("full") / 0.9 - 1) == "full"  # None fits.
