"""The window of a run with a lag: who is chosen, who waits how long, and what is measured of it."""

import random

import numpy as np
import pytest

from jaxrl_llm.rollouts.arrivals import Arrivals, wait_for_groups
from jaxrl_llm.rollouts.jobs import Conversation, Draws, Job, turn_seed
from jaxrl_llm.rollouts.schedule import Batch, ReplayDiffersError, Schedule, from_line, to_line
from jaxrl_llm.rollouts.window import Lengths, choose, ks_distance, steps_ahead, window_size
from jaxrl_llm.types import StopReason
from tests.rollouts.players import Handing


@pytest.mark.parametrize(
  ("fraction", "staleness", "num_prompts", "expected"),
  [(0.0, 4, 8, 1), (0.01, 4, 8, 1), (0.3, 2, 8, 7), (0.3, 4, 8, 12), (0.29, 1, 50, 29), (0.5, 1, 2, 2)],
)
def test_the_size_of_the_window(fraction, staleness, num_prompts, expected):
  """0.29 · 100 is 28.999... as a product of floats."""
  assert window_size(fraction, staleness=staleness, num_prompts=num_prompts) == expected


def test_strict_order_waits_for_the_oldest_and_takes_no_other():
  assert choose([4, 5, 6, 7], {5, 6, 7}, window=1, count=2) == ([], [4])
  assert choose([4, 5, 6, 7], {4, 6, 7}, window=1, count=2) == ([4], [5])
  assert choose([4, 5, 6, 7], {4, 5, 7}, window=1, count=2) == ([4, 5], [])


def test_the_window_begins_at_the_oldest_group_whatever_was_taken_behind_it():
  """5 and 6 were taken: 4 lets nothing beyond 7 overtake it."""
  assert choose([4, 7, 8, 9], {7, 8, 9}, window=4, count=2) == ([7], [4])
  assert choose([4, 7, 8, 9], {4, 8, 9}, window=4, count=2) == ([4, 8], [])


@pytest.mark.parametrize(("staleness", "num_prompts", "window"), [(2, 4, 1), (2, 4, 4), (3, 4, 6), (4, 3, 7), (2, 8, 9), (5, 2, 6)])
def test_no_group_waits_longer_than_the_window_and_the_lag_allow(staleness, num_prompts, window):
  """Groups finish in a random order, some only once nothing else can be taken."""
  ahead, late, lags = steps_ahead(window, staleness=staleness, num_prompts=num_prompts), 0, set()
  for seed in range(30):
    rng, num_steps = random.Random(seed), 12
    begun, waiting, finished, taken = {}, [], set(), []
    for step in range(num_steps):
      for own in range(len(begun) // num_prompts, min(step + ahead + 1, num_steps)):
        new = range(own * num_prompts, (own + 1) * num_prompts)
        begun |= dict.fromkeys(new, step)
        waiting += new
      while len((chosen := choose(waiting, finished, window=window, count=num_prompts))[0]) < num_prompts:
        # The oldest one is the slowest in half of the trials.
        awaited = chosen[1] if rng.random() < 0.9 else waiting
        finished.add(awaited[-1] if seed % 2 else rng.choice(awaited))
      for number in chosen[0]:
        passed = [later for later in taken if later > number]
        assert len(passed) < window
        late = max(late, len(passed))
        lags.add(step - begun[number])
      taken += chosen[0]
      waiting = [number for number in waiting if number not in chosen[0]]
      finished -= set(chosen[0])
    assert sorted(taken) == list(range(num_steps * num_prompts))
    assert window > 1 or taken == sorted(taken)
  assert max(lags) == staleness and (late > 0) == (window > 1)


def cdf_distance(one, other):
  """Computes the distance by its definition."""
  return max(abs(sum(x <= at for x in one) / len(one) - sum(x <= at for x in other) / len(other)) for at in {*one, *other})


def test_the_distance_of_two_samples_by_its_definition():
  rng = random.Random(0)
  for _ in range(50):
    one, other = ([rng.randint(1, 6 + more) for _ in range(rng.randint(1, 20))] for more in (0, 3))
    assert ks_distance(one, other) == pytest.approx(cdf_distance(one, other), abs=1e-12)
  assert ks_distance([3, 3, 5], [5, 3, 3]) == 0


def test_the_bias_is_that_of_each_step_once_its_own_groups_are_taken():
  lengths, bias = {n: np.array([10 * n, 10 * n + 1]) for n in range(8)} | {2: np.array([11, 10])}, Lengths(0)
  note = lambda step, numbers: bias.note(step, numbers, np.concatenate([lengths[n] for n in numbers]))
  assert note(0, [0, 2]) == {"rollout/window_overtaken": 1.0}
  assert note(1, [3, 4]) == {"rollout/window_overtaken": 1.0}
  of_1, of_2 = ([30, 31, 40, 41], [10, 11, 30, 31]), ([10, 11, 50, 51], [40, 41, 50, 51])
  row = note(2, [1, 5])  # Step 0 learned from the lengths of its own groups.
  expected = (0 + cdf_distance(*of_1) + cdf_distance(*of_2)) / 3
  assert row["rollout/window_overtaken"] == 0 and row["rollout/window_ks"] == pytest.approx(expected)
  assert note(3, [6, 7]) == {"rollout/window_overtaken": 0.0, "rollout/window_ks": 0.0}


SIZE, GROUP = 2, 2


def batch_of(step, *portions):
  """Returns an open batch of 2 groups of 2 that hands over sequences in portions."""
  talk = lambda i: Conversation(i, (1,), (step, i), (0.0, 0.0), (True, True), (), StopReason.TOKEN, text="")
  job = Job([{"id": SIZE * step + i} for i in range(SIZE)], GROUP, range(4), "", Draws(4, 4))
  return Arrivals(Handing(*([talk(i) for i in portion] for portion in portions)), job)


def test_groups_of_several_batches_become_one():
  batches = {3: batch_of(3, [0], [1, 2], [3]), 4: batch_of(4, [], [2, 3], [0, 1])}
  numbers, job, gathered = wait_for_groups(batches, window=3)
  assert numbers == [6, 7]  # Both come first: no younger one is preferred.
  batches = {3: batch_of(3, [0, 1], [], [], [2], [3]), 4: batch_of(4, [0, 1], [2, 3])}
  numbers, job, gathered = wait_for_groups(batches, window=2)
  assert numbers == [6, 8] and [example["id"] for example in job.examples] == [6, 8]
  assert [(x.sequence, *x.tokens) for x in gathered.played] == [(0, 3, 0), (1, 3, 1), (2, 4, 0), (3, 4, 1)]
  assert batches[3].left == [1] and batches[4].left == [1]
  numbers, job, gathered = wait_for_groups(batches, window=2)
  assert numbers == [7, 9] and not batches[3].left and not batches[4].left


def test_a_repeated_step_takes_the_groups_that_it_took_before():
  batches = {3: batch_of(3, [0, 1, 2, 3]), 4: batch_of(4, [], [], [0, 1], [2, 3])}
  assert wait_for_groups(batches, window=3, known=[6, 9])[0] == [6, 9]
  assert wait_for_groups(batches, window=3, known=[7, 8])[0] == [7, 8]
  with pytest.raises(ReplayDiffersError, match=r"replay: found the groups \[6, 11\] in the schedule, expected some of \[10, 11\]"):
    wait_for_groups({5: batch_of(5, [0, 1, 2, 3])}, window=3, known=[6, 11])


def test_what_breaks_the_wait_gives_up_all_batches():
  closed, batches = [], {3: batch_of(3, [0, 1]), 4: batch_of(4)}
  for step, batch in batches.items():
    batch._playing.close = lambda step=step: closed.append(step)
  with pytest.raises(ValueError, match="found a batch that ends without 2 of its 4 conversations"):
    wait_for_groups(batches, window=1)
  assert closed == [3, 4]


def test_the_schedule_holds_the_groups_and_repeats_their_turns(tmp_path):
  """Of the groups that were begun for step 1, one is taken in step 0, and one was still open."""
  turns = lambda *versions: tuple(((((version, 1),)),) for version in versions)
  batch = Batch(0, 0, "aa", 7, turns(0, 0, 1, 1), groups=(0, 3))
  assert from_line(to_line(batch)) == batch and "groups" not in to_line(batch._replace(groups=()))
  again = Schedule(None, "aa", first=0, repeated=[batch])
  assert again.known(0, 0).groups == (0, 3)
  assert again.turns(0, 0, [5, 6, 7, 8]) == {turn_seed(seed, 0): ((0, 1),) for seed in (5, 6)}
  assert again.turns(1, 0, [1, 2, 3, 4]) == {turn_seed(seed, 0): ((1, 1),) for seed in (3, 4)}
  assert again.turns(2, 0, [1, 2, 3, 4]) == {}
