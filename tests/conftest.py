"""The common environment of all tests.

It has eight simulated devices, no network, a temporary home folder, and fixed seeds.

Tests run on the CPU unless JAX_PLATFORMS selects another platform. A computation without a device
or mesh runs on the first device, so that the other seven cost nothing. JAX's compilation cache is
off, because the files of one run would affect the next; JAX_COMPILATION_CACHE_DIR switches it on.
XLA's costlier optimizations are off, unless XLA_FLAGS sets them.
"""

import ctypes
import gc
import os
import pathlib
import shutil
import sys
import tempfile
from importlib import metadata

NUM_DEVICES = 8
LARGE_MB = 1800

# JAX reads these settings once, when it is imported.
assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could set its flags"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The programs of tests run for milliseconds, so that their compilation dominates. The last three
# flags cut its time to well under a half.
XLA_FLAGS = {
  "xla_force_host_platform_device_count": NUM_DEVICES,
  "xla_backend_optimization_level": 0,
  "xla_cpu_parallel_codegen_split_count": 1,
}
# Later compilers lack this flag, and stop at an unknown one.
if metadata.version("jaxlib").startswith("0.10."):
  XLA_FLAGS["xla_cpu_use_fusion_emitters"] = "false"
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{flag}={x}" for flag, x in XLA_FLAGS.items() if flag not in given)]).strip()

# Defaults below ~ (datasets, caches, matplotlib's fonts) go here instead, in subprocesses too. The
# workers of pytest-xdist inherit the folder of the process that started them, so that they build a
# dataset or compile a program of a run once between them.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
HOME = pathlib.Path(os.environ["HOME"] if IS_WORKER else tempfile.mkdtemp(prefix="jaxrl_llm_tests_"))
os.environ["HOME"] = os.environ["USERPROFILE"] = str(HOME)
os.environ["HF_HUB_OFFLINE"] = "1"
# A test of the warm start must compute it, whatever ran before: kills, checkpoints, resumed runs.
os.environ["JAXRL_LLM_WARM_STARTS"] = "off"
os.environ["MPLBACKEND"] = "agg"
for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "TFDS_DATA_DIR", "MPLCONFIGDIR"):
  os.environ.pop(name, None)

import hypothesis  # noqa: E402
import hypothesis.configuration  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from tests import checks  # noqa: E402

checks.install()

hypothesis.configuration.set_hypothesis_home_dir(HOME / f"hypothesis{os.getpid()}")
# The same examples every time, and no deadline: the first call of a jitted function compiles.
hypothesis.settings.register_profile("jaxrl_llm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jaxrl_llm")


def _is_local(address) -> bool:
  """Returns whether a socket address is on this machine: loopback, or no internet address."""
  if not isinstance(address, tuple):
    return True
  host = address[0].decode() if isinstance(address[0], bytes) else address[0]
  return host in ("", "localhost", "::1", "::") or host.startswith(("127.", "0.0.0.0", "::ffff:127."))


def _refuse_network(event: str, args: tuple) -> None:
  """Fails a test that uses the network, as an audit hook."""
  if event in ("socket.connect", "socket.sendto") and not _is_local(args[1]):
    raise PermissionError(f"tests must not use the network, but something connects to {args[1]!r}")


def pytest_configure(config):
  """Installs the audit hook before the first import of the package, doctests included."""
  del config
  sys.addaudithook(_refuse_network)


@pytest.hookimpl(trylast=True)  # After the deselection of tests.
def pytest_collection_modifyitems(items):
  """Puts files with long proofs first.

  At the end, the longest would keep one process busy while the other is idle.
  """
  long = {item.path for item in items if item.get_closest_marker("slow")}
  items.sort(key=lambda item: item.path not in long)


def pytest_unconfigure(config):
  """Removes the temporary home folder, after the last worker."""
  del config
  if not IS_WORKER:
    shutil.rmtree(HOME, ignore_errors=True)


def pytest_collection_finish():
  """Spares garbage collections the millions of objects of the modules, which stay anyway.

  Collections are rarer, because tracing makes many objects and hardly any garbage.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(trylast=True)  # After the fixtures of the file.
def pytest_runtest_teardown(item, nextitem):
  """Frees the compiled programs of a file's tests once the process has grown large.

  Other files hardly ever run the same ones, which would add up to several gigabytes. Without the
  trim, the allocator would keep the pages.
  """
  if (nextitem is None or nextitem.path != item.path) and _resident_mb() > LARGE_MB:
    if "tests.runs" in sys.modules:
      sys.modules["tests.runs"].forget_programs()
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _resident_mb() -> float:
  """Returns the memory of this process in MB; 0 if its C library cannot give back any."""
  if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"):
    return 0.0
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.fixture(scope="module")
def little_garbage():
  """Garbage collections of new objects only, in one test file.

  A full collection takes a second in a process that has run hundreds of other tests.
  """
  gc.collect()
  gc.freeze()
  yield
  gc.unfreeze()
  gc.collect()
  gc.freeze()


@pytest.fixture
def in_the_checkout(monkeypatch):
  """The root of the repository as current folder, for commands that run in this process."""
  monkeypatch.chdir(pathlib.Path(__file__).parents[1])
  # `tests.runs.quick` has a cache of its own.
  monkeypatch.setattr("jaxrl_llm.devices.compilation_cache.cache_compilations", lambda: None)
  # Joining must precede any use of the devices, which other tests have already used.
  monkeypatch.setattr("jaxrl_llm.devices.hosts.join_processes", lambda: None)


@pytest.fixture
def x64():
  """float64 for one test."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def key() -> jax.Array:
  """A JAX key, the same in every run."""
  return jax.random.key(0)


@pytest.fixture
def rng() -> np.random.Generator:
  """A NumPy generator, the same in every run."""
  return np.random.default_rng(0)
