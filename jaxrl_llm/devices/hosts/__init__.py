"""Runs of several processes: joining, exchange of values, and a common end when one of them ends.

Every process runs the same program from its first line to its last, over the same prompts in the
same order, and holds the part of each array that lies on its own devices. Only process 0 writes.
Only rewards are divided: one process computes each of them.
"""

from jaxrl_llm.devices.hosts.common_end import together
from jaxrl_llm.devices.hosts.exchange import (
  Channel,
  agree,
  barrier,
  forget,
  gather_text,
  gather_under,
  is_main,
  on_main,
  preempted,
  share,
  to_host,
  to_main,
  told_to_end,
)
from jaxrl_llm.devices.hosts.interrupts import interrupted, interruptible
from jaxrl_llm.devices.hosts.startup import COLLECTIVES, HEARTBEAT, TIMEOUT, VARIABLES, join_processes

__all__ = [
  "COLLECTIVES", "Channel", "HEARTBEAT", "TIMEOUT", "VARIABLES", "agree", "barrier", "forget", "gather_text", "gather_under", "interrupted",
  "interruptible", "is_main", "join_processes", "on_main", "preempted", "share", "to_host", "to_main", "told_to_end", "together",
]  # fmt: skip
