"""Damage to any object of a checkpoint is reported on a new machine, which goes one step back."""

import io

import pytest

from jaxrl_llm.workdir.bucket import index as index_lib
from jaxrl_llm.workdir.bucket.store import Store
from jaxrl_llm.workdir.claim import WorkdirError
from tests.marks import few
from tests.workdir.bucket.runs import lose_machine, running
from tests.workdir.damage import DAMAGES


def damage(store, name, kind):
  """Damages an object. Returns its content before, or None if this damage changes nothing."""
  data, _ = store.get(name)
  if not data and kind != "delete":
    return None
  after = DAMAGES[kind](data)
  store.delete([name]) if after is None else store.put(name, after)
  return data


@pytest.mark.parametrize("kind", few(DAMAGES, "flip"))
def test_any_damage_to_any_object_is_reported_and_the_previous_step_is_restored(place, kind):
  with running(place) as run:
    run.advance(2)
  store, index = Store(place), index_lib.read(Store(place))[0]
  at = index.steps[2].at
  names = sorted(store.names(at))
  assert len(names) > 8 and sorted(index.steps) == [1, 2]
  tried = 0
  for name in names if kind != "flip" else names[::3]:
    if (before := damage(store, name, kind)) is None:
      continue
    tried += 1
    lose_machine(place)
    with running(place) as run:
      assert run.step == 1 and run.rows() == [1], name
      (line,) = run.told
      assert line.startswith("checkpoint 2 is damaged: ") and name.removeprefix(f"{at}/") in line and "continuing from checkpoint 1" in line
      run.advance()
    assert run.session.status(0) == 0
    index, tag = index_lib.read(store)
    assert sorted(index.steps) == [1, 2] and index.steps[2].at != at and at in index.aside
    assert set(store.names(at)) >= set(names) - {name}, "nothing is deleted"
    # The workdir as it was, for the next case.
    store.put(name, before)
    sha256 = store.download(f"{at}/manifest.json", io.BytesIO())[1]
    index = index._replace(steps=index.steps | {2: index.steps[2]._replace(at=at, sha256=sha256)}, aside=())
    store.replace(index_lib.NAME, index_lib.to_bytes(index), tag)
  assert tried > 2


def test_a_run_does_not_restart_silently_if_all_checkpoints_are_damaged(place):
  with running(place) as run:
    run.advance(2)
  store = Store(place)
  for step in index_lib.read(store)[0].steps.values():
    store.delete([f"{step.at}/manifest.json"])
  lose_machine(place)
  with pytest.raises(ValueError, match="found none that is complete"), running(place):
    pass
  assert sorted(index_lib.read(store)[0].steps) == [1, 2]


@pytest.mark.parametrize("kind", ["flip", "delete"])
def test_damaged_rows_are_named_and_nothing_is_sent(place, kind):
  with running(place) as run:
    run.advance()
  store = Store(place)
  (part,) = index_lib.read(store)[0].files["metrics.jsonl"]
  damage(store, part.name, kind)
  lose_machine(place)
  expected = "metrics.jsonl is not as it was written" if kind == "flip" else "an object that its index.json names is gone"
  with pytest.raises(WorkdirError, match=expected), running(place):
    pass
  index = index_lib.read(store)[0]
  assert index.files["metrics.jsonl"] == (part,) and index.owner is None
