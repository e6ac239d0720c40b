"""`python -m experiments.pod.mixture --config=FILE[:ARGUMENT] --topology=v5p:4x4x4 ...`

Memory traffic of one layer of experts against the time of its products, as compiled for remote TPUs
with libtpu but no TPU. The forward pass and the backward pass of a rematerialised layer are
compiled at the sizes of a config: the rows that a device takes at a time, an even load of the
experts.

  --config         the experiment, as in configs/gspo.py:qwen3-30b-a3b
  --config.FIELD   another value for one field, as in --config.mesh.expert=8
  --topology       one slice: v5e:4x4, v5p:4x4x4, v6e:8x16 ...
  --json           file for the numbers
"""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from experiments import compile_for_pod
from experiments.pod import topology as topologies

PRODUCTS = {"forward": 3, "backward": 8}
"""Products of a pass that are needed: three forward, then two again and the gradients of three."""


class Pass(NamedTuple):
  """One pass of one layer of experts on one chip, as compiled.

  Attributes:
    num_bytes: Bytes read from and written to the chip's memory; see `operations.count`.
    memory_s: Least time for these bytes, in s.
    products_s: Least time of the products that the pass needs, in s.
    excess: Operations of the compiled pass over those that it needs.
    temporaries: Bytes of temporaries.
  """

  num_bytes: float
  memory_s: float
  products_s: float
  excess: float
  temporaries: float

  @property
  def ratio(self) -> float:
    """Time of the memory traffic over the time of the products."""
    return self.memory_s / self.products_s


def passes(plan) -> dict[str, Pass]:
  """Compiles both passes of one layer of experts for the config, mesh and chips of a plan."""
  from experiments.pod.compiled import compile_for
  from experiments.pod.kernels import Load

  tokens, arguments = _arguments(plan)
  experts = plan.model.experts
  copies = tokens * experts.top_k * plan.mesh.shape["tensor"] / plan.mesh.size
  product_s = 2 * copies * plan.model.d_model * experts.d_ff / plan.mesh.shape["tensor"] / plan.topology.chip.flops_per_s
  results = {}
  for name, function in _functions(plan).items():
    of_pass = arguments if name == "backward" else arguments[:-1]
    compiled = compile_for(function, of_pass, plan.mesh, plan.topology, only_planned=True, load=Load(int(copies)))
    needed_s, operations = PRODUCTS[name] * product_s, compiled.operations
    excess = operations.flops / plan.topology.chip.flops_per_s / needed_s
    memory_s = operations.num_bytes / plan.topology.chip.bytes_per_s
    results[name] = Pass(operations.num_bytes, memory_s, needed_s, excess, compiled.temporaries)
  return results


def _arguments(plan):
  """Returns the tokens of a micro-batch, and the abstract arguments of the backward pass."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding, PartitionSpec

  from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards, param_shardings
  from jaxrl_llm.learner.programs import rows_at_once
  from jaxrl_llm.models.experts import Weights

  model, mesh, experts = plan.model, plan.mesh, plan.model.experts
  rows = rows_at_once(plan.config, mesh) or num_row_shards(mesh)
  length = plan.config.learner.row_tokens
  axes = Weights(("expert", "embed", "mlp"), ("expert", "embed", "mlp"), ("expert", "mlp", "embed"))
  wide, tall = (experts.num_experts, model.d_model, experts.d_ff), (experts.num_experts, experts.d_ff, model.d_model)
  shapes = Weights(*(jax.ShapeDtypeStruct(shape, model.param_dtype) for shape in (wide, wide, tall)))
  named = {"gate": 0, "up": 1, "down": 2}
  shardings = param_shardings(mesh, {n: axes[i] for n, i in named.items()}, {n: shapes[i] for n, i in named.items()})
  weights = Weights(*(jax.ShapeDtypeStruct(shapes[i].shape, shapes[i].dtype, sharding=shardings[n]) for n, i in named.items()))
  of_rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES, "context" if mesh.shape["context"] > 1 else None))
  array = lambda width, dtype: jax.ShapeDtypeStruct((rows, length, width), dtype, sharding=of_rows)
  x, gates, visited = array(model.d_model, model.dtype), array(experts.top_k, jnp.float32), array(experts.top_k, jnp.int32)
  return rows * length, (x, gates, weights, visited, x)


def _functions(plan):
  import jax

  from jaxrl_llm.models.moe import over_mesh

  def layer(x, gates, weights, visited):
    return over_mesh(x, gates, visited, weights, mesh=plan.mesh, scale=1.0)

  def backward(x, gates, weights, visited, ct):
    return jax.vjp(partial(layer, visited=visited), x, gates, weights)[1](ct)

  shardings = tuple(jax.tree.map(lambda x: x.sharding, x) for x in _arguments(plan)[1][:3])
  return {"forward": jax.jit(layer), "backward": jax.jit(backward, out_shardings=shardings)}


def table(name: str, results: dict[str, Pass]):
  """Builds a table of the passes of a layer and of their sum."""
  from rich.table import Table

  lines = Table(title=f"one layer of experts, each chip: {name}", title_justify="left")
  for column in ("pass", "GB", "memory ms", "products ms", "ratio", "operations, of those needed", "temporaries GiB"):
    lines.add_column(column, justify="left" if column == "pass" else "right")
  for each, x in results.items():
    ms = (f"{1e3 * seconds:.2f}" for seconds in (x.memory_s, x.products_s))
    lines.add_row(each, f"{x.num_bytes / 1e9:.1f}", *ms, f"{x.ratio:.2f}", f"{x.excess:.2f}", f"{x.temporaries / 2**30:.2f}")
  memory_s, products_s = (sum(getattr(x, field) for x in results.values()) for field in ("memory_s", "products_s"))
  num_bytes = sum(x.num_bytes for x in results.values())
  lines.add_row("both", f"{num_bytes / 1e9:.1f}", f"{1e3 * memory_s:.2f}", f"{1e3 * products_s:.2f}", f"{memory_s / products_s:.2f}")
  return lines


def main(argv: Sequence[str]) -> int:
  """Runs the command line and returns the exit code."""
  if {"-h", "--help"} & set(argv):
    print(__doc__)
    return 0
  try:
    config, flags = compile_for_pod.parse(argv)
    topologies.prepare()
    from experiments.pod import proof, report

    plan = proof.make_plan(config, topologies.describe(flags["topology"], slices=flags["slices"]), only_planned=True)
    if plan.model.experts is None:
      raise ValueError(f"config.model.preset: found {config.model.preset!r}, expected a mixture of experts")
    results = passes(plan)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return compile_for_pod.USAGE_ERROR
  report.show(table(f"{config.model.preset}, {plan.topology.name}, {dict(plan.mesh.shape)}", results))
  if flags["json"]:
    numbers = {name: x._asdict() | {"ratio": x.ratio} for name, x in results.items()}
    Path(flags["json"]).write_text(json.dumps(numbers, indent=1))
  return 0


if __name__ == "__main__":
  code = main(sys.argv[1:])
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # Does not wait for the compiler, which may still generate machine code.
