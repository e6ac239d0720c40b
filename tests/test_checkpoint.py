"""What is restored is what was saved, bit by bit; and what a run finds after a crash."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import checkpoint
from jaxrl_llm import mesh as mesh_lib
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.train_step import init_state, make_optimizer
from jaxrl_llm.types import TrainState

# A restore that fails leaves futures behind that nobody asks for their result; they say so when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MODEL = make_model(preset("nano", vocab_size=264))
OPTIMIZER, _ = make_optimizer(learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, b1=0.9, b2=0.95, max_grad_norm=1.0)
RECORD = {"rl_steps": 3, "accuracy": None, "prompts": {"next_index": 7, "nested": [1.5, "x"]}, "command": "a 'b' \"c\" é", "big": 2**40}


def make_state(seed: int) -> TrainState:
  """No two leaves, and no two seeds, with the same numbers; some that few formats keep: NaN, -0, the smallest."""
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


def assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)  # NamedTuples, not the dicts they were written as.
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


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
  manager = checkpoint.open_checkpoints(folder, keep=2)
  arrays, record = checkpoint.restore_latest(manager, abstract(make_state(0)))
  assert isinstance(arrays["state"], TrainState)
  assert_same(arrays["state"], make_state(2))
  assert record == RECORD | {"rl_steps": 2}


def test_the_newest_steps_are_kept(folder):
  manager = checkpoint.open_checkpoints(folder, keep=2)
  checkpoint.save(manager, 5, {"state": make_state(5)}, RECORD)
  assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["2", "5"]
  arrays, _ = checkpoint.restore_latest(manager, abstract(make_state(0)))
  assert_same(arrays["state"], make_state(5))


def test_a_step_is_never_dropped_in_silence(folder):
  manager = checkpoint.open_checkpoints(folder, keep=2)
  with pytest.raises(RuntimeError, match="exists already"):
    checkpoint.save(manager, 2, {"state": make_state(3)}, RECORD)


def test_what_is_saved_is_the_moment_of_the_call(tmp_path):
  """The next update donates the state: its memory may hold other numbers as soon as `save` returns."""
  manager = checkpoint.open_checkpoints(tmp_path, keep=2)
  state = make_state(1)
  checkpoint.save(manager, 1, {"state": state}, RECORD)
  jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)(state)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
  arrays, _ = checkpoint.restore_latest(manager, abstract(make_state(0)))
  assert_same(arrays["state"], make_state(1))


def test_what_an_interrupted_save_left_is_not_a_checkpoint(folder):
  # A save writes next to the steps and becomes one by a rename.
  left = folder / "3.orbax-checkpoint-tmp"
  shutil.copytree(folder / "2", left)
  manager = checkpoint.open_checkpoints(folder, keep=2)
  arrays, record = checkpoint.restore_latest(manager, abstract(make_state(0)))
  assert record["rl_steps"] == 2
  assert_same(arrays["state"], make_state(2))
  assert not left.exists()
  checkpoint.save(manager, 3, {"state": make_state(3)}, RECORD)
  assert manager.latest_step() == 3


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1, 2), (1, 8, 1, 1, 1)])
def test_a_checkpoint_can_be_restored_to_other_devices(folder, sizes):
  mesh = mesh_lib.make_mesh(**dict(zip(mesh_lib.AXES, sizes, strict=True)))
  wanted = abstract(make_state(0), mesh)
  arrays, _ = checkpoint.restore_latest(checkpoint.open_checkpoints(folder, keep=2), wanted)
  assert_same(arrays["state"], make_state(2))
  jax.tree.map(lambda x, w: x.sharding.is_equivalent_to(w.sharding, x.ndim) or pytest.fail(f"{x.sharding} {w.sharding}"), arrays, wanted)

  # And back, from eight devices to one.
  manager = checkpoint.open_checkpoints(folder, keep=2)
  checkpoint.save(manager, 3, arrays, RECORD)
  arrays, _ = checkpoint.restore_latest(manager, abstract(make_state(0)))
  assert_same(arrays["state"], make_state(2))


def cut(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


DAMAGES = {"cut": cut, "flip": flip, "delete": lambda path: path.unlink(), "empty": lambda path: path.write_bytes(b"")}


@pytest.mark.parametrize("damage", ["flip", *(pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES if name != "flip")])
def test_any_damage_to_any_file_is_named_and_the_step_before_is_taken(folder, damage, tmp_path):
  names = sorted(path.relative_to(folder / "2") for path in (folder / "2").rglob("*") if path.is_file())
  assert len(names) > 8
  harmless = 0
  for i, name in enumerate(names):
    copy = tmp_path / str(i) / "checkpoints"
    shutil.copytree(folder, copy)
    if (copy / "2" / name).stat().st_size == 0 and damage != "delete":
      harmless += 1  # An empty file cannot be cut, emptied or flipped.
      continue
    DAMAGES[damage](copy / "2" / name)
    told = []
    manager = checkpoint.open_checkpoints(copy, keep=2)
    arrays, record = checkpoint.restore_latest(manager, abstract(make_state(0)), tell=told.append)
    assert record["rl_steps"] == 1, name
    assert_same(arrays["state"], make_state(1))
    (line,) = told
    assert line.startswith("checkpoint 2 is damaged: ") and str(name) in line and "going on from checkpoint 1" in line and "\n" not in line
    assert (copy.parent / "damaged" / "2").is_dir(), "nothing is deleted"
    checkpoint.save(manager, 2, {"state": make_state(2)}, RECORD | {"rl_steps": 2})
    arrays, record = checkpoint.restore_latest(manager, abstract(make_state(0)))
    assert_same(arrays["state"], make_state(2))
    manager.close()
  assert harmless < len(names) / 2


def test_whoever_only_reads_moves_nothing(folder):
  flip(next((folder / "2").rglob("_METADATA")))
  before = sorted(path.name for path in folder.iterdir())
  manager = checkpoint.open_checkpoints(folder, keep=2)
  _, record = checkpoint.restore_latest(manager, abstract(make_state(0)), moves=False)
  assert record["rl_steps"] == 1 and sorted(path.name for path in folder.iterdir()) == before


def test_where_all_are_damaged_a_run_does_not_start_anew_in_silence(folder):
  for step in ("1", "2"):
    cut(folder / step / "record" / "metadata")
  with pytest.raises(ValueError, match=r"found none that is whole \(2: record/metadata has .* bytes, expected .*; 1: .*another --workdir"):
    checkpoint.restore_latest(checkpoint.open_checkpoints(folder, keep=2), abstract(make_state(0)))
  assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["1", "2"]


def test_a_save_that_never_came_to_its_end_is_no_checkpoint(folder):
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


def test_the_record_is_plain_json(folder):
  """It can be read without this package."""
  assert json.loads((folder / "2" / "record" / "metadata").read_text()) == RECORD | {"rl_steps": 2}
