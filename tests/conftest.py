"""What every test shares: eight simulated devices, no network, a home folder of its own, and fixed seeds.

Tests run on the CPU unless JAX_PLATFORMS says otherwise. A computation that names no device or mesh runs on the first device, so the
other seven cost a test that does not use them nothing. JAX's compilation cache stays off, because a cache kept between runs would let one
run's files decide another's; set JAX_COMPILATION_CACHE_DIR to switch it on. XLA's costlier optimizations are off; a flag in XLA_FLAGS wins.
"""

import gc
import os
import pathlib
import shutil
import sys
import tempfile
from importlib import metadata

NUM_DEVICES = 8

# JAX reads these once, so they come before its import.
assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could set its flags"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The programs of tests run for milliseconds: what counts is how long they compile, which the last three cut to well under a half.
XLA_FLAGS = {
  "xla_force_host_platform_device_count": NUM_DEVICES,
  "xla_backend_optimization_level": 0,
  "xla_cpu_parallel_codegen_split_count": 1,
}
if metadata.version("jaxlib").startswith("0.10."):  # Gone from later compilers, which stop at a flag they do not know.
  XLA_FLAGS["xla_cpu_use_fusion_emitters"] = "false"
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{flag}={x}" for flag, x in XLA_FLAGS.items() if flag not in given)]).strip()

# A default that writes below ~ (datasets, caches, matplotlib's fonts) lands here instead; subprocesses inherit it.
HOME = pathlib.Path(tempfile.mkdtemp(prefix="jaxrl_llm_tests_"))
os.environ["HOME"] = os.environ["USERPROFILE"] = str(HOME)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "agg"
for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "TFDS_DATA_DIR", "MPLCONFIGDIR"):
  os.environ.pop(name, None)

import hypothesis  # noqa: E402
import hypothesis.configuration  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

hypothesis.configuration.set_hypothesis_home_dir(HOME / "hypothesis")
# The same examples every time, and no deadline: the first call of a jitted function compiles.
hypothesis.settings.register_profile("jaxrl_llm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jaxrl_llm")


def _is_local(address) -> bool:
  """Whether a socket address is on this machine: loopback, or no internet address at all."""
  if not isinstance(address, tuple):
    return True
  host = address[0].decode() if isinstance(address[0], bytes) else address[0]
  return host in ("", "localhost", "::1", "::") or host.startswith(("127.", "0.0.0.0", "::ffff:127."))


def _refuse_network(event: str, args: tuple) -> None:
  """An audit hook: a test that reaches for the network fails here, also on a machine that has one."""
  if event in ("socket.connect", "socket.sendto") and not _is_local(args[1]):
    raise PermissionError(f"tests must not use the network, but something connects to {args[1]!r}")


def pytest_configure(config):
  """Before the first import of the package, doctests' included."""
  del config
  sys.addaudithook(_refuse_network)


@pytest.hookimpl(trylast=True)  # When what is not wanted has gone.
def pytest_collection_modifyitems(items):
  """Files with long proofs come first: at the end, the longest would keep one process busy while the other has nothing to do."""
  long = {item.path for item in items if item.get_closest_marker("slow")}
  items.sort(key=lambda item: item.path not in long)


def pytest_unconfigure(config):
  """Leaves nothing behind."""
  del config
  shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="module")
def little_garbage():
  """A full collection takes a second in a process that has run hundreds of other tests; for this file it looks at what is new alone."""
  gc.collect()
  gc.freeze()
  yield
  gc.unfreeze()


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
