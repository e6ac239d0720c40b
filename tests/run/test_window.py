"""Runs that learn from the groups that finish first: the order, the bias, and that both repeat."""

import string
import threading

import numpy as np
import pytest

from jaxrl_llm.config.check import config_problems
from jaxrl_llm.rollouts import schedule
from jaxrl_llm.rollouts.drafts import Drafts
from tests.run.test_queue import SHORT, repeat, results
from tests.runs import break_at, column, rows, run_here, tiny_config

# Letters end a response, so that their lengths differ.
WINDOW = SHORT | {
  "num_steps": 6, "rollout.update_in_flight": "keep", "rollout.window": 0.3, "rollout.stop_strings": tuple(string.ascii_letters),
  "rollout.slots": 32,
}  # fmt: skip


def config_of(**changes):
  config = tiny_config("gspo", WINDOW | changes)
  assert config_problems(config) == []
  return config


@pytest.fixture
def late(monkeypatch):
  """Has one response of about sixteen end behind 40 others, so that some overtake its group.

  At a checkpoint, where no others come, it ends after a while.
  """
  end, lock = Drafts.end, threading.Lock()
  held: dict[tuple, int] = {}  # What is held back, with the number of others to wait for.

  def release(*args):
    with lock:
      is_held = held.pop(args, None) is not None
    if is_held:
      end(*args)

  def ending(*args):
    drafts, draft, *_ = args
    with lock:
      held.update({late: count - 1 for late, count in held.items()})
      due = [late for late, count in held.items() if count <= 0]
      if is_late := drafts.job.seeds[draft.sequence] % 16 == 0:
        held[args] = 40
    for late in due:
      release(*late)
    if is_late:
      threading.Timer(4.0, release, args).start()
    else:
      end(*args)

  monkeypatch.setattr(Drafts, "end", ending)


def distances(workdir, count):
  """Computes the bias of each step from the schedule, with the step in which it is known."""
  lengths, taken, when = {}, {}, {}
  for batch in schedule.read(workdir):
    sizes = np.array([sum(number for turn in turns for _, number in turn) for turns in batch.turns]).reshape(count, -1)
    for group, own in zip(batch.groups, sizes, strict=True):
      assert group not in lengths
      lengths[group], when[group] = own, batch.step
    taken[batch.step] = batch.groups
  known, last = {}, 0
  for step, groups in taken.items():
    own = range(step * count, (step + 1) * count)
    last = max(last, *(when[group] for group in own))
    both = [np.concatenate([lengths[group] for group in numbers]) for numbers in (groups, own)]
    shares = [np.mean(x[:, None] <= np.arange(33), axis=0) for x in both]
    known.setdefault(last, []).append(np.abs(shares[0] - shares[1]).max())
  return known


def test_a_run_with_a_window_is_measured_resumed_and_repeated_to_the_last_bit(late, tmp_path, monkeypatch):
  config, count = config_of(), 8
  first, again = tmp_path / "first", tmp_path / "again"
  break_at(config, first, 5)
  noted = schedule.read(first)
  run_here(config, first)
  batches = schedule.read(first)
  assert batches[: len(noted)] == noted and len(noted) == len(batches) == 6
  assert sorted(group for batch in batches for group in batch.groups) == list(range(6 * count))
  assert sum(column(first, "rollout/window_overtaken")) > 0 and max(column(first, "rollout/staleness")) <= 2
  assert {group for batch in batches[:4] for group in batch.groups} == set(range(4 * count)), "nothing is open across a checkpoint"
  known = distances(first, count)
  assert [row.get("rollout/window_ks") for row in rows(first, "rl")] == [
    pytest.approx(np.mean(known[step])) if step in known else None for step in range(6)
  ]
  assert max(max(x) for x in known.values()) > 0
  monkeypatch.undo()
  repeat(config, again, first)
  assert results(again) == results(first) and schedule.read(again) == batches
