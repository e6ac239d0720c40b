"""Time in which new weights get from a learner to samplers on another slice, by bytes and links.

Weights leave the learner whole and in the sampler's dtype. They pass these stages one after the
other:

  learner's chips -> wires -> chips of hosts that send -> PCIe -> memory of these hosts -> network
  -> memory of the samplers' hosts -> PCIe -> chips of the samplers

If all stages work at once, on different weights, the slowest one bounds the time from below.
"""

import math
from typing import NamedTuple

PCIE_BYTES_PER_S = 16e9
"""Bytes/s between a chip and its host, for the generations up to v5p.

Reference: How to Scale Your Model, jax-ml.github.io/scaling-book, 2025 (16 GB/s; 32 for v6e).
"""

COPY_BYTES_PER_S = 4.5e9
"""Bytes/s at which one core copies shards into a new array of the host."""

CONNECTION_BYTES_PER_S = 0.6e9
SENDING_BYTES_PER_S = 3e9
RECEIVING_BYTES_PER_S = 2e9
"""Bytes/s of `decoding.apart.wire`: one connection, and all of a process that sends or receives.

These follow from processor time, measured with 1.07 GB of bfloat16 weights over loopback on an
AMD EPYC on 2026-11-26. For a GB the receiver needs 1.65 s of a core, 0.5 s of them outside of the
kernel, the sender 0.33 s outside of the kernel. Threads share the latter, which is Python's.
"""


class Links(NamedTuple):
  """Bandwidths on the way of weights, in bytes/s.

  Attributes:
    wire: One wire between neighbouring chips, in one direction.
    pcie: Between a chip and its host, in one direction.
    network: Between a host and the network, in one direction.
    copy: Copies in a host's memory; infinite if they cost nothing.
    connection: One connection between two processes; infinite if only the network limits it.
    sending, receiving: All connections of a process.
  """

  wire: float
  pcie: float
  network: float
  copy: float = math.inf
  connection: float = math.inf
  sending: float = math.inf
  receiving: float = math.inf


class Sides(NamedTuple):
  """Hosts and chips between which weights move, one process on each host.

  Attributes:
    hosts: Number of hosts of the learner.
    senders: Number of these that send, an equal part of the weights each.
    receivers: Number of hosts that receive.
    chips: Number of chips of a host.
    copies: Number of copies of the weights on the chips of a host that receives.
    shares: Whether each host receives a part only, and all exchange their parts over the wires of
      their slice.
    spread: Number of hosts that get their weights over these wires from one that receives, itself
      included.
  """

  hosts: int
  senders: int
  receivers: int
  chips: int = 4
  copies: int = 1
  shares: bool = False
  spread: int = 1


class Move(NamedTuple):
  """Time of each stage of a move, in s.

  Attributes:
    gather: Weights reach the chips of the hosts that send.
    to_host: They reach the memory of these hosts.
    send: They leave these hosts.
    receive: They reach the memory of each host that receives.
    to_chips: They reach the chips of these hosts.
    exchange: These hosts complete each other's weights.
  """

  gather: float
  to_host: float
  send: float
  receive: float
  to_chips: float
  exchange: float

  @property
  def seconds(self) -> float:
    """Least time of the move: all stages at once."""
    return max(self)

  @property
  def one_by_one(self) -> float:
    """Time if each stage waits for the one before; the two ends of the network are one stage."""
    return self.gather + self.to_host + max(self.send, self.receive) + self.to_chips + self.exchange

  @property
  def bound_by(self) -> str:
    """Name of the slowest stage."""
    return max(self._fields, key=lambda name: getattr(self, name))


def time_of(num_bytes: float, sides: Sides, links: Links) -> Move:
  """Bounds the stages of a move of B bytes from below.

  With H hosts of the learner, of which S send, R that receive, c chips of a host, and the
  bandwidths w of a wire, p of PCIe, m of copies, n of the network, k of a connection, s and r of a
  process that sends or receives:

    gather   = (1 - S/H)·B / S / (c·w)         a host's chips have at least a wire each to others
    to_host  = B / S / min(c·p, m)
    send     = R·b / S / min(n, R·k, s)        b = B/R if each host receives a part, else B
    receive  = b / min(n, S·k, r)
    to_chips = copies·b / (c·p)                copies = 1 if hosts of the samplers exchange weights
    exchange = (1 - 1/R)·copies·B / (c·w)      if each host receives a part
             = (1 - 1/h)·B / (c·w)             if one of h hosts receives all and the others a part

  Args:
    num_bytes: Number of bytes of the weights in the sampler's dtype.
    sides: Hosts and chips.
    links: Bandwidths.

  Example:
    >>> move = time_of(800.0, Sides(hosts=4, senders=1, receivers=2, copies=2), Links(wire=100.0, pcie=10.0, network=20.0, connection=5.0))
    >>> move
    Move(gather=1.5, to_host=20.0, send=160.0, receive=160.0, to_chips=40.0, exchange=0.0)
    >>> move.seconds, move.one_by_one, move.bound_by
    (160.0, 221.5, 'send')
  """
  senders, receivers = sides.senders, sides.receivers
  of_each = num_bytes / receivers if sides.shares else num_bytes
  over_pcie, over_wires = sides.chips * links.pcie, sides.chips * links.wire
  return Move(
    gather=(1 - senders / sides.hosts) * num_bytes / senders / over_wires,
    to_host=num_bytes / senders / min(over_pcie, links.copy),
    send=receivers * of_each / senders / min(links.network, receivers * links.connection, links.sending),
    receive=of_each / min(links.network, senders * links.connection, links.receiving),
    to_chips=(1 if sides.shares or sides.spread > 1 else sides.copies) * of_each / over_pcie,
    exchange=((1 - 1 / receivers) * sides.copies if sides.shares else 1 - 1 / sides.spread) * num_bytes / over_wires,
  )


class Way(NamedTuple):
  """A way to move weights.

  Attributes:
    name: What is sent from where.
    limits: What limits it: "hosts", with the links, or the "links" alone.
    move: Time of its stages.
  """

  name: str
  limits: str
  move: Move


def ways(num_bytes: float, sides: Sides, *, wire: float, network: float) -> list[Way]:
  """Times a move by one process to each host of the samplers, and other ways.

  Args:
    num_bytes: Number of bytes of the weights in the sampler's dtype.
    sides: Hosts and chips, with the number of hosts of an engine as `spread`; senders and shares
      are chosen here.
    wire: Bandwidth of a wire between chips in one direction, in bytes/s.
    network: Bandwidth between a chip and other slices, in bytes/s.
  """
  fast = Links(wire, PCIE_BYTES_PER_S, sides.chips * network)
  of_process = dict(connection=CONNECTION_BYTES_PER_S, sending=SENDING_BYTES_PER_S, receiving=RECEIVING_BYTES_PER_S)
  slow = fast._replace(copy=COPY_BYTES_PER_S, **of_process)
  of_engine = {"one process, all to a host of each engine": dict(senders=1, receivers=sides.receivers // sides.spread)}
  chosen = {
    "one process, all to each host": dict(senders=1, spread=1),
    **(of_engine if sides.spread > 1 else {}),
    "all hosts, all to each host": dict(senders=sides.hosts, spread=1),
    "all hosts, a part to each host": dict(senders=sides.hosts, shares=True, spread=1),
  }
  limits = {"hosts": slow, "links": fast}
  every = [(name, sides._replace(**fields)) for name, fields in chosen.items()]
  return [Way(name, limit, time_of(num_bytes, own, links)) for name, own in every for limit, links in limits.items()]
