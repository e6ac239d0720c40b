"""Settings of JAX for a run, made before it starts."""

import os
from pathlib import Path

import jax


def cache_compilations(folder: Path | None = None) -> None:
  """Keeps compiled programs on disk, so that a resumed run or the next trial of a sweep need not compile them again.

  Args:
    folder: None is $JAX_COMPILATION_CACHE_DIR, or ~/.cache/jaxrl_llm/xla.
  """
  folder = folder or Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path.home() / ".cache" / "jaxrl_llm" / "xla")
  jax.config.update("jax_compilation_cache_dir", str(folder))
