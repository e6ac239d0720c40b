"""The time of a move of weights, against numbers computed by hand."""

import pytest

from experiments.pod import weight_move
from experiments.pod.weight_move import Links, Sides

LINKS = Links(wire=100e9, pcie=16e9, network=25e9)
HOSTS = LINKS._replace(copy=4e9, connection=0.5e9, sending=3e9, receiving=2e9)


@pytest.mark.parametrize(
  ("sides", "links", "expected"),
  [
    # 60 GB over a host's card of 25 GB/s, and over four chips of 16 GB/s on both sides.
    (Sides(hosts=1, senders=1, receivers=1), LINKS, (0, 0.9375, 2.4, 2.4, 0.9375, 0)),
    # A host's chips take 15/16 of them over four wires; sixteen samplers share the sender's card.
    (Sides(hosts=16, senders=1, receivers=16), LINKS, (0.140625, 0.9375, 38.4, 2.4, 0.9375, 0)),
    # A connection of 0.5 GB/s takes 120 s; the sender's process sends 960 GB at 3 GB/s.
    (Sides(hosts=16, senders=1, receivers=16), HOSTS, (0.140625, 15.0, 320.0, 120.0, 0.9375, 0)),
    # Sixteen senders are limited by what a receiver's process reads, 2 GB/s.
    (Sides(hosts=16, senders=16, receivers=16), HOSTS, (0, 0.9375, 20.0, 30.0, 0.9375, 0)),
    # Four engines of a chip each have a copy each.
    (Sides(hosts=1, senders=1, receivers=1, copies=4), LINKS, (0, 0.9375, 2.4, 2.4, 3.75, 0)),
    # One of 16 hosts of an engine receives all, and the others get their parts from it.
    (Sides(hosts=16, senders=1, receivers=1, copies=0.25, spread=16), LINKS, (0.140625, 0.9375, 2.4, 2.4, 0.9375, 0.140625)),
    # A sixteenth to each host, and the rest over four wires.
    (Sides(hosts=16, senders=16, receivers=16, shares=True), LINKS, (0, 0.05859375, 0.15, 0.15, 0.05859375, 0.140625)),
  ],
)
def test_a_move_takes_as_long_as_computed_by_hand(sides, links, expected):
  move = weight_move.time_of(60e9, sides, links)
  assert tuple(move) == pytest.approx(expected)
  assert move.seconds == pytest.approx(max(expected)) and getattr(move, move.bound_by) == move.seconds
  gather, to_host, send, receive, to_chips, exchange = expected
  assert move.one_by_one == pytest.approx(gather + to_host + max(send, receive) + to_chips + exchange)


def test_today_one_process_sends_to_each_host():
  ways = weight_move.ways(60e9, Sides(hosts=16, senders=16, receivers=4, copies=2), wire=100e9, network=6.25e9)
  today, of_links, *others = ways
  sides = Sides(hosts=16, senders=1, receivers=4, copies=2)
  assert of_links.move == weight_move.time_of(60e9, sides, LINKS) and today.limits == "hosts"
  assert len(others) == 4 and all(way.move.seconds < today.move.seconds for way in others)


def test_an_engine_of_several_hosts_may_get_its_weights_through_one():
  sides = Sides(hosts=16, senders=1, receivers=16, copies=0.25, spread=16)
  of_each, _, of_one, *_ = weight_move.ways(60e9, sides, wire=100e9, network=6.25e9)
  assert of_each.move.send == 320 and of_one.move.send == of_one.move.receive == 100 and of_one.move.exchange > 0
