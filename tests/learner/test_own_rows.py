"""Rows of an update in two real processes: each packs its own, and the devices hold all of them."""

import json

import jax
import numpy as np
import pytest

from jaxrl_llm.devices import hosts
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import packing
from tests.runs import two_processes

# The mesh, its devices in order, and the rows that each process holds.
MESHES = {
  "halves": (dict(data=4), [0, 1, 2, 3], [[0, 1, 2, 3], [4, 5, 6, 7]]),
  "every other shard": (dict(data=4), [0, 2, 1, 3], [[0, 1, 4, 5], [2, 3, 6, 7]]),
  "halves of slots": (dict(data=2, context=2), [0, 2, 1, 3], [[*range(8)]] * 2),
}
OPTIONS = dict(row_tokens=16, row_buckets=(8,), share_prompts=True, group_size=3)


def sequences():
  """Makes sequences of different tokens, in groups that share prompts."""
  made, rng = [], np.random.default_rng(0)
  for group in range(12):
    prompt = [100 * group + i for i in range(1 + group % 3)]
    for sample in range(3):
      response = [100 * group + 10 * sample + i + 5 for i in range(int(rng.integers(1, 5)))]
      one = packing.demonstration(prompt, response)
      made.append(one._replace(sampler_logprobs=np.float32(-one.tokens / 7), num_prompt=len(prompt), group=group))
  return made


def tell():
  """Packs and places in one of two processes, and prints what it holds as JSON."""
  hosts.join_processes()
  facts = {}
  for name, (sizes, order, _) in MESHES.items():
    mesh = mesh_lib.make_mesh(**sizes, devices=[jax.devices()[i] for i in order])
    shards = dict(num_shards=mesh_lib.num_row_shards(mesh), own_shards=mesh_lib.own_row_shards(mesh))
    layout = packing.arrange(sequences(), **OPTIONS, **shards)
    batch = packing.pack(sequences(), layout)
    whole = hosts.to_host(mesh_lib.place_tokens(mesh, batch))
    facts[name] = {
      "held": layout.held.tolist(),
      "bytes": sum(x.nbytes for x in jax.tree.leaves(batch)),
      "whole": {field: x.tolist() for field, x in whole._asdict().items() if x is not None},
      "lifted": [x.tolist() for x in packing.lift(whole.sampler_logprobs, layout)],
    }
  print(json.dumps(facts))


@pytest.fixture(scope="module")
def facts():
  """What each process tells, by mesh."""
  both = two_processes("from tests.learner.test_own_rows import tell; tell()")
  assert [x.returncode for x in both] == [0, 0], both
  return [json.loads(x.stdout.splitlines()[-1]) for x in both]


@pytest.mark.parametrize("name", MESHES)
def test_each_process_packs_its_own_rows_and_the_devices_hold_all(facts, name):
  layout = packing.arrange(sequences(), **OPTIONS, num_shards=MESHES[name][0]["data"])
  expected = packing.pack(sequences(), layout)
  assert len(set(layout.rows)) > 6, "some rows in each process"
  for process, held in zip(facts, MESHES[name][2], strict=True):
    own = process[name]
    assert own["held"] == held
    assert own["bytes"] * 8 == sum(x.nbytes for x in jax.tree.leaves(expected)) * len(held)
    for field, values in own["whole"].items():
      np.testing.assert_array_equal(np.asarray(values, getattr(expected, field).dtype), getattr(expected, field), err_msg=field)
    assert own["lifted"] == [x.tolist() for x in packing.lift(expected.sampler_logprobs, layout)]
