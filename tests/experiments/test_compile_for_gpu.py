"""Tests of what is read from programs for GPUs, and of the command's bad input."""

import importlib.util

import pytest

from experiments import compile_for_gpu
from experiments.compile_for_gpu import Gate
from experiments.pod import gpus, hlo, launches

PROGRAM = """
%cast (p: f32[64,8]) -> bf16[64,8] {
  ROOT %c = bf16[64,8]{1,0} convert(%p)
}
%of_chunk (p: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %f = bf16[64,8]{1,0} fusion(%g), kind=kLoop, calls=%cast
}
%of_micro_batch (p: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %c = bf16[64,8]{1,0} convert(%g)
  %w = (s32[], f32[64,8]) while(%t), condition=%more, body=%of_chunk
}
ENTRY %main (a: f32[64,8]) -> f32[64,8] {
  %d = bf16[64,8]{1,0} convert(%a)
  %w = (s32[], f32[64,8]) while(%t), condition=%more, body=%of_micro_batch
}
"""


def test_casts_count_by_the_loops_around_them():
  counts = [len(hlo.casts_in_loops(PROGRAM, "bf16[64,8]", depth=depth)) for depth in (0, 1, 2, 3)]
  assert counts == [3, 2, 1, 0]
  assert not hlo.casts_in_loops(PROGRAM, "bf16[8,64]")


def test_launches_belong_to_the_loop_around_them():
  """A loop in a loop, of which the inner one is part of a graph that is launched as one."""
  program = launches.parse("\n".join([
    "000: kWhile         [source | sink]",
    "condition:",
    "    001: kCustomKernel [source | sink] compare grid: [1, 1, 1]",
    "  body:",
    "    002: kAsyncStart    stream=computation_stream[0], async_id=2",
    "        004: kDynamicSliceFusion  params=1, results=1",
    "            003: kCopy  kCopy",
    "    005: kWhile         [prev=002 (1) | next=009 (1)]",
    "condition:",
    "        006: kCustomKernel [source | sink] compare grid: [1, 1, 1]",
    "      body:",
    "        000: kCommandBuffer [source | sink]",
    "            007: kCustomKernel [source | sink] flash_forward grid: [16, 32, 3]",
    "            008: kGemm         [source | sink] custom-call",
    "    009: kCustomKernel [prev=005 (1) | sink] end grid: [1, 1, 1]",
  ]))  # fmt: skip
  (outer,) = program.loops
  assert [launch.name for launch in outer.launches] == ["compare", "kCopy", "end"] and not program.launches
  assert [(launch.name, launch.in_graph) for launch in program.deepest().launches] == [
    ("compare", False), ("flash_forward", True), ("custom-call", True),
  ]  # fmt: skip


def test_a_gate_bounds_from_above_or_below():
  assert Gate("kernels", 19, 19).holds and not Gate("kernels", 20, 19).holds
  assert Gate("bytes", 64, 64, is_least=True).holds and not Gate("bytes", 2, 64, is_least=True).holds


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--programs=decod"], "--programs: found 'decod', expected some of decode,update,memory"),
    (["--devices=12"], "found 'h200:12', expected 1 to 8 GPUs, or a multiple of 8, as in h200:16"),
    (["--devices=0"], "found 'h200:0', expected 1 to 8 GPUs"),
  ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
  assert compile_for_gpu.main(arguments) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: {message}")


def test_a_missing_compiler_is_named(capsys, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert compile_for_gpu.main(["--programs=decode"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "pip install jax-cuda13-plugin jax-cuda13-pjrt, in the version of jax" in line


def test_every_gpu_has_a_datasheet():
  assert [gpus.datasheet(gpu.kind).bytes_per_s for gpu in gpus.GPUS.values()] == [gpu.bytes_per_s for gpu in gpus.GPUS.values()]
