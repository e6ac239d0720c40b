"""The house rules that no linter checks: imports, configs, docstrings and test environment."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxrl_llm"

# A room may import the rooms above it. Rooms of the same floor do not import each other.
FLOORS = (
  ("messages", "text_types"),
  ("settings",),
  ("types", "advantages", "pretrained", "kernels"),
  ("segments", "tasks", "devices"),
  ("objectives", "models"),
  ("decoding",),
  ("rewards", "learner"),
  ("evaluation", "rollouts"),
  ("config",),
  ("workdir",),
  ("report",),
  ("run",),
  ("train", "evaluate", "export", "serve"),
  ("main",),
  ("cli",),
)
RANKS = {room: rank for rank, rooms in enumerate(FLOORS) for room in rooms}
# The same for the parts of two rooms.
PARTS = {"decoding": ("filters", "draw", "stops", "sampler", "engine", "apart"), "run": ("observe", "setup", "steps", "jobs")}
MOST_AT_THE_TOP = 8
"""Largest number of modules beside the rooms."""

# Rooms behind the fence, which an RL researcher need not open. No other room knows them.
SERVICES = (
  "cli", "serve", "decoding.apart", "run.setup.sampler_processes",
  "models.files.gguf", "report.comparison", "report.live",
  "rewards.model", "rewards.probes", "rewards.rubric", "rewards.sandbox", "rewards.workers",
  "rollouts.environments.hub", "rollouts.environments.openenv", "rollouts.environments.python_tool", "rollouts.environments.verifiers",
  "run.jobs.blame", "run.jobs.bundle", "run.jobs.pilot", "run.jobs.publish", "run.jobs.reward_model", "run.jobs.reward_probe",
  "run.jobs.serving", "run.observe.trackers",
  "workdir.bucket",
)  # fmt: skip

# Its doors: commands and the start of a run open services; elsewhere one file names them for its
# room, in a registry or by the kind of a file.
DOORS = {
  "config/check.py": ("rewards.model", "rewards.sandbox"),
  "config/entries.py": ("rewards.sandbox",),
  "evaluate.py": ("workdir.bucket",),
  "export.py": ("run.jobs.publish", "workdir.bucket"),
  "main.py": ("run.jobs.pilot", "run.jobs.reward_model", "workdir.bucket"),
  "models/files/loading.py": ("models.files.gguf",),
  "report/__main__.py": ("report.comparison", "report.live", "workdir.bucket"),
  "rewards/__init__.py": ("rewards.sandbox",),
  "rewards/from_config.py": ("rewards.model", "rewards.rubric"),
  "rewards/grader.py": ("rewards.rubric", "rewards.workers"),
  "rollouts/environments/__init__.py": (
    "rollouts.environments.openenv", "rollouts.environments.python_tool", "rollouts.environments.verifiers",
  ),
  "run/jobs/evaluate/request.py": ("workdir.bucket",),
  "run/setup/outputs.py": ("run.observe.trackers",),
  "run/setup/source.py": ("rewards.rubric", "workdir.bucket"),
  "run/setup/start.py": ("run.observe.trackers", "run.setup.sampler_processes"),
  "run/steps/bookkeeping.py": ("run.observe.trackers",),
}  # fmt: skip

# Only these rooms, and these files of other rooms, see a whole ConfigDict.
CONFIG_ROOMS = ("config", "evaluate", "export", "main", "run", "train")
CONFIG_FILES = (
  "learner/memory.py", "learner/needs.py", "learner/programs.py", "learner/route_programs.py", "rewards/from_config.py",
  "rollouts/samplers.py",
)  # fmt: skip

BLOCKED = (
  # Never a dependency.
  "pathwaysutils", "ray", "tensorflow", "torch", "transformers", "vllm",
  # Optional: imported at their use, with a message that names the extra.
  "gguf", "huggingface_hub", "jinja2", "jsonschema", "jupytext", "llguidance", "math_verify", "matplotlib", "mkdocs", "mlflow",
  "nbclient", "obstore", "optuna", "PIL", "pyarrow", "reasoning_gym", "safetensors", "sky", "submitit", "trackio", "uvicorn", "verifiers",
  "wandb", "websockets", "xpk",
  # For tests only.
  "beartype", "hypothesis", "pytest",
)  # fmt: skip

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

class Blocker:
  @staticmethod
  def find_spec(name, path=None, target=None):
    if name.partition(".")[0] in sys.argv[1].split(","):
      raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)

sys.meta_path.insert(0, Blocker)
import jaxrl_llm.main
assert "jax" not in sys.modules, "importing main imports jax"
for module in pkgutil.walk_packages(jaxrl_llm.__path__, "jaxrl_llm."):
  importlib.import_module(module.name)
"""

OPEN_CONFIGS = """
import importlib, json, sys
for name in sys.argv[1:]:
  importlib.import_module(name).get_config()
print(json.dumps(sorted(set(sys.modules) & {"jax", "jaxlib", "flax"})))
"""


def parse(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def package_files() -> list[pathlib.Path]:
  files = sorted(PACKAGE.rglob("*.py"))
  assert len(files) > 5, "this test looks in the wrong place"
  return files


def config_files() -> list[pathlib.Path]:
  """Returns the files of the experiments, without their base in `common.py`."""
  files = [path for path in sorted((ROOT / "configs").glob("*.py")) if path.name not in ("__init__.py", "common.py")]
  assert files, "configs/ holds no experiment"
  return files


def where(path: pathlib.Path, node: ast.AST | None = None) -> str:
  return path.relative_to(ROOT).as_posix() + (f":{node.lineno}" if node is not None else "")


def room_of(path: pathlib.Path) -> str:
  """Returns the room of a file.

  `objectives/gspo.py` and `objectives/__init__.py` are in `objectives`. The `__init__.py` of the
  package is in "".
  """
  parts = path.relative_to(PACKAGE).with_suffix("").parts
  return "" if parts == ("__init__",) else parts[0]


def imported_names(path: pathlib.Path) -> list[tuple[ast.AST, str]]:
  """Returns every dotted name that a file imports.

  Imports inside functions and through `import_module("...")` count as well. `from a import b` gives
  `a.b`.
  """
  imports = []
  for node in ast.walk(parse(path)):
    if isinstance(node, ast.Import):
      imports += [(node, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      package = path.relative_to(ROOT).parent.parts
      base = [*package[: len(package) - node.level + 1]] if node.level else []
      base += [node.module] if node.module else []
      imports += [(node, ".".join([*base, alias.name])) for alias in node.names]
    elif isinstance(node, ast.Call):
      function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
      if function in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        imports.append((node, node.args[0].value))
  return imports


def assert_no_imports(paths: Iterable[pathlib.Path], is_forbidden: Callable[[str], bool]) -> None:
  """Checks the names that some files import."""
  problems = [f"{where(path, node)}: imports {name}" for path in paths for node, name in imported_names(path) if is_forbidden(name)]
  assert not problems, "\n".join(dict.fromkeys(problems))


def tracked_files() -> list[pathlib.Path]:
  """Returns the files that git tracks or would track, or without git all but hidden folders."""
  command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
  try:
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    files = [ROOT / name for name in names if name]
  except (OSError, subprocess.CalledProcessError):
    files = [path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.relative_to(ROOT).parent.parts)]
  return [path for path in files if path.is_file()]


def subprocess_env() -> dict[str, str]:
  return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def test_rooms_import_only_rooms_above_them():
  problems = []
  for path in package_files():
    room = room_of(path)
    if room and room not in RANKS:
      problems.append(f"{where(path)}: the room `{room}` has no place in FLOORS")
      continue
    for node, name in imported_names(path):
      top, _, rest = name.partition(".")
      other = rest.partition(".")[0]
      if top != "jaxrl_llm" or other == room or not (other in RANKS or (PACKAGE / other).is_dir() or (PACKAGE / f"{other}.py").exists()):
        # Another package, the same room, or a name of `jaxrl_llm/__init__.py` such as
        # `__version__`.
        continue
      if other not in RANKS or not room or RANKS[other] >= RANKS[room]:
        problems.append(f"{where(path, node)}: `{room or '__init__'}` may not import `{other}`")
  assert not problems, "\n".join(dict.fromkeys(problems))


def test_parts_of_a_room_import_only_parts_before_them():
  for room, parts in PARTS.items():
    assert {path.stem for path in (PACKAGE / room).iterdir()} - {"__init__", "__pycache__"} == set(parts)
    for i, part in enumerate(parts):
      later = tuple(f"jaxrl_llm.{room}.{other}." for other in parts[i + 1 :])
      files = [*(PACKAGE / room).glob(f"{part}.py"), *sorted((PACKAGE / room / part).rglob("*.py"))]
      assert_no_imports(files, lambda name, later=later: f"{name}.".startswith(later))


def test_few_modules_are_at_the_top():
  modules = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
  assert len(modules) <= MOST_AT_THE_TOP, modules


def service_of(module: str) -> str | None:
  """Returns the service that a module of the package belongs to, by its name below `jaxrl_llm`."""
  return next((service for service in SERVICES if f"{module}.".startswith(f"{service}.")), None)


def test_services_are_behind_a_fence():
  """What a feature needs of them goes through a door, so that no numerics depend on a service."""
  modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in package_files()}
  assert set(SERVICES) <= modules
  through: dict[str, set[str]] = {}
  for path in package_files():
    if service_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts)) is None:
      names = [name.removeprefix("jaxrl_llm.") for _, name in imported_names(path) if name.startswith("jaxrl_llm.")]
      if services := set(map(service_of, names)) - {None}:
        through[path.relative_to(PACKAGE).as_posix()] = services
  assert through == {door: set(services) for door, services in DOORS.items()}


def test_nothing_imports_experiments_tests_or_configs():
  assert_no_imports(package_files(), lambda name: name.partition(".")[0] in ("experiments", "tests", "configs"))


def test_configs_import_only_ml_collections_and_the_table_of_fields():
  is_other = lambda name: name.partition(".")[0] not in ("configs", "ml_collections") and not name.startswith("jaxrl_llm.config.fields.")
  assert_no_imports(sorted((ROOT / "configs").rglob("*.py")), is_other)


def test_annotations_are_evaluated():
  """No import is for type checkers only, and none turns annotations into text."""
  problems = []
  for path in package_files():
    for node, name in imported_names(path):
      if name in ("typing.TYPE_CHECKING", "__future__.annotations"):
        problems.append(f"{where(path, node)}: imports {name}; `text_types` needs no jax, and a class that names itself is quoted")
    problems += [
      f"{where(path, node)}: reads TYPE_CHECKING"
      for node in ast.walk(parse(path))
      if isinstance(node, ast.Attribute) and node.attr == "TYPE_CHECKING"
    ]
  assert not problems, "\n".join(problems)


def test_only_models_imports_flax():
  others = [path for path in package_files() if room_of(path) != "models"]
  assert_no_imports(others, lambda name: name.partition(".")[0] == "flax")


def test_only_the_composition_root_sees_a_config_dict():
  others = [path for path in package_files() if room_of(path) not in CONFIG_ROOMS]
  others = [path for path in others if path.relative_to(PACKAGE).as_posix() not in CONFIG_FILES]
  assert_no_imports(others, lambda name: name.startswith("ml_collections"))


def test_everything_public_has_a_docstring():
  """The rule is for modules, public functions, classes and methods, but not for dunder methods."""
  problems = []

  def visit(path: pathlib.Path, node: ast.AST, name: str) -> None:
    if not ast.get_docstring(node):
      problems.append(f"{where(path, None if isinstance(node, ast.Module) else node)}: {name} has no docstring")
    if isinstance(node, ast.Module | ast.ClassDef):
      for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
          visit(path, child, child.name)

  for path in package_files():
    visit(path, parse(path), "the module")
  assert not problems, "\n".join(dict.fromkeys(problems))


def test_no_name_stands_for_three_public_classes():
  names: dict[str, list[str]] = {}
  for path in package_files():
    for node in parse(path).body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        names.setdefault(node.name, []).append(where(path))
  assert not {name: places for name, places in names.items() if len(places) > 2}


def test_modules_are_named_by_nouns():
  """Words in -ing that are terms of the field may stay."""
  terms = {
    "bookkeeping", "decoding", "drawing", "dynamic_sampling", "grading", "loading", "packing", "profiling", "restoring", "rounding",
    "routing", "saving", "serving", "striping", "training",
  }  # fmt: skip
  assert {path.stem for path in package_files() if path.stem.endswith("ing")} <= terms


def test_no_drawer_for_odds_and_ends():
  drawers = {"common", "helpers", "misc", "util", "utils"}
  problems = [where(path) for path in PACKAGE.rglob("*") if path.stem in drawers]
  assert not problems, f"give these a name that says what they hold: {problems}"


def test_no_error_is_swallowed():
  """There is no `except:`, and no `except Exception:` that ignores the error."""
  problems = []
  for path in [*package_files(), *sorted((ROOT / "configs").rglob("*.py")), *sorted((ROOT / "experiments").rglob("*.py"))]:
    for node in ast.walk(parse(path)):
      if not isinstance(node, ast.ExceptHandler):
        continue
      broad = getattr(node.type, "id", "") in ("Exception", "BaseException")
      silent = all(isinstance(child, ast.Pass | ast.Continue | ast.Break) for child in node.body)
      if node.type is None or (broad and silent):
        problems.append(f"{where(path, node)}: name the exception, or say something")
  assert not problems, "\n".join(dict.fromkeys(problems))


def test_no_path_or_address_of_one_machine():
  """Tracked text files name neither the machine of their author nor the source of its packages."""
  patterns = {
    "a path of one machine": r"(?<![\w.<])/(?:[w]ork|[r]oot|[o]pt/(?:pypi|wheels))\b|/[h]ome/\w",
    "a version manager": r"[p]yenv",
    "an address of a package index": r"[p]ypi\.org/simple|[f]iles\.pythonhosted|[r]egistry\.npmjs|-(?:extra-)?[i]ndex-url|-[f]ind-links",
  }
  allowed = {(".ci/run", "a version manager")}  # It looks for a newer Python below the user's home.
  problems, looked_at = [], 0
  for path in tracked_files():
    content = path.read_bytes()
    if b"\0" in content[:4096]:
      continue
    looked_at += 1
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), 1):
      for what, pattern in patterns.items():
        if re.search(pattern, line) and (where(path), what) not in allowed:
          problems.append(f"{where(path)}:{number}: {what}: {line.strip()[:100]}")
  assert looked_at > 10, "this test looks in the wrong place"
  assert not problems, "\n".join(dict.fromkeys(problems))


def test_constraints_are_plain_versions():
  files = sorted((ROOT / "constraints").glob("*.txt"))
  assert len(files) == 2
  for path in files:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    odd = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line)]
    assert lines and not odd, f"{where(path)}: {odd}"


def test_configs_are_documented():
  """The docstring of a config names its paper, command, hardware, and score if measured."""
  problems = []
  for path in config_files():
    docstring = (ast.get_docstring(parse(path)) or "").lower()
    for what, words in {
      "the paper": ("paper", "arxiv"),
      "the command": ("command",),
      "the hardware": ("hardware",),
      "its score, or `not yet measured`": ("score", "not yet measured"),
    }.items():
      if not any(word in docstring for word in words):
        problems.append(f"{where(path)}: the docstring does not say {what} ({' or '.join(words)})")
  assert not problems, "\n".join(dict.fromkeys(problems))


def test_configs_open_without_jax():
  names = [f"configs.{path.stem}" for path in config_files()]
  result = subprocess.run([sys.executable, "-c", OPEN_CONFIGS, *names], cwd=ROOT, env=subprocess_env(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  assert json.loads(result.stdout.splitlines()[-1]) == []


def test_the_package_opens_without_optional_packages():
  """`main` comes first, since it must refuse bad input without JAX, then every other module."""
  command = [sys.executable, "-c", IMPORT_EVERYTHING, ",".join(BLOCKED)]
  result = subprocess.run(command, cwd=ROOT, env=subprocess_env(), capture_output=True, text=True)
  assert result.returncode == 0, result.stderr


def test_tests_have_eight_devices():
  assert len(jax.devices()) == 8


def test_tests_check_shapes():
  """The import hook of jaxtyping is on. Without it, shapes in signatures are mere comments."""
  from jaxrl_llm import segments

  segments.token_mean(jnp.ones((2, 3)), None)
  with pytest.raises(jaxtyping.TypeCheckError):
    segments.token_mean(jnp.ones(3), None)


def test_tests_cannot_reach_the_network():
  import socket

  # TEST-NET-1, which has no hosts. A connection to loopback is allowed.
  with pytest.raises(PermissionError, match="must not use the network"):
    socket.create_connection(("192.0.2.1", 9), timeout=0.1)
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    socket.create_connection(listener.getsockname(), timeout=5).close()


def test_tests_have_a_home_of_their_own():
  assert pathlib.Path.home().name.startswith("jaxrl_llm_tests_")


@pytest.mark.usefixtures("x64")
def test_x64_is_on_if_requested():
  assert jnp.ones(1).dtype == "float64"


def test_x64_is_off_elsewhere():
  assert jnp.ones(1).dtype == "float32"
