"""Compilation for remote TPUs: refusals, counts and, if libtpu is installed, small real cases."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import common, gspo
from experiments import compile_for_pod
from experiments.benchmarks.roofline import datasheet
from experiments.pod import compiled as compiled_lib
from experiments.pod import costs, engine_proof, hlo, proof, sweep, topology
from experiments.pod.operations import Operations
from jaxrl_llm.config import check, sizes
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import Lora, make_model, preset
from tests.marks import few
from tests.runs import ROOT

CONFIG = "--config=configs/gspo.py:qwen3-0.6b"
APART = f"--config=configs/gspo.py:{gspo.APART}"

LOOPS = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
%all-reduce-scatter.1 (input: f32[8,4]) -> f32[2,4] {
  %r = f32[8,4]{1,0} all-reduce(%input), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
}
%inner (p: (s32[])) -> (s32[]) {
  %g = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%x), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %k = f32[2] custom-call(%x), custom_call_config="{
}}"
  %f = f32[2,4]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
}
%inner_condition (p: (s32[])) -> pred[] {
  %c = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}
%outer (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%t), condition=%inner_condition, body=%inner
}
%outer_condition (p: (s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
ENTRY %main (a: f32[4]) -> f32[8] {
  %w = (s32[]) while(%t), condition=%outer_condition, body=%outer
  %p = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0},{2,2}}
  %s = (f32[4]{0}, u32[], token[]) send(%a), channel_id=2, frontend_attributes={TO_HOST}
  %m = f32[4]{0} all-reduce(%a), replica_groups=mesh['x'=4,'y'=2] {'y'}, to_apply=%add
}
""".replace("TO_HOST", '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"')


@pytest.mark.parametrize("counter", ["s32", "u32"])
def test_collectives_count_as_often_as_their_loops_iterate(counter):
  """XLA's own loops, over the parts of a gathered operand, have unsigned counters."""
  text = LOOPS.replace("s32[]{:T(128)} constant(6)", f"{counter}[]{{:T(128)}} constant(6)")
  collectives = hlo.collectives(text, num_devices=8, unknown_trips=5)
  assert [(x.kind, x.num_bytes, x.times) for x in collectives] == [
    ("all-gather", 16, 30),
    ("reduce-scatter", 128, 30),
    ("collective-permute", 32, 1),
    ("all-reduce", 16, 1),
    ("all-reduce", 16, 1),
  ]
  assert collectives[0].groups == ((0, 1), (2, 3), (4, 5), (6, 7)) == collectives[4].groups
  assert collectives[3].groups == ((0, 4), (1, 5), (2, 6), (3, 7))  # Between two slices of four.
  assert collectives[1].groups == ((0, 2, 4, 6), (1, 3, 5, 7))
  shape = {"fsdp": 4, "tensor": 2}
  assert [hlo.axes_of(x.groups, shape) for x in collectives] == ["tensor", "fsdp", "tensor", "fsdp", "tensor"]


def test_an_unrolled_loop_iterates_less_often():
  """As XLA writes a product whose gathered operand arrives in parts: two parts per iteration."""
  condition = [
    "%c = u32[]{:T(128)} constant(8)",
    "%g = u32[] get-tuple-element(%p), index=1",
    "ROOT %l = pred[] compare(%g, %c), direction=LT",
  ]
  body = [
    "%two = u32[]{:T(128)} constant(2)",
    "%g.1 = u32[]{:T(128)} get-tuple-element(%q), index=1",
    "%a = u32[]{:T(128)} add(%g.1, %two)",
    "ROOT %t = (f32[4]{0:T(8,128)}, u32[]{:T(128)}) tuple(%x, %a)",
  ]
  line = "%w = (f32[4], u32[]) while(%t), condition=%condition, body=%body"
  assert hlo.trips(line, {"condition": condition, "body": body}, unknown=9) == 4
  assert hlo.trips(line, {"condition": condition, "body": [x.replace("constant(2)", "constant(3)") for x in body]}, unknown=9) == 3
  assert hlo.trips(line, {"condition": condition, "body": []}, unknown=9) == 8


def test_copies_are_counted_by_the_loops_around_them():
  copied = LOOPS.replace("%outer (p", "%called (p: s32[]) -> s32[] {\n  %c = s32[8]{0} copy(%p)\n}\n%outer (p")
  copied = copied.replace("body=%inner\n", "body=%inner\n  %f = s32[] async-start(%p), calls=%called\n")
  copied = copied.replace("  %k = f32", "  %t = s32[8]{0:T(8)} transpose(%x)\n  %k = f32")
  copied = copied.replace("  %p = f32[8]", "  %c = s32[8] copy(%a)\n  %p = f32[8]")
  # The inner loop's number of iterations is known, so that it belongs to the outer one.
  assert hlo.copies_by_depth(copied, ["s32[8]"]) == {0: 1, 1: 7} and hlo.copies_by_depth(copied, ["s32[9]"]) == {}


@pytest.mark.parametrize("call", ["call(%p), to_apply=%called", 'custom-call(%p), custom_call_target="X", called_computations={%called}'])
def test_a_collective_on_another_thread_of_the_chip_counts(call):
  """As libtpu 0.0.50 and 0.0.51 write a gather by a sparse core of tpu7x."""
  text = """
%called (p: f32[4]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}
%async (p: f32[4]) -> f32[8] {
  ROOT %c = f32[8]{0} THE_CALL
}, execution_thread="sparsecore"
ENTRY %main (a: f32[4]) -> f32[8] {
  %s = ((f32[4]{0}), f32[8]{0}, u32[]{:S(8)}) async-start(%a), async_execution_thread="sparsecore", calls=%async
}
"""
  collectives = hlo.collectives(text.replace("THE_CALL", call), num_devices=2)
  assert collectives == [hlo.Collective("all-gather", 32, ((0, 1),), 1)]


def test_the_largest_collective_of_loops_is_in_a_loop_of_unknown_length():
  large = LOOPS.replace("%m = f32[4]{0} all-reduce", "%m = f32[400]{0} all-reduce")
  assert hlo.largest_in_loops(large, num_devices=8) == 128
  known = large.replace("ROOT %lt = pred[] compare(%i, %n)", "%n = s32[] constant(5)\n  ROOT %lt = pred[] compare(%i, %n)")
  assert hlo.largest_in_loops(known, num_devices=8) == 0


GATHER = "f32[8]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}"
CHAINED = f"""
%start (p: f32[4]) -> f32[8] {{
  %g.1 = {GATHER}, channel_id=7, frontend_attributes={{chain_id="0"}}
}}
%beside (p: f32[4]) -> f32[8] {{
  %g.2 = {GATHER}, channel_id=7, frontend_attributes={{chain_id="0"}}
}}
%other (p: f32[4]) -> f32[8] {{
  %g.3 = {GATHER}, channel_id=8, frontend_attributes={{chain_id="0"}}
}}
%same_channel (p: f32[4]) -> f32[8] {{
  %g.4 = {GATHER}, channel_id=7, frontend_attributes={{chain_id="1"}}
}}
%body (p: f32[8]) -> f32[8] {{
  %d = f32[8]{{0}} fusion(%p), kind=kCustom, calls=%beside
}}
ENTRY %main (a: f32[4]) -> f32[8] {{
  %s = f32[8]{{0}} fusion(%a), kind=kCustom, calls=%start
  %b = f32[8]{{0}} fusion(%s), kind=kCustom, calls=%beside
  %w = f32[8]{{0}} while(%b), body=%body, backend_config={{"known_trip_count":{{"n":"8"}}}}
  %o = f32[8]{{0}} fusion(%w), kind=kCustom, calls=%other
  %c = f32[8]{{0}} fusion(%o), kind=kCustom, calls=%same_channel
}}
"""


def test_an_overlapping_collective_counts_once():
  assert hlo.collectives(CHAINED, num_devices=2) == [hlo.Collective("all-gather", 32, ((0, 1),), 1)] * 3


BUFFERS = """
allocation 0: size 40, parameter 0, shape |f32[10]| at ShapeIndex {}, maybe-live-out:
 value: <1 param @0> (size=40,offset=0): f32[10]
allocation 1: size 8, parameter 1, shape |f32[2]| at ShapeIndex {}:
allocation 2: size 16, maybe-live-out:
allocation 3: size 64, color 5, parameter 2, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
allocation 4: size 36, preallocated-temp:
allocation 5: size 5, color 1, preallocated-temp:
"""
USAGE = """Memory Space: default (color=0)
Total bytes: 100 (100B)
Memory Space: vmem (color=1)
Total bytes: 5 (5B)
"""


# As libtpu 0.0.50 writes them.
PAGED = """
allocation 0: size 40, page 0, parameter 0, shape |f32[10]| at ShapeIndex {}, maybe-live-out:
 value: <1 param @0> (size=40,offset=0): f32[10]
allocation 1: size 8, page 0, parameter 1, shape |f32[2]| at ShapeIndex {}:
allocation 2: size 16, page 0, maybe-live-out:
allocation 3: size 64, color 5, page 0, parameter 2, shape |f32[16]|, maybe-live-out:
allocation 4: size 36, page 0, preallocated-temp:
allocation 5: size 5, color 1, page 0, preallocated-temp:
"""


@pytest.mark.parametrize("buffers", [BUFFERS, PAGED], ids=["plain", "with pages"])
def test_a_plan_counts_the_memory_of_the_chip_and_nothing_else(buffers):
  sizes = compiled_lib.memory(compiled_lib.Reports(USAGE, buffers, ""))
  assert sizes == {"arguments": 48.0, "outputs": 56.0, "aliased": 40.0, "temporaries": 36.0}


def test_copies_of_a_cache_are_read_and_written():
  """XLA transposes the keys before a scatter and after it, then without the axis of size 1."""
  lines = ("%a = bf16[8,1,4,16]{2,3,0,1} copy(%k)", "%b = bf16[8,4,16]{2,1,0} copy(%s)", "%c = bf16[8,1,16,4]{3,2,1,0} fusion(%v)")
  placed = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  cache = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=placed) for shape in ((8, 1, 4, 16), (8, 1, 16, 4), (8, 1, 4, 16))]
  assert engine_proof.copied_bytes("\n".join(lines), cache) == 2 * 2 * 8 * 4 * 16 * 2
  assert engine_proof.copied_bytes(lines[2], cache) == 0


def test_devices_of_one_chip_need_no_wire():
  coords, gather = np.array([[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]]), hlo.Collective("all-gather", 400, ((0, 1),), 1)
  args = dict(shape=(2, 2, 1), wire=10.0, network=1.0)
  assert hlo.seconds(gather, coords, np.zeros(4, int), **args) == 0.0
  assert hlo.seconds(gather._replace(groups=((0, 2),)), coords, np.zeros(4, int), **args) == pytest.approx(20)


def test_a_step_has_a_bound_by_its_bytes_and_latencies_of_its_collectives():
  few = compiled_lib.Traffic(1e-3, 1e6, 15.0)
  chip = topology.Topology("v5p:2x2x1", 1, datasheet("TPU v5"), (2, 2, 1), ())
  kinds = {("all-reduce", "fsdp"): few, ("all-gather", "fsdp"): few.scaled(2)}
  operations = Operations(1e9, 26e9, {}, ())
  program = compiled_lib.Compiled(0, 0, 0, 0, 0, 0.0, kinds, operations=operations)
  step = proof.Proof("decode", program, {}, 0.0, costs.Work(1e9, 1e9, 10e9))
  assert step.num_collectives == 45 and step.excess_bytes == 2.6 > proof.MOST_BYTES
  assert step.compiled_seconds(chip) == pytest.approx(26e9 / chip.chip.bytes_per_s) == pytest.approx(2.6 * max(step.seconds(chip).values()))
  np.testing.assert_allclose(step.latencies(), 45 * np.array(costs.COLLECTIVE_S))


def test_a_ring_has_two_wires_and_the_network_is_slow():
  coords, slices = np.array([[i % 4, i // 4, 0] for i in range(8)]), np.array([0] * 4 + [1] * 4)
  gather = hlo.Collective("all-gather", 400, ((0, 1, 2, 3),), 1)
  common_args = dict(shape=(4, 2), wire=10.0, network=1.0)
  ring = hlo.seconds(gather, coords, np.zeros(8, int), **common_args)
  assert ring == pytest.approx(300 / 20)  # 3/4 of the array arrives, over two wires.
  line = hlo.seconds(gather._replace(groups=((0, 1),)), coords, np.zeros(8, int), **common_args)
  assert line == pytest.approx(200 / 10)
  assert hlo.seconds(gather._replace(kind="all-reduce"), coords, np.zeros(8, int), **common_args) == pytest.approx(2 * ring)
  across = hlo.seconds(gather._replace(groups=((0, 4),)), coords, slices, **common_args)
  assert across > 10 * line


def test_layer_weights_are_those_of_the_model():
  for name in ("qwen3-0.6b", "qwen3-30b-a3b"):
    shape = preset(name)
    _, every = costs.layer_weights(shape)
    embeddings = shape.vocab_size * shape.d_model * (1 if shape.tie_embeddings else 2)
    assert shape.num_layers * every + embeddings == pytest.approx(make_model(shape).num_params, rel=1e-3)
  met, _ = costs.layer_weights(preset("qwen3-30b-a3b"))
  assert 48 * met + 2 * 151936 * 2048 == pytest.approx(3.3e9, rel=0.02)  # The "A3B" of its name.


def test_an_update_is_three_passes_and_a_fourth_with_recomputation():
  config = gspo.get_config("qwen2.5-32b")
  mesh = mesh_lib.make_mesh(data=-1)
  shape = preset("qwen2.5-32b")
  forward = costs.rows_pass(config, shape, mesh, rows=8, backward=False)
  kept, again = (costs.rows_pass(config, shape._replace(remat=remat), mesh, rows=8, backward=True) for remat in ("none", "full"))
  assert kept.model_flops == again.model_flops == 3 * forward.flops
  assert 3 < kept.flops / forward.flops < 3.2 and 4 < again.flops / forward.flops < 4.2
  tokens = 8 * config.learner.row_tokens / mesh.size
  assert forward.flops > 2 * 32e9 * tokens
  # Blocks on the diagonal are computed whole, in two products forward and five backward.
  assert 0 < forward.repeated_flops < 0.02 * forward.flops
  attention = costs.rows_pass(config, shape._replace(remat="attention"), mesh, rows=8, backward=True)
  repeated = [x.repeated_flops / forward.repeated_flops for x in (kept, attention, again)]
  np.testing.assert_allclose(repeated, [3.5, 3.5, 4.5])
  assert kept.flops < attention.flops < again.flops
  # Frozen weights have no gradient. For Qwen3-8B with adapters on v6e:2x4, libtpu 0.0.42.1 compiled
  # 3,130 TFLOP a chip, where this formula counts 3,322, and 4,314 if all weights were trained.
  frozen = costs.rows_pass(config, shape._replace(lora=Lora(32, 64.0)), mesh, rows=8, backward=True)
  assert 2 * forward.flops < frozen.model_flops < 2.2 * forward.flops


def test_a_sweep_tries_meshes_that_fit_the_chips():
  shape = preset("qwen3-30b-a3b")
  meshes = list(sweep.shapes(shape, 64))
  assert {"fsdp": 16, "expert": 4, "context": 1, "tensor": 1} in meshes
  assert all(x["fsdp"] * x["expert"] * x["context"] * x["tensor"] == 64 for x in meshes)
  assert max(x["tensor"] for x in meshes) == shape.num_kv_heads


def test_a_sweep_plans_fast_settings_and_small_ones():
  config, chip = gspo.get_config("qwen3-0.6b"), datasheet("TPU v5 lite")
  shown = topology.Topology("v5e:2x2", 1, chip, (2, 2), ())
  parts = {"quick": (0.9, 1.0), "slow": (0.8, 5.0), "slower": (0.5, 9.0), "close": (1.2, 0.5), "far": (2.0, 0.1), "quicker": (1.0, 0.9)}
  settings = {name: sweep.Candidate(config, part * chip.memory_bytes, seconds) for name, (part, seconds) in parts.items()}
  chosen = sweep.best_of(iter(settings.values()), shown)
  assert [next(name for name, x in settings.items() if x is each) for each in chosen] == ["quicker", "quick", "slower", "slow"]
  tied = [sweep.Candidate(config, 0.5 * chip.memory_bytes, 1.0, in_turn) for in_turn in (3.0, 2.0)]
  assert sweep.best_of(iter(tied), shown)[0] is tied[1]
  # The compiler cannot compress it far enough.
  assert sweep.best_of(iter([settings["far"]]), shown) == []


def test_a_sweep_of_a_generation_begins_with_its_smallest_slice():
  _, flags = compile_for_pod.parse([CONFIG, "--topology=V6E", "--sweep", "--config.mesh.fsdp=4", "--config.model.remat=full"])
  assert flags["topology"] == "v6e" and flags["of_sweep"] == [CONFIG, "--config.model.remat=full"]
  assert topology.slices_of("v6e")[0] == "v6e:2x2" and topology.slices_of("v6e")[-1] == "v6e:16x16"
  with pytest.raises(ValueError, match="no slice 'v6e'"):
    compile_for_pod.parse([CONFIG, "--topology=v6e"])


@pytest.mark.parametrize("name", common.PUBLISHED)
def test_published_models_are_legal(name):
  config = gspo.get_config(name)
  assert check.config_problems(config) == []
  assert config.rollout.max_new_tokens == 16384 and config.model.dtype == "bfloat16" and "clip_low" not in config.objective


def test_a_published_model_with_samplers_apart_is_legal():
  config = gspo.get_config(gspo.APART)
  assert check.config_problems(config) == [] and config.rollout.samplers == 1 and "clip_low" not in config.objective
  together = gspo.get_config("qwen3-30b-a3b")
  assert config.mesh.fsdp == together.mesh.fsdp and config.learner.row_tokens == together.learner.row_tokens


@pytest.mark.parametrize(
  ("shards", "buckets"),
  [
    (16, (64, 128, 192, 256, 384, 512)),
    (64, (64, 128, 192, 256, 384, 512)),
    (96, (96, 192, 288, 384, 576)),
    (128, (128, 256, 384, 512)),
    (256, (256, 512)),
  ],
)
def test_a_pods_buckets_of_rows_suit_its_mesh(shards, buckets):
  config = gspo.get_config("qwen3-30b-a3b")
  chosen = sizes.choose_sizes(config, sizes.Lengths(()), sizes.Bounds(shards, 1, 2048, 128, 40960))
  assert chosen.learner.row_buckets == buckets and chosen.learner.rows_per_device == 1
  of_rows = [line for line in check.row_problems(chosen, shards, shards) if "learner." in line]
  assert of_rows == list(check.size_problems(chosen)) == []


@pytest.mark.parametrize(
  ("topology_name", "message"),
  [
    (
      "v5p:4x4x5",
      "--topology: found no slice 'v5p:4x4x5', expected one such as v5p:4x4x4, v5p:2x2x1 to v5p:16x16x16; "
      "did you mean v5p:4x4x4?",
    ),
    (
      "v5x:4x4",
      "--topology: found no slice 'v5x:4x4', expected a generation and a size, such as v5e:4x4, v5p:4x4x4, v6e:8x16 or "
      "tpu7x:4x4x4, or GPUs, such as h200:8; did you mean",
    ),
    ("v5e", "--topology: found no slice 'v5e', expected one such as v5e:4x4, v5e:2x2 to v5e:16x16"),
    (
      "v6e:3x3",
      "--topology: found no slice 'v6e:3x3', expected one such as v6e:4x4, v6e:2x2 to v6e:16x16; did you mean v6e:2x4?",
    ),
  ],
)
def test_an_unknown_topology_is_one_line(topology_name, message, capsys):
  assert compile_for_pod.main([CONFIG, f"--topology={topology_name}"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--topology=v5e:4x4"], "error: --config is missing"),
    ([CONFIG], "error: --topology is missing"),
    ([CONFIG, "--topology=v5e:4x4", "--slices=0"], "error: --slices: found '0', expected 1 or more"),
    ([CONFIG, "--topology=v5e:4x4", "--programs=updat"], "error: --programs: found 'updat', expected some of update,score,tower,prefill"),
    ([CONFIG, "--topology=v5e:4x4", "--programs=tower"], "error: --programs: found tower, expected others: no pass of a frozen tower"),
    ([CONFIG, "--topologie=v5e:4x4"], "error: unknown argument '--topologie=v5e:4x4', expected --config, --config.FIELD or --topology"),
    ([CONFIG, "--topology=v5e:4x4", "--config.mesh.fdsp=4"], "error: unknown field config.mesh.fdsp; did you mean config.mesh.fsdp?"),
    ([CONFIG, "--topology=v5e:4x4", "--lengths=2k"], "error: --lengths: found '2k', expected mean lengths separated by commas"),
    ([CONFIG, "--topology=v5e:4x4", "--lengths=9", "--programs=update"], "error: --lengths: found without the program decode"),
    ([CONFIG, "--topology=v5e:4x4", "--prompt_tokens=9"], "error: --prompt_tokens: found '9', expected a number of tokens, together with"),
    ([CONFIG, "--topology=v5e:4x4", "--lengths=9", "--prompt_tokens=4096"], "error: --prompt_tokens: found 4096, expected at most 2048"),
    (["--config=configs/sapo.py:qwen3-vl-30b-a3b", "--topology=v5p:4x4x4", "--config.model.image_tokens=None"],
     "error: config.model.image_tokens: found None, expected a size, because no data is read here"),
    ([APART, "--topology=v5p:4x4x4"], "error: --sampler: found none, expected the slice of the samplers, as in v5p:4x4x4, because"),
    ([CONFIG, "--topology=v5p:4x4x4", "--sampler=v5p:2x2x1"], "error: --sampler: found v5p:2x2x1, expected none, because config.rollout"),
    ([APART, "--topology=v5p:4x4x4", "--sampler=v5p:4x4"], "error: --sampler: found no slice 'v5p:4x4', expected one such as v5p:4x4x4"),
    ([APART, "--topology=v5p:4x4x4", "--sampler=v5p:4x4x4", "--sweep"], "error: --sweep: found it together with --sampler, expected none"),
    ([CONFIG, "--topology=v5p:4x4x4", "--programs=drain"], "error: --programs: found 'drain', expected some of update,score,tower"),
    ([CONFIG, "--topology=v5p:4x4x4", "--programs=take"], "error: --programs: found 'take', expected some of update,score,tower"),
    ([CONFIG, "--topology=h200:12"], "error: found 'h200:12', expected 1 to 8 GPUs, or a multiple of 8, as in h200:16"),
    ([CONFIG, "--topology=h200:8", "--sweep"], "error: --sweep: found 'true' with GPUs, expected none: it is about slices of TPUs"),
    ([CONFIG, "--topology=v5e:4x4", "--config.learner.row_tokens=None"], "error: config.learner.row_tokens: found None, expected a size"),
  ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
  assert compile_for_pod.main(arguments) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(message)


def test_the_error_without_libtpu_says_how_to_install_it(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="compile_for_pod needs the package libtpu, .* pip install libtpu"):
    topology.prepare()


def test_chips_have_memory_and_wires():
  for name, *_ in topology.GENERATIONS.values():
    chip = datasheet(name)
    assert chip.memory_bytes > 2**33 and chip.wire_bytes_per_s > chip.network_bytes_per_s
  assert datasheet("NVIDIA H100 80GB HBM3").memory_bytes is None


HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
SMALL = (
  "model.preset=nano",
  "rollout.max_new_tokens=64",
  "rollout.prompt_buckets=(64,)",
  "rollout.slots=16",
  "rollout.num_prompts=16",
  "rollout.group_size=4",
  "eval.batch_prompts=16",
  "learner.row_tokens=128",
  "learner.row_buckets=(16,)",
)

needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="the package libtpu is not installed")


def environment():
  """Returns the environment without the simulated devices of this process."""
  return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def compiled(folder, *arguments):
  """Runs the command line for the small model, and returns the numbers and the output.

  It needs a process of its own, because this process's JAX has simulated devices.
  """
  overrides = [f"--config.{setting}" for setting in SMALL]
  command = [sys.executable, "-m", "experiments.compile_for_pod", CONFIG, f"--json={folder / 'out.json'}", *overrides, *arguments]
  result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  return json.loads((folder / "out.json").read_text()), result.stdout


@needs_libtpu
@pytest.mark.exhaustive
def test_a_small_update_compiles_for_remote_chips(tmp_path):
  numbers, output = compiled(tmp_path, "--topology=v5e:2x2", "--programs=update")
  assert "nano fits 4 chips of TPU v5 lite" in output
  assert numbers["chips"] == 4 and numbers["mesh"]["fsdp"] == 4
  params, update = make_model(preset("nano", vocab_size=264)).num_params * 4, numbers["update"]
  assert update["fits"] and update["temporaries"] > 0 and update["code"] > 0 and 0 < update["mfu_ceiling"] <= 1
  # A quarter of the weights and of both moments, except for norms and padding. The state is updated
  # in place.
  assert params / 4 < update["parts"]["weights"] < params / 3 and update["parts"]["moments"] < 2.1 * update["parts"]["weights"]
  assert update["aliased"] >= update["parts"]["weights"] + update["parts"]["moments"]
  assert any(name.endswith("over fsdp") for name in update["collectives"])
  # Plain attention does not compute scores twice.
  assert 0.75 < update["excess"] <= 1.1 and update["operations"]["flops"] > 0 and update["operations"]["unknown"] == []
  assert update["operations"]["num_bytes"] > 0


@needs_libtpu
@pytest.mark.exhaustive
def test_an_rl_step_has_the_updates_that_its_lengths_need(tmp_path):
  """Short responses fill fewer rows, and their updates take a part of the largest one's time."""
  overrides = ("learner.row_buckets=(4,8)", "learner.share_prompts=False")
  arguments = [f"--config.{setting}" for setting in overrides]
  programs = "--programs=update,decode"
  numbers, output = compiled(tmp_path, "--topology=v5e:2x2", programs, "--only_plan", "--lengths=2,6000", "--prompt_tokens=20", *arguments)
  short, long = numbers["rl_steps"]
  assert set(short["buckets"]) == {4} and set(long["buckets"]) == {16}
  assert all(rows <= bucket for each in (short, long) for rows, bucket in zip(each["rows"], each["buckets"], strict=True))
  whole = 4 * max(numbers["update"]["bounds"].values())
  assert long["parts"]["updates"] == pytest.approx(whole) and 0.25 * whole <= short["parts"]["updates"] < 0.8 * whole
  assert numbers["rows_per_device"] == 1 and numbers["row_buckets"] == [16, 4, 8] and "16 rows of 128 tokens" in output


@pytest.mark.slow
@needs_libtpu
def test_a_sampler_is_planned_for_remote_chips(tmp_path):
  numbers, output = compiled(tmp_path, "--topology=v5e:2x2", "--programs=prefill,decode", "--only_plan", "--config.mesh.tensor=2")
  prefill, decode = numbers["prefill"], numbers["decode"]
  assert prefill["fits"] and decode["fits"] and prefill["code"] == decode["code"] == 0
  # A decoding step takes what prefill returns and updates it in place, except for the weights and
  # the prompts.
  assert prefill["outputs"] == pytest.approx(decode["arguments"], rel=0.01)
  assert decode["aliased"] == pytest.approx(decode["outputs"], rel=0.01) and decode["outputs"] >= decode["parts"]["cache"] > 0
  assert all(seconds > 0 for each in (prefill, decode) for seconds in each["bounds"].values()) and prefill["collectives"]
  assert decode["num_collectives"] > 5 and "ms of a decoding step" in output
  assert decode["compiled_bound"] >= max(decode["bounds"].values())
  assert "decode: of the arguments, in GiB: weights" in output and "before it generated machine code" in output


LIMITED = """
import os, sys
from experiments import compile_for_pod
from experiments.pod import proof
proof.MOST_OPERATIONS = 0.5
code = compile_for_pod.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""


@pytest.mark.slow
@needs_libtpu
def test_a_program_of_more_operations_than_it_needs_is_refused():
  command = [sys.executable, "-c", LIMITED, CONFIG, "--topology=v5e:2x2", "--programs=score", "--only_plan"]
  command += [f"--config.{setting}" for setting in SMALL]
  result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == compile_for_pod.DOES_NOT_FIT, result.stderr[-2000:]
  assert re.search(r"score: compiled to (0\.9|1\.0)\d times the operations that it needs, expected at most 0.5", result.stdout)


@pytest.mark.exhaustive
@needs_libtpu
def test_an_update_of_experts_is_compiled_to_the_operations_that_it_needs(tmp_path):
  """A dense gradient of the experts' weights makes it 8 times as many."""
  command = [sys.executable, "-m", "experiments.compile_for_pod", "--config=configs/gspo.py:qwen3-30b-a3b", "--topology=v5p:4x4x4"]
  command += ["--programs=update", "--only_plan", f"--json={tmp_path}/numbers"]
  result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  update = json.loads((tmp_path / "numbers").read_text())["update"]
  assert 0.95 < update["excess"] <= 1.05 and update["operations"]["unknown"] == []
  by_kind = update["operations"]["by_kind"]
  # Three products forward, two again and three for the rows; three for the matrices.
  assert by_kind["tgmm"] == pytest.approx(by_kind["ragged-dot"] * 3 / 8)
  assert by_kind["token_sums"] < 0.01 * update["operations"]["flops"] and update["arguments"] > 6 * 2**30


@pytest.mark.exhaustive
@needs_libtpu
def test_a_sampler_with_its_own_chips_spreads_its_experts(tmp_path):
  of_mesh = ("mesh.sampler=4", "mesh.sampler_expert=2", "mesh.sampler_tensor=2")
  arguments = [f"--config.{setting}" for setting in ("model.preset=nano-moe", *of_mesh)]
  numbers, _ = compiled(tmp_path, "--topology=v5e:2x4", "--programs=prefill,decode", "--only_plan", *arguments)
  prefill, decode = numbers["prefill"], numbers["decode"]
  assert prefill["fits"] and decode["fits"] and decode["collectives"]
  # A chip holds half of the hidden layer of half of the experts, and decodes with less of the
  # vocabulary.
  experts = 2 * 3 * 8 * 32 * 32 * 4
  assert decode["parts"]["weights"] < prefill["parts"]["weights"] < experts


@pytest.mark.exhaustive
@needs_libtpu
def test_a_sampler_apart_is_planned_beside_its_learner(tmp_path):
  settings = ("rollout.samplers=1", "mesh.sampler_tensor=2", "learner.old_logprobs=sampler")
  arguments = ("--sampler=v5e:2x4", "--only_plan", "--programs=snapshot,take,prefill,decode", *(f"--config.{x}" for x in settings))
  numbers, output = compiled(tmp_path, "--topology=v5e:2x2", *arguments)
  sampler, num_bytes = numbers["sampler"], numbers["weight_bytes"]
  assert "2 engine(s) on v5e:2x4, of 4 chips, 1 host(s) and 16 rows each; 1 host(s) of the learner\n" in output
  num_params = make_model(preset("nano", vocab_size=264)).num_params
  assert 2 * num_params < num_bytes < 2.02 * num_params  # All in bfloat16 but for norms.
  take, decode = sampler["take"], sampler["decode"]
  assert take["fits"] and sampler["prefill"]["fits"] and decode["fits"] and numbers["snapshot"]["fits"]
  # Half of the heads and of the hidden layer, and norms.
  assert num_bytes / 2 < take["parts"]["weights"] < 0.75 * num_bytes
  # An engine draws with a copy of its own while two others are on the chips.
  assert take["beside"] == take["parts"]["weights"] + decode["parts"]["cache"]
  assert decode["beside"] == pytest.approx(2 * decode["parts"]["weights"], rel=0.01) and "all-reduce over tensor" in decode["collectives"]
  # Every row has a cache, and it is updated in place.
  assert decode["aliased"] >= decode["parts"]["cache"] and decode["bounds"]["memory"] > 0
  today = numbers["weight_moves"][0]
  assert today["limits"] == "hosts" and today["seconds"] == today["receive"] > num_bytes / 1e9


STRETCH = """
import os, sys
from experiments.pod import topology
topology.prepare()
import jax
from experiments.pod import engine_proof, hlo
from experiments.pod.compiled import compile_for
from jaxrl_llm.decoding.engine.programs import uncompiled_programs
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import Experts, make_model, preset
from jaxrl_llm.models.decoding import serving_of
sizes = dict(num_layers=1, d_model=384, num_heads=8, num_kv_heads=2, head_dim=128)
dtypes = dict.fromkeys(("dtype", "param_dtype"), "bfloat16")
shape = preset("nano-moe", vocab_size=264)._replace(**sizes, **dtypes, experts=Experts(8, 2, 256))
chips = topology.describe("v5e:2x4")
mesh = mesh_lib.make_mesh(data=1, expert=8, devices=chips.devices)
model = make_model(shape, mesh=mesh, serving=serving_of(shape, mesh, layout=None))
params = jax.eval_shape(model.init, jax.random.key(0))
fields = mesh_lib.SAMPLER_FIELDS
shardings = mesh_lib.param_shardings(mesh, model.logical_axes, params, fields=fields)
placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
params = jax.tree.map(placed, params, shardings)
sizes = dict(slots=16, context=1000, chunk=16, spans=8, steps=4, cache_dtype=sys.argv[1])
programs = uncompiled_programs(model, params, **sizes)
for program in (programs.stretches[16], programs.prefills[8]):
  text = compile_for(program.jitted, program.arguments, mesh, chips, only_planned=True).text
  copied = engine_proof.copied_bytes(text, programs.weights_and_cache[1])
  print(copied, len(hlo.copies(text, ["bf16[384,1024]"])))
sys.stdout.flush()
os._exit(0)
"""


@needs_libtpu
@pytest.mark.parametrize("dtype", few(["bfloat16", "int8"], 0))
def test_an_engine_copies_neither_its_cache_nor_the_weights_of_its_queries(dtype):
  """With a scatter of a token per row, 8 copies of arrays of the cache were in the stretch."""
  result = subprocess.run([sys.executable, "-c", STRETCH, dtype], cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  assert result.stdout.splitlines() == ["0.0 0"] * 2


@pytest.mark.slow
@needs_libtpu
def test_every_program_compiles(tmp_path):
  numbers, _ = compiled(tmp_path, "--topology=v5e:2x2")
  programs = [numbers[name] for name in compile_for_pod.PROGRAMS if name != "tower"]
  assert "tower" not in numbers, "the model reads no pictures"
  assert all(program["fits"] and 0 < program["mfu_ceiling"] <= 1 and program["code"] > 0 for program in programs)
  assert numbers["decode"]["parts"]["cache"] > 0 and not numbers["score"]["parts"].get("moments")


SHARDINGS = """
import os, sys
from experiments import compile_for_pod
from experiments.pod import topology
config, flags = compile_for_pod.parse(sys.argv[1:])
topology.prepare()
import jax
from experiments.pod import proof, sampler_proof
plan = proof.make_plan(config, topology.describe(flags["topology"]))
sampler = sampler_proof.make_sampler(plan, plan.model.num_layers)
unsaid = jax.jit(sampler.start.__wrapped__)  # Without shardings of its outputs.
compiled = unsaid.trace(*sampler.arguments).lower(lowering_platforms=("tpu",)).compile()
chosen = jax.tree.leaves(compiled.output_shardings)
given = jax.tree_util.tree_leaves_with_path((sampler.inputs, sampler.loop))
for (path, x), sharding in zip(given, chosen, strict=True):
  same = sharding.is_equivalent_to(x.sharding, x.ndim)
  print("same" if same else f"{jax.tree_util.keystr(path)}: {sharding}, not {x.sharding}")
sys.stdout.flush()
os._exit(0)
"""


GATHERS = """
import os, re, sys
from experiments.pod import topology
topology.prepare()
import jax
import jax.numpy as jnp
from experiments.pod.compiled import compile_for
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import Experts, make_model, preset
sizes = dict(num_layers=4, d_model=512, num_heads=8, head_dim=128, experts=Experts(8, 2, 768))
shape = preset("nano-moe", vocab_size=264)._replace(**sizes, dtype="bfloat16", remat="full")
chips = topology.describe("v5e:2x4")
mesh = mesh_lib.make_mesh(data=1, fsdp=8, devices=chips.devices)
model = make_model(shape, mesh=mesh)
params = jax.eval_shape(model.init, jax.random.key(0))
shardings = mesh_lib.param_shardings(mesh, model.logical_axes, params)
if sys.argv[1] == "the last axis":
  last = jax.P(None, None, None, "fsdp")
  shardings["sparse_layers"]["mlp"]["down"] = jax.NamedSharding(mesh, last)
placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
params = jax.tree.map(placed, params, shardings)
rows = jax.ShapeDtypeStruct((8, 1024), jnp.int32, sharding=mesh_lib.row_sharding(mesh))
states = lambda params, rows: model.hidden(params, rows, rows, rows).hidden
loss = lambda params, rows: jnp.sum(states(params, rows).astype(jnp.float32))
gradient = jax.jit(jax.grad(loss), out_shardings=shardings)
text = compile_for(gradient, (params, rows), mesh, chips, only_planned=True).text
gathered = re.findall(r"%(\\S+) = bf16\\[1,8,768,512\\]\\S* all-gather\\(", text)
# Into whole tiles, with the axes in the order that a product reads. A backward pass transposes the
# weights besides, however they were split.
relaid = re.findall(r"= bf16\\[1,8,768,512\\]\\{3,2,1,0\\S* copy\\(%", text)
print(len(gathered), len(relaid))
sys.stdout.flush()
os._exit(0)
"""


@needs_libtpu
@pytest.mark.parametrize(
  "split", [pytest.param("by the rule", marks=pytest.mark.exhaustive), pytest.param("the last axis", marks=pytest.mark.exhaustive)]
)
def test_gathered_experts_are_not_copied_into_whole_tiles(split):
  """Of the last axis of 512 numbers, fsdp 8 would leave 64 for each chip, half a tile."""
  result = subprocess.run([sys.executable, "-c", GATHERS, split], cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  gathered, relaid = map(int, result.stdout.split())
  assert gathered > 0 and (relaid > 0) == (split == "the last axis")


_OF_256_ROWS = dict(bound_s=0.004, collective_mb=2, step_s=0.004, collectives=155)
_AS_THE_LEARNER = ("rollout.slots=256", "serving.layout=learner", "serving.attention=xla")


@needs_libtpu
@pytest.mark.parametrize(
  ("settings", "limits"),
  [
    pytest.param((), dict(bound_s=0.020, collective_mb=10, step_s=0.008), marks=pytest.mark.exhaustive, id="all sequences"),
    pytest.param(("rollout.slots=256",), _OF_256_ROWS, marks=pytest.mark.exhaustive, id="256 rows"),
    pytest.param(_AS_THE_LEARNER, None, marks=pytest.mark.exhaustive, id="as the learner"),
  ],
)
def test_the_decoding_loop_of_a_pod_leaves_weights_and_cache_in_place(settings, limits, tmp_path):
  """Qwen3-30B-A3B on v5p:4x4x4; the learner's layout and plain attention exceed each limit."""
  overrides = [f"--config.{setting}" for setting in settings]
  command = [sys.executable, "-m", "experiments.compile_for_pod", "--config=configs/gspo.py:qwen3-30b-a3b"]
  command += ["--topology=v5p:4x4x4", "--programs=decode", "--only_plan", "--lengths=4096", f"--json={tmp_path}/numbers"]
  result = subprocess.run([*command, *overrides], cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  numbers = json.loads((tmp_path / "numbers").read_text())
  decode, (rl_step,) = numbers["decode"], numbers["rl_steps"]
  bound, largest = max(decode["bounds"].values()), float(re.search(r"largest collective of a step ([\d.]+) MB", decode["note"])[1])
  if limits is None:
    assert bound > 0.03 and largest > 500 and rl_step["step_s"] > 0.03 and "copies of parts of the cache" in decode["note"]
  else:
    assert bound <= limits["bound_s"] and largest < limits["collective_mb"] and rl_step["step_s"] <= limits["step_s"]
    assert "the cache is not copied" in decode["note"] and decode["num_collectives"] <= limits.get("collectives", 400)
    exchanged = re.search(r"largest of an exchange ([\d.]+) MB", decode["note"])
    assert bool(exchanged) == ("rollout.slots=256" in settings) and (not exchanged or float(exchanged[1]) < 10)


@needs_libtpu
@pytest.mark.parametrize(
  "arguments",
  [
    pytest.param(("model.preset=nano-moe", "mesh.expert=2"), marks=pytest.mark.exhaustive),
    pytest.param(("mesh.tensor=2", "rollout.cache_dtype=int8"), marks=pytest.mark.exhaustive),
  ],
)
def test_the_samplers_shardings_are_those_that_the_compiler_would_choose(arguments):
  overrides = [f"--config.{setting}" for setting in (*SMALL, *arguments)]
  command = [sys.executable, "-c", SHARDINGS, CONFIG, "--topology=v5e:2x2", *overrides]
  result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  lines = result.stdout.splitlines()
  assert len(lines) > 20 and set(lines) == {"same"}


@pytest.mark.exhaustive
@needs_libtpu
def test_two_slices_reduce_gradients_between_them(tmp_path):
  numbers, output = compiled(tmp_path, "--topology=v5e:2x2", "--slices=2", "--programs=update", "--only_plan")
  assert numbers["chips"] == 8 and numbers["mesh"]["data"] == 2 and numbers["only_planned"]
  assert "2 x v5e:2x2" in output
  assert any("data" in name and name.startswith("all-reduce") for name in numbers["update"]["collectives"])


@pytest.mark.exhaustive
@needs_libtpu
def test_a_sweep_recommends_a_setting_that_the_compiler_planned(tmp_path):
  plans, output = compiled(tmp_path, "--topology=v5e:2x2", "--sweep")
  assert "recommended: --topology=v5e:2x2 --config.mesh.data=1" in output
  assert 1 <= len(plans) <= sweep.COMPILED and any(each["update"]["fits"] for each in plans)


def test_jax_still_uses_the_cpu():
  assert jax.default_backend() == "cpu"
