"""A stand-in for a run that saves real checkpoints of a few numbers, in a workdir in a bucket."""

import contextlib
import json
import pathlib
import shutil

import jax
import numpy as np

from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.bucket import index as index_lib
from jaxrl_llm.workdir.bucket import session
from jaxrl_llm.workdir.bucket.address import mirror_of
from jaxrl_llm.workdir.bucket.index import Owner
from jaxrl_llm.workdir.metrics import MetricWriter, read_rows

ELSEWHERE = Owner("abcd1234", "another-host", "another-boot", 7, "100")
RETENTION = dict(newest=2, best=0, every_hours=None)
SHAPE = jax.ShapeDtypeStruct((1000,), np.float32)


def weights(step):
  return np.random.default_rng(step).standard_normal(1000).astype(np.float32)


class Run:
  """The stand-in, opened from its newest checkpoint.

  Attributes:
    workdir: Mirror of the workdir.
    step: Number of the checkpoint that it has resumed from; 0 for none.
    told: Lines about damaged checkpoints.
  """

  def __init__(self, opened, *, enables=True):
    self.workdir, self.told = pathlib.Path(opened.workdir), []
    self.workdir.mkdir(parents=True, exist_ok=True)
    (self.workdir / "config.json").write_text(json.dumps({"seed": 0}))
    self.checkpoints = checkpoint.open_checkpoints(self.workdir / "checkpoints", keep=2)
    place = jax.ShapeDtypeStruct(SHAPE.shape, SHAPE.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    restored = checkpoint.restore_latest(self.checkpoints, {"w": place}, tell=self.told.append)
    self.step = restored[1]["step"] if restored else 0
    if restored:
      assert np.asarray(restored[0]["w"]).tobytes() == weights(self.step).tobytes()
    self.writer = MetricWriter(self.workdir, tensorboard=False)
    self.writer.resume(restored[1]["phase_steps"] if restored else {})
    if enables:
      opened.enable()

  def advance(self, steps=1):
    """Writes a row and saves a checkpoint, for each step."""
    for _ in range(steps):
      self.step += 1
      self.writer.write(self.step, "rl", {"x": self.step})
      checkpoint.save(self.checkpoints, self.step, {"w": jax.numpy.asarray(weights(self.step))}, {
        "step": self.step, "phase_steps": self.writer.phase_steps
      })  # fmt: skip

  def rows(self):
    return [row["step"] for row in read_rows(self.workdir / "metrics.jsonl")]


@contextlib.contextmanager
def running(place, *, told=None, **options):
  """Opens the stand-in in a workdir in a bucket."""
  told = [] if told is None else told
  with session.opened(place, retention=RETENTION, tell=told.append, seconds=5, **options) as opened:
    run = Run(opened)
    run.session = opened
    yield run
    run.writer.close()


def lose_machine(place):
  """Removes the mirror of a workdir, which a new machine lacks."""
  shutil.rmtree(mirror_of(place).state.parent)


def rewrite(store, **changes):
  """Writes the index once more, as another process would: a sign of life, or with other values."""
  index, tag = index_lib.read(store)
  store.replace(index_lib.NAME, index_lib.to_bytes(index._replace(serial=index.serial + 1, **changes)), tag)
