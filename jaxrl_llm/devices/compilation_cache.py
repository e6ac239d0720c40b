"""JAX's cache of compiled programs, set up before a run starts."""

import os
from pathlib import Path

import jax


def cache_compilations(folder: Path | None = None) -> None:
  """Keeps compiled programs on disk.

  A resumed run and the next trial of a sweep then load them instead of compiling again.

  Args:
    folder: Folder of the cache. None is $JAX_COMPILATION_CACHE_DIR, or ~/.cache/jaxrl_llm/xla if
      that is not set.
  """
  folder = folder or Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path.home() / ".cache" / "jaxrl_llm" / "xla")
  jax.config.update("jax_compilation_cache_dir", str(folder))
