"""Programs for CUDA that are lowered on a machine without a GPU, and their kernels in Triton."""

import re
from typing import NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect


class Kernel(NamedTuple):
  """A kernel of a program: its settings, and its text in Triton's language."""

  name: str
  grid: tuple[int, int, int]
  warps: int
  stages: int
  text: str


def lowered(function, *arguments):
  """Returns a program for CUDA."""
  gpu = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu"))
  with use_abstract_mesh(gpu):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def kernels_of(program) -> list[Kernel]:
  """Returns the kernels of a program, checked by Triton's own rules."""
  calls = []

  def visit(op):
    if op.name == "stablehlo.custom_call" and "xla.gpu.triton" in str(op.attributes["call_target_name"]):
      calls.append(op)
    return ir.WalkResult.ADVANCE

  module = program.compiler_ir("stablehlo")
  with module.context:
    module.operation.walk(visit)
    settings = [ir.DictAttr(call.attributes["mhlo.backend_config"]) for call in calls]
    number = lambda of_call, name: ir.IntegerAttr(of_call[name]).value
    kernels = [
      Kernel(
        ir.StringAttr(of_call["name"]).value,
        tuple(number(of_call, f"grid_{axis}") for axis in "xyz"),
        number(of_call, "num_warps"),
        number(of_call, "num_stages"),
        ir.StringAttr(of_call["ir"]).value_bytes,
      )
      for of_call in settings
    ]
  with ir.Context() as context:
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    return [kernel._replace(text=str(ir.Module.parse(kernel.text))) for kernel in kernels]


def lines(text, op):
  """Returns the lines of a kernel that have this operation."""
  return [line for line in text.splitlines() if re.search(rf"\b{re.escape(op)} ", line)]


def shapes(program) -> set[tuple[int, ...]]:
  """Returns the shapes of all arrays of a program."""
  return {tuple(map(int, x.split("x")[:-1])) for x in re.findall(r"tensor<((?:\d+x)+)\w+>", program.as_text())}
