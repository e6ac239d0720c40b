"""Execution of the notebooks in a fresh kernel of this Python, to files without volatile parts."""

import json
import os
import pathlib
import sys
import tempfile
from importlib import metadata
from typing import Any

from experiments.notebooks.sources import HERE, ROOT

CELL_SECONDS = 600
"""Limit of one cell; the live trainings of a notebook have none."""

_METADATA = {
  "jupytext": {"formats": "ipynb,py:percent"},
  "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
  "language_info": {"name": "python"},
}


def require_tools() -> None:
  """Refuses where the notebooks' packages are missing.

  Raises:
    ImportError: with the command that installs them.
  """
  try:
    import ipykernel  # noqa: F401
    import jupytext  # noqa: F401
    import matplotlib  # noqa: F401
    import nbclient  # noqa: F401
  except ImportError as error:
    raise ImportError(f"the notebooks need {error.name}: pip install -e '.[notebooks]'") from error


def read_source(name: str) -> Any:
  """Returns the script of a notebook, as a notebook without outputs."""
  import jupytext  # Lazy: of the extra `notebooks`.

  return jupytext.read(HERE / f"{name}.py", fmt="py:percent")


def read_saved(name: str) -> Any:
  """Returns the checked-in notebook with its outputs."""
  import nbformat

  return nbformat.read(HERE / f"{name}.ipynb", as_version=4)


def execute(name: str, *, live: bool = False) -> Any:
  """Runs all cells of a script in a fresh kernel.

  Args:
    name: Name of the notebook.
    live: Whether notebooks train in the place of reading the checked-in logs
      (`JAXRL_LLM_NOTEBOOKS=live`).

  Returns:
    The notebook with its outputs and nothing that depends on when or where it ran.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell raised.
  """
  from jupyter_client.kernelspec import KernelSpec
  from jupyter_client.manager import AsyncKernelManager
  from nbclient import NotebookClient

  notebook = read_source(name)
  manager = AsyncKernelManager(kernel_name="python3")
  # This interpreter and no other: whatever kernels are installed on the machine, or none.
  command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
  manager._kernel_spec = KernelSpec(argv=command, display_name="Python 3", language="python")
  client = NotebookClient(notebook, km=manager, timeout=None if live else CELL_SECONDS, record_timing=False)
  with tempfile.TemporaryDirectory(prefix="nb") as folder:
    manager.connection_file = str(pathlib.Path(folder, "k.json"))
    if os.name == "posix":
      # Sockets in that folder, which no other user can open; the name of a socket must be short.
      manager.transport = "ipc"
    client.execute(cleanup_kc=True, cwd=str(ROOT), env=_environment(live))
  return _stripped(notebook)


def _environment(live: bool) -> dict[str, str]:
  env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
  env["JAXRL_LLM_NOTEBOOKS"] = "live" if live else ""
  if not live:
    env["JAX_PLATFORMS"] = "cpu"  # Small arrays, and the same pictures everywhere.
    # The programs run for milliseconds: what counts is how long they compile.
    flags = ["xla_backend_optimization_level=0", "xla_cpu_parallel_codegen_split_count=1"]
    # Gone from later compilers, which stop at a flag they do not know.
    if metadata.version("jaxlib").startswith("0.10."):
      flags.append("xla_cpu_use_fusion_emitters=false")
    env["XLA_FLAGS"] = " ".join(f"--{flag}" for flag in flags)
  return env


def _stripped(notebook: Any) -> Any:
  """Removes what changes from run to run: ids, times, versions of the kernel."""
  notebook.metadata = json.loads(json.dumps(_METADATA))
  notebook.nbformat, notebook.nbformat_minor = 4, 5
  for number, cell in enumerate(notebook.cells):
    cell["id"], cell["metadata"] = f"cell-{number}", {}
    for output in cell.get("outputs", ()):
      if "metadata" in output:
        output["metadata"] = {}
  return notebook


def write(name: str, notebook: Any, folder: pathlib.Path) -> pathlib.Path:
  """Writes FOLDER/NAME.ipynb; the folder is made if missing."""
  import nbformat

  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"{name}.ipynb"
  path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
  return path


def cell_errors() -> tuple[type[Exception], ...]:
  """Returns what `execute` raises where a cell fails, takes too long, or ends its kernel."""
  from nbclient.exceptions import CellControlSignal, DeadKernelError

  return CellControlSignal, DeadKernelError


def first_error(error: Exception) -> str:
  """Returns a line that says which error ended a cell, without its traceback."""
  name, value = getattr(error, "ename", ""), getattr(error, "evalue", "")
  return f"{name}: {value}" if name else str(error).strip().splitlines()[0]
