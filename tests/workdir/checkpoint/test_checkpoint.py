"""Checkpoints are restored bit by bit, also after crashes and failed saves."""

import errno
import gc
import json
import pathlib
import shutil
import subprocess
import sys
import threading
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.train_step import init_state, make_optimizer
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.types import TrainState
from jaxrl_llm.workdir import checkpoint, disk
from jaxrl_llm.workdir.checkpoint import manifest
from tests.marks import few
from tests.runs import ROOT, environment, free_address, joined
from tests.workdir.damage import DAMAGES, damage

# A failed restore leaves futures whose results are never read; they warn when they are collected.
pytestmark = [pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"), pytest.mark.usefixtures("little_garbage")]

MODEL = make_model(preset("nano", vocab_size=264))
OPTIMIZER, _ = make_optimizer(learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, b1=0.9, b2=0.95, max_grad_norm=1.0)
RECORD = {"rl_steps": 3, "accuracy": None, "prompts": {"next_index": 7, "nested": [1.5, "x"]}, "command": "a 'b' \"c\" é", "big": 2**40}


def make_state(seed: int) -> TrainState:
  """Makes a state with different numbers in each leaf and for each seed.

  Some of the numbers are lost in many formats: NaN, -0 and the smallest float.
  """
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
  state = init_state(jax.tree.map(lambda p: jnp.zeros(p.shape), shapes), OPTIMIZER)
  draw = lambda x: jnp.asarray(rng.standard_normal(x.shape) if x.dtype == jnp.float32 else 1 + rng.integers(100), x.dtype)
  state = jax.tree.map(draw, state)
  odd = jnp.array([jnp.nan, -0.0, 1e-45, jnp.inf, -jnp.inf])
  return state._replace(params=state.params | {"embedding": state.params["embedding"].at[0, :5].set(odd)})


def abstract(state, mesh=None):
  if mesh is None:
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: whole, state)
  else:
    params = mesh_lib.param_shardings(mesh, MODEL.logical_axes, state.params)
    shardings = mesh_lib.state_shardings(mesh, OPTIMIZER, state, params)
  return {"state": jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)}


def assert_same(actual, expected):
  # The structure has NamedTuples, although they are written as dicts.
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_newest(folder, seed, *, tell=lambda line: None, moves=True):
  """Checks the state of the newest checkpoint. Returns the opened checkpoints and its record."""
  checkpoints = checkpoint.open_checkpoints(folder, keep=2)
  arrays, record = checkpoint.restore_latest(checkpoints, abstract(make_state(0)), tell=tell, moves=moves)
  assert_same(arrays["state"], make_state(seed))
  return checkpoints, record


SEVENS = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 + 7, state), donate_argnums=0)


@pytest.fixture
def folder(tmp_path):
  """A folder with checkpoints of steps 1 and 2."""
  manager = checkpoint.open_checkpoints(tmp_path / "checkpoints", keep=2)
  for step in (1, 2):
    checkpoint.save(manager, step, {"state": make_state(step)}, RECORD | {"rl_steps": step})
  manager.close()
  yield tmp_path / "checkpoints"
  gc.collect()


def test_a_folder_without_checkpoints_has_none(tmp_path):
  manager = checkpoint.open_checkpoints(tmp_path / "not" / "yet", keep=1)
  assert checkpoint.restore_latest(manager, abstract(make_state(0))) is None


def test_a_round_trip_is_exact(folder):
  _, record = assert_newest(folder, 2)
  # It is plain JSON, and can be read without this package.
  assert record == json.loads((folder / "2" / "record" / "metadata").read_text()) == RECORD | {"rl_steps": 2}


def test_a_step_is_never_dropped_silently(folder):
  manager = checkpoint.open_checkpoints(folder, keep=2)
  with pytest.raises(RuntimeError, match="exists already"):
    checkpoint.save(manager, 2, {"state": make_state(3)}, RECORD)


def test_a_save_holds_the_state_of_the_call(tmp_path):
  """The next update donates the state, so that its memory may change once `save` returns."""
  state = make_state(1)
  checkpoint.save(checkpoint.open_checkpoints(tmp_path), 1, {"state": state}, RECORD)
  SEVENS(state)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
  assert_newest(tmp_path, 1)


def test_leftovers_of_an_interrupted_save_are_not_a_checkpoint(folder):
  # A save writes to a folder beside the steps, which is then renamed to a step.
  left = folder / "3.orbax-checkpoint-tmp"
  shutil.copytree(folder / "2", left)
  checkpoints, record = assert_newest(folder, 2)
  assert record["rl_steps"] == 2 and not left.exists()
  checkpoint.save(checkpoints, 3, {"state": make_state(3)}, RECORD)
  assert checkpoints.latest_step() == 3


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1, 2), (1, 8, 1, 1, 1)])
def test_a_checkpoint_can_be_restored_to_other_devices(folder, sizes):
  mesh = mesh_lib.make_mesh(**dict(zip(mesh_lib.AXES, sizes, strict=True)))
  wanted = abstract(make_state(0), mesh)
  arrays, _ = checkpoint.restore_latest(checkpoint.open_checkpoints(folder, keep=2), wanted)
  assert_same(arrays["state"], make_state(2))
  jax.tree.map(lambda x, w: x.sharding.is_equivalent_to(w.sharding, x.ndim) or pytest.fail(f"{x.sharding} {w.sharding}"), arrays, wanted)

  # And back, from eight devices to one.
  checkpoint.save(checkpoint.open_checkpoints(folder, keep=2), 3, arrays, RECORD)
  assert_newest(folder, 2)


@pytest.mark.parametrize("kind", few(DAMAGES, rest="slow", by_hand=(0, 2, 3)))
def test_any_damage_to_any_file_is_reported_and_the_previous_step_is_restored(folder, kind, tmp_path):
  names = sorted(path.relative_to(folder / "2") for path in (folder / "2").rglob("*") if path.is_file())
  assert len(names) > 8
  harmless = 0
  for i, name in enumerate(names):
    copy = tmp_path / str(i) / "checkpoints"
    shutil.copytree(folder, copy)
    if (copy / "2" / name).stat().st_size == 0 and kind != "delete":
      harmless += 1  # An empty file cannot be cut, emptied or flipped.
      continue
    damage(copy / "2" / name, kind)
    told = []
    checkpoints, record = assert_newest(copy, 1, tell=told.append)
    assert record["rl_steps"] == 1, name
    (line,) = told
    assert line.startswith("checkpoint 2 is damaged: ") and str(name) in line and "\n" not in line
    assert "continuing from checkpoint 1" in line
    assert (copy.parent / "damaged" / "2").is_dir(), "nothing is deleted"
    checkpoint.save(checkpoints, 2, {"state": make_state(2)}, RECORD | {"rl_steps": 2})
    assert_newest(copy, 2)
  assert harmless < len(names) / 2


def test_a_reader_moves_nothing_and_disturbs_no_save(folder):
  damage(next((folder / "2").rglob("_METADATA")), "flip")
  (folder / "3.saving" / "arrays").mkdir(parents=True)
  before = sorted(folder.rglob("*"))
  assert_newest(folder, 1, moves=False)
  assert sorted(folder.rglob("*")) == before
  assert_newest(folder, 1)
  assert sorted(path.name for path in folder.iterdir()) == ["1"]


def test_a_run_does_not_restart_silently_if_all_checkpoints_are_damaged(folder):
  for step in ("1", "2"):
    damage(folder / step / "record" / "metadata", "cut")
  message = r"found none that is complete \(2: record/metadata has .* bytes, expected .*; 1: .*another --workdir"
  with pytest.raises(ValueError, match=message):
    checkpoint.restore_latest(checkpoint.open_checkpoints(folder, keep=2), abstract(make_state(0)))
  assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["1", "2"]


def test_an_unfinished_save_is_no_checkpoint(folder):
  for step in ("1", "2"):
    (folder / step / "manifest.json").unlink()
  assert checkpoint.whole_steps(folder) == []
  told = []
  manager = checkpoint.open_checkpoints(folder, keep=2)
  assert checkpoint.restore_latest(manager, abstract(make_state(0)), tell=told.append) is None
  assert all("its save was interrupted; starting from the beginning" in line for line in told) and len(told) == 2
  assert manager.latest_step() is None


def test_another_model_is_refused(folder):
  wanted = abstract(make_state(0))
  embedding = wanted["state"].params["embedding"]
  wider = jax.ShapeDtypeStruct((264, 64), embedding.dtype, sharding=embedding.sharding)
  wanted["state"] = wanted["state"]._replace(params=wanted["state"].params | {"embedding": wider})
  with pytest.raises(ValueError, match="cannot be restored"):
    checkpoint.restore_latest(checkpoint.open_checkpoints(folder, keep=2), wanted)


def on_eight(state):
  mesh = mesh_lib.make_mesh(**dict(zip(mesh_lib.AXES, (1, 8, 1, 1, 1), strict=True)))
  return jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract(state, mesh)["state"]))


class Gate:
  """A gate that holds up a save at a place, for its argument `at`."""

  def __init__(self, place):
    self.place, self.reached, self.open = place, threading.Event(), threading.Event()

  def __call__(self, place):
    if place == self.place:
      self.reached.set()
      assert self.open.wait(60)


@pytest.mark.parametrize("place", [lambda state: state, on_eight])
def test_an_asynchronous_save_holds_the_state_and_the_record_of_the_call(tmp_path, place, monkeypatch):
  written, write = [], ocp.StandardCheckpointHandler.async_save

  async def watched(self, directory, args):
    written.append(args.item)
    return await write(self, directory, args=args)

  monkeypatch.setattr(ocp.StandardCheckpointHandler, "async_save", watched)
  checkpoints, gate = checkpoint.open_checkpoints(tmp_path, keep=2, asynchronous=True), Gate("manifest")
  # Copied, because only arrays that a computation has made are donated, not those of NumPy.
  state = jax.tree.map(jnp.copy, place(make_state(1)))
  memory = lambda state: {piece.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state) for piece in x.addressable_shards}
  before, record = memory(state), dict(RECORD)
  checkpoint.save(checkpoints, 1, {"state": state}, record, at=gate)
  record["rl_steps"] = 4
  assert not memory(written) & before, "the writer reads what the next update overwrites"
  jax.block_until_ready(SEVENS(state))
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
  assert checkpoint.whole_steps(tmp_path) == []
  gate.open.set()
  assert checkpoints.latest_step() == 1 and checkpoint.whole_steps(tmp_path) == [1] and checkpoint.failures(checkpoints) == []
  assert assert_newest(tmp_path, 1)[1] == RECORD


def test_one_save_at_a_time(tmp_path):
  checkpoints, gate, places = checkpoint.open_checkpoints(tmp_path, asynchronous=True), Gate("manifest"), []
  checkpoint.save(checkpoints, 1, {"x": jnp.ones(3)}, {}, at=lambda place: (places.append((1, place)), gate(place)))
  assert gate.reached.wait(60)
  threading.Timer(0.3, gate.open.set).start()
  checkpoint.save(checkpoints, 2, {"x": jnp.ones(3)}, {}, at=lambda place: places.append((2, place)))
  assert checkpoints.latest_step() == 2
  assert places == [(step, place) for step in (1, 2) for place in ("save", "manifest", "saved")]


def test_a_death_before_the_manifest_leaves_the_previous_checkpoint(folder):
  checkpoints = checkpoint.open_checkpoints(folder, keep=2, asynchronous=True)

  def die(place):
    if place == "manifest":
      raise SystemExit("as if killed")

  checkpoint.save(checkpoints, 3, {"state": make_state(3)}, RECORD, at=die)
  # Other errors than failed saves are not lost.
  with pytest.raises(SystemExit, match="as if killed"):
    checkpoint.finish(checkpoints)
  assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"] and checkpoint.whole_steps(folder) == [1, 2]
  told = []
  checkpoints, _ = assert_newest(folder, 2, tell=told.append)
  assert "its save was interrupted; continuing from checkpoint 2" in told[0]
  checkpoint.save(checkpoints, 3, {"state": make_state(3)}, RECORD)
  assert checkpoints.latest_step() == 3


def never_written(patch):
  async def fail(self, *args, **kwargs):
    raise ValueError("RESOURCE_EXHAUSTED: writing: No space left on device")

  patch.setattr(ocp.StandardCheckpointHandler, "async_save", fail)


def half_written(patch):
  """Makes Orbax raise when its future is read, and leave what it has written."""
  save = ocp.StandardCheckpointHandler.async_save

  async def fail_later(self, *args, **kwargs):
    futures = await save(self, *args, **kwargs)

    def result():
      [future.result() for future in futures]
      raise OSError(errno.ENOSPC, "No space left on device")

    return [types.SimpleNamespace(result=result)]

  patch.setattr(ocp.StandardCheckpointHandler, "async_save", fail_later)


def no_room_to_begin(patch):
  patch.setattr(disk, "free_bytes", lambda path: 1000)


def no_room_at_the_end(patch):
  patch.setattr(manifest, "write", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))


@pytest.mark.parametrize("asynchronous", few([False, True], 1))
@pytest.mark.parametrize("trouble", [never_written, half_written, no_room_to_begin, no_room_at_the_end])
def test_a_failed_save_is_reported_and_leaves_nothing(folder, trouble, asynchronous, monkeypatch):
  checkpoints = checkpoint.open_checkpoints(folder, keep=2, asynchronous=asynchronous)
  with monkeypatch.context() as patch:
    trouble(patch)
    for step in range(3, 8):
      checkpoint.save(checkpoints, step, {"state": make_state(step)}, RECORD)
      checkpoint.finish(checkpoints)
      (line,) = checkpoint.failures(checkpoints)
      assert line.startswith(f"checkpoint {folder / str(step)} was not saved: ") and "\n" not in line
      assert "bytes needed" in line and " free); checkpoint 2 stands, the run continues" in line
      assert ("no room" if trouble is no_room_to_begin else "No space left") in line
      assert checkpoints.failure is not None and checkpoints.latest_step() == 2
      assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
  checkpoint.save(checkpoints, 8, {"state": make_state(8)}, RECORD)
  assert checkpoints.latest_step() == 8 and checkpoints.failure is None and checkpoint.failures(checkpoints) == []
  assert_newest(folder, 8)


def test_the_next_checkpoint_replaces_a_temporary_one(folder):
  checkpoints = checkpoint.open_checkpoints(folder, keep=2)
  checkpoint.save(checkpoints, 3, {"state": make_state(3)}, RECORD, temporary=True)
  assert checkpoint.whole_steps(folder) == [1, 2, 3]
  # In the next attempt, the manifest shows which checkpoints are temporary.
  checkpoints, _ = assert_newest(folder, 3)
  checkpoint.save(checkpoints, 4, {"state": make_state(4)}, RECORD)
  assert checkpoint.whole_steps(folder) == [2, 4] and sorted(path.name for path in folder.iterdir()) == ["2", "4"]
  assert_newest(folder, 4)


def test_the_best_checkpoints_survive_restarts(folder):
  for step, accuracy in ((3, 0.9), (4, 0.2), (5, float("nan")), (6, None)):
    checkpoints = checkpoint.open_checkpoints(folder, keep=1, keep_best=1)
    checkpoint.save(checkpoints, step, {"x": jnp.ones(3)}, RECORD, accuracy=accuracy)
  assert checkpoint.whole_steps(folder) == [3, 6]


def test_nothing_is_deleted_before_the_new_checkpoint_is_complete(folder):
  checkpoints, seen = checkpoint.open_checkpoints(folder, keep=1), {}
  checkpoint.save(checkpoints, 3, {"x": jnp.ones(3)}, RECORD, at=lambda place: seen.update({place: checkpoint.whole_steps(folder)}))
  assert seen == {"save": [1, 2], "manifest": [1, 2], "saved": [3]}


OF_TWO = """
import json, pathlib, sys, time
import jax, numpy as np
from jaxrl_llm.devices import hosts
from jaxrl_llm.workdir import checkpoint
hosts.join_processes()
folder, asynchronous = pathlib.Path(sys.argv[1]), sys.argv[2] == "True"
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
values = lambda start: np.arange(start, start + 20.0).reshape(4, 5)
pick = lambda start: lambda index: values(start)[index]
array = lambda start: jax.make_array_from_callback((4, 5), split, pick(start))
checkpoints = checkpoint.open_checkpoints(folder, keep=1, asynchronous=asynchronous)

class Late:
  def __init__(self, client):
    self.client = client
  def __getattr__(self, name):
    return getattr(self.client, name)
  def blocking_key_value_get(self, key, milliseconds):
    if "/save/" in key:
      time.sleep(0.1)
    return self.client.blocking_key_value_get(key, milliseconds)

jax.block_until_ready(array(0))
if jax.process_index() == 1:
  hosts.exchange.run_state().client = Late(hosts.exchange.run_state().client)

def fail_in(process, where):
  def at(place):
    if place == where and jax.process_index() == process:
      raise OSError(28, "No space left on device")
  return at

outcomes = []
fine = lambda place: None
failing = [fail_in(process, where) for process in (0, 1) for where in ("save", "manifest")]
for step, at in enumerate([fine, *failing, fine], 1):
  checkpoint.save(checkpoints, step, {"x": array(step)}, {"step": step}, at=at)
  hosts.barrier()  # The main thread exchanges texts as well.
  newest, failure = checkpoints.latest_step(), checkpoints.failure
  outcomes.append([newest, failure and failure.split("not saved: ")[1].split(" (")[0]])
  checkpoint.finish(checkpoints)
abstract = {"x": jax.ShapeDtypeStruct((4, 5), array(0).dtype, sharding=split)}
arrays, record = checkpoint.restore_latest(checkpoint.open_checkpoints(folder), abstract)
shards = arrays["x"].addressable_shards
same = all(np.array_equal(shard.data, values(6)[shard.index]) for shard in shards)
hosts.barrier()
print(json.dumps([outcomes, record, same, sorted(path.name for path in folder.iterdir())]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_processes_fail_and_continue_together(tmp_path, asynchronous):
  """A failure of one process is a failure of all, and none waits for one that has given up.

  One of them reads late what the other says, which must still be there when the other has begun the
  next save.
  """
  address, processes = free_address(), []
  for index in range(2):
    settings = environment(1) | joined(address, index)
    args = [sys.executable, "-c", OF_TWO, str(pathlib.Path(tmp_path) / "checkpoints"), str(asynchronous)]
    processes.append(subprocess.Popen(args, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
  outputs = [process.communicate(timeout=300) for process in processes]
  assert [process.returncode for process in processes] == [0, 0], outputs
  full = lambda process: [1, f"process {process}: [Errno 28] No space left on device"]
  expected = [[[1, None], full(0), full(0), full(1), full(1), [6, None]], {"step": 6}, True, ["6"]]
  for output, _ in outputs:
    assert json.loads(output.splitlines()[-1]) == expected
