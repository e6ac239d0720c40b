"""How fast is this device? Its peaks, decoding, updates, and two whole jobs."""

import contextlib
import io
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.benchmarks import random_batch, random_checkpoint, roofline, sampler, train_step
from experiments.first_hour.results import Row, share

ROOT = pathlib.Path(__file__).parents[2]

BANDWIDTH, MFU = 0.7, 0.45
"""Goals on an accelerator: share of the memory's bandwidth that decoding reaches, and share of the
peak that an update reaches."""


class Shape(NamedTuple):
  """A model with random weights, and what it does.

  Attributes:
    what: Description.
    model: Flags of `random_checkpoint`.
    job: Flags of the benchmark, or of `random_batch` and the benchmark.
    batch: Flags of `random_batch`.
  """

  what: str
  model: Sequence[str]
  job: Sequence[str]
  batch: Sequence[str] = ()


_BF16 = "--dtype=bfloat16"
_06B = ("--hidden=1024", "--layers=28", "--vocab=151936")
_MIXTURE = ("--hidden=1024", "--layers=8", "--vocab=32768", "--experts=32", "--top_k=4")
_SMALL = ("--hidden=128", "--layers=2", "--vocab=512")

DECODING = {
  "small": [Shape("128 x 2, 4 x 4 rows", (*_SMALL, "--prompts=4", "--prompt_tokens=8"), ("--group_size=4", "--max_new_tokens=16"))],
  "full": [
    Shape(f"0.6B, {prompts} x 8 rows, attention {attention}", (*_06B, f"--prompts={prompts}", "--prompt_tokens=512"),
      (_BF16, "--max_new_tokens=1024", f"--attention={attention}"))
    for prompts, attention in ((64, "auto"), (64, "ragged"), (8, "auto"))
  ]
  + [Shape("mixture of 32 experts, 32 x 8 rows", (*_MIXTURE, "--prompts=32", "--prompt_tokens=512"), (_BF16, "--max_new_tokens=512"))],
}  # fmt: skip

UPDATES = {
  "small": [
    Shape("128 x 2, 16 responses", _SMALL, (), ("--rows=16", "--prompt_tokens=8", "--cap=32")),
    Shape("128 x 2, 4 experts, 16 responses", (*_SMALL, "--experts=4"), (), ("--rows=16", "--prompt_tokens=8", "--cap=32")),
  ],
  "full": [
    Shape("0.6B, rows of 4k", _06B, (_BF16, "--remat=full", "--row_tokens=4096", "--microbatch=8"),
      ("--rows=64", "--prompt_tokens=512", "--median=800", "--cap=3000")),
    Shape("0.6B, rows of 18k", (*_06B, "--max_positions=16384"), (_BF16, "--remat=full", "--row_tokens=18432", "--microbatch=4"),
      ("--rows=32", "--prompt_tokens=1024", "--median=4000", "--cap=12000")),
    Shape("mixture of 32 experts, rows of 4k", _MIXTURE, (_BF16, "--remat=full", "--row_tokens=4096", "--microbatch=8"),
      ("--rows=64", "--prompt_tokens=512", "--median=800", "--cap=3000")),
  ],
}  # fmt: skip

JOBS = {
  "laptop": {"small": ("configs/gspo.py:tiny",), "full": ("configs/gspo.py",)},
  "smollm2": {
    "small": ("configs/sapo.py:smollm2", "--config.num_steps=1", "--config.eval.num_prompts=8"),
    "full": ("configs/sapo.py:smollm2",),
  },
}


def machine() -> list[Row]:
  """Measures the peaks of the device and compares them with its datasheet."""
  device = jax.devices()[0]
  known, measured = roofline.datasheet(device.device_kind), roofline.measure(device, 512 << 20)
  size = 8192 if device.platform != "cpu" else 1024
  a = jnp.ones((size, size), jnp.bfloat16)
  product = jax.jit(lambda a: a @ a)
  bfloat16 = 2 * size**3 / roofline.fastest(lambda: jax.block_until_ready(product(a)))
  limit = (device.memory_stats() or {}).get("bytes_limit")
  rows = [
    Row("devices", f"{jax.device_count()} x {device.device_kind}"),
    Row("memory that a program may use", f"{limit / 1e9:.1f} GB" if limit else "not reported"),
    Row("JAX", f"{jax.__version__} on Python {sys.version.split()[0]}"),
    Row("float32 products", f"{measured.flops_per_s / 1e12:.2f} TFLOP/s"),
    Row(f"bfloat16 products of {size}", f"{bfloat16 / 1e12:.2f} TFLOP/s"),
    Row("copy of 512 MB", f"{measured.bytes_per_s / 1e9:,.0f} GB/s"),
  ]
  if known is not None:
    rows += [
      share("bfloat16 products, of the datasheet", bfloat16 / known.flops_per_s, None),
      share("copy, of the datasheet", measured.bytes_per_s / known.bytes_per_s, None),
    ]
  return rows


def decoding(folder: pathlib.Path, *, size: str) -> list[Row]:
  """Decodes with random weights and compares the time with that of reading memory."""
  rows = []
  for shape in DECODING[size]:
    checkpoint = _checkpoint(folder, shape)
    prompts = f"--prompts={checkpoint / 'prompts.npz'}"
    result = _run(sampler.main, [f"--checkpoint={checkpoint}", prompts, "--ignore_eos", "--repeats=3", *shape.job], folder)
    roof = result["roofline"]
    rows += [
      Row(f"{shape.what}: tokens/s", f"{result['tokens_per_s']['median']:,.0f}"),
      share(f"{shape.what}: bound over time", roof["fraction"]["median"], _goal(BANDWIDTH)),
    ]
  return rows


def updates(folder: pathlib.Path, *, size: str) -> list[Row]:
  """Updates models with random weights and compares the time with that of the products."""
  rows = []
  for shape in UPDATES[size]:
    checkpoint = _checkpoint(folder, shape)
    batch = folder / "batch.npz"
    _call(random_batch.main, [f"--checkpoint={checkpoint}", str(batch), *shape.batch])
    result = _run(train_step.main, [f"--checkpoint={checkpoint}", f"--batch={batch}", "--repeats=3", *shape.job], folder)
    peak = result["memory"]["peak_bytes"]
    rows += [
      Row(f"{shape.what}: tokens/s", f"{result['tokens_per_s']['median']:,.0f}"),
      share(f"{shape.what}: MFU", result["roofline"]["mfu"]["median"], _goal(MFU)),
      Row(f"{shape.what}: peak memory", f"{peak / 1e9:.2f} GB" if peak else "not reported"),
    ]
  return rows


def job(folder: pathlib.Path, name: str, *, size: str) -> list[Row]:
  """Runs a whole job and compares accuracy at its start and end, and memory with its prediction.

  Raises:
    RuntimeError: If the run fails; with its last line.
  """
  config, *flags = JOBS[name][size]
  workdir = folder / name
  command = [sys.executable, "-m", "jaxrl_llm.main", f"--config={config}", *flags, f"--workdir={workdir}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  if done.returncode:
    raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
  summary = json.loads((workdir / "summary.json").read_text())
  rises = summary["accuracy_final"] > summary["accuracy_start"] if size == "full" else None
  predicted, peak = summary["predicted_memory_gb"], summary["peak_memory_gb"]
  accuracy = f"{summary['accuracy_start']:.1%} to {summary['accuracy_final']:.1%}"
  return [
    Row(f"{config}: accuracy", accuracy, "higher" if size == "full" else "", rises),
    Row(f"{config}: seconds", f"{summary['wall_seconds']:.0f}"),
    Row(f"{config}: tokens/s in RL", f"{summary['tokens'] / max(summary['rl_seconds'], 1e-9):,.0f}"),
    Row(f"{config}: peak memory, and its prediction", f"{peak:.2f} GB, {predicted:.2f} GB"),
  ]


def _goal(goal: float) -> float | None:
  return None if jax.default_backend() == "cpu" else goal


def _checkpoint(folder: pathlib.Path, shape: Shape) -> pathlib.Path:
  """Makes the checkpoint of a shape, unless that of the shape before is the same."""
  checkpoint, flags = folder / "checkpoint", folder / "flags.json"
  if not (flags.exists() and json.loads(flags.read_text()) == list(shape.model)):
    shutil.rmtree(checkpoint, ignore_errors=True)
    _call(random_checkpoint.main, [str(checkpoint), *shape.model])
    flags.write_text(json.dumps(shape.model))
  return checkpoint


def _run(main, flags: Sequence[str], folder: pathlib.Path) -> dict[str, Any]:
  results = folder / "benchmark.json"
  _call(main, [*flags, f"--json={results}"])
  return json.loads(results.read_text())


def _call(main, flags: Sequence[str]) -> None:
  """Calls the `main` of a benchmark, and raises what it would print."""
  errors = io.StringIO()
  with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
    status = main(list(flags))
  if status:
    raise RuntimeError(errors.getvalue().strip().splitlines()[-1])
