"""Execution of the notebooks in a fresh kernel, into files without volatile parts."""

import json
import os
import pathlib
import sys
import tempfile
from importlib import metadata
from typing import Any

from experiments.notebooks.sources import HERE, ROOT

CELL_SECONDS = 1200
"""Time limit of one cell in s; live training has no limit."""

_METADATA = {
  "jupytext": {"formats": "ipynb,py:percent"},
  "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
  "language_info": {"name": "python"},
}


def require_tools() -> None:
  """Checks that the packages of the notebooks are installed.

  Raises:
    ImportError: If one is missing. The message names the command that installs them.
  """
  try:
    import ipykernel  # noqa: F401
    import jupytext  # noqa: F401
    import matplotlib  # noqa: F401
    import nbclient  # noqa: F401
  except ImportError as error:
    raise ImportError(f"the notebooks need {error.name}: pip install -e '.[notebooks]'") from error


def read_source(name: str) -> Any:
  """Reads the script of a notebook as a notebook without outputs."""
  import jupytext  # Imported late, since it belongs to the extra `notebooks`.

  return jupytext.read(HERE / f"{name}.py", fmt="py:percent")


def read_saved(name: str) -> Any:
  """Reads the checked-in notebook with its outputs."""
  import nbformat

  return nbformat.read(HERE / f"{name}.ipynb", as_version=4)


def execute(name: str, *, live: bool = False) -> Any:
  """Runs all cells of a script in a fresh kernel.

  Args:
    name: Name of the notebook.
    live: Whether notebooks train instead of reading the checked-in logs
      (`JAXRL_LLM_NOTEBOOKS=live`).

  Returns:
    The notebook with its outputs, without anything that depends on the time or the machine.

  Raises:
    nbclient.exceptions.CellExecutionError: If a cell raises.
  """
  from jupyter_client.kernelspec import KernelSpec
  from jupyter_client.manager import AsyncKernelManager
  from nbclient import NotebookClient

  notebook = read_source(name)
  manager = AsyncKernelManager(kernel_name="python3")
  # The kernel is this interpreter, whether or not kernels are installed on the machine.
  command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
  manager._kernel_spec = KernelSpec(argv=command, display_name="Python 3", language="python")
  client = NotebookClient(notebook, km=manager, timeout=None if live else CELL_SECONDS, record_timing=False)
  with tempfile.TemporaryDirectory(prefix="nb") as folder:
    manager.connection_file = str(pathlib.Path(folder, "k.json"))
    if os.name == "posix":
      # Sockets in this folder are closed to other users. The path of a socket must be short.
      manager.transport = "ipc"
    client.execute(cleanup_kc=True, cwd=str(ROOT), env=_environment(live))
  return _stripped(notebook)


def _environment(live: bool) -> dict[str, str]:
  """Builds the environment variables of the kernel."""
  env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
  env["JAXRL_LLM_NOTEBOOKS"] = "live" if live else ""
  if not live:
    env["JAX_PLATFORMS"] = "cpu"  # The arrays are small, and the pictures are the same everywhere.
    # The programs run for milliseconds, so the compile time dominates.
    flags = ["xla_backend_optimization_level=0", "xla_cpu_parallel_codegen_split_count=1"]
    # Later compilers have removed this flag and reject unknown ones.
    if metadata.version("jaxlib").startswith("0.10."):
      flags.append("xla_cpu_use_fusion_emitters=false")
    env["XLA_FLAGS"] = " ".join(f"--{flag}" for flag in flags)
  return env


def _stripped(notebook: Any) -> Any:
  """Removes what changes from run to run: ids, times and versions of the kernel."""
  notebook.metadata = json.loads(json.dumps(_METADATA))
  notebook.nbformat, notebook.nbformat_minor = 4, 5
  for number, cell in enumerate(notebook.cells):
    cell["id"], cell["metadata"] = f"cell-{number}", {}
    for output in cell.get("outputs", ()):
      if "metadata" in output:
        output["metadata"] = {}
  return notebook


def write(name: str, notebook: Any, folder: pathlib.Path) -> pathlib.Path:
  """Writes FOLDER/NAME.ipynb and creates the folder if necessary."""
  import nbformat

  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"{name}.ipynb"
  path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
  return path


def cell_errors() -> tuple[type[Exception], ...]:
  """Returns the errors of `execute` if a cell fails, times out or ends its kernel."""
  from nbclient.exceptions import CellControlSignal, DeadKernelError

  return CellControlSignal, DeadKernelError


def first_error(error: Exception) -> str:
  """Formats the error that ended a cell as one line without a traceback."""
  name, value = getattr(error, "ename", ""), getattr(error, "evalue", "")
  return f"{name}: {value}" if name else str(error).strip().splitlines()[0]
