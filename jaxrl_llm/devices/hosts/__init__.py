"""Several processes as one run: how they find each other, what they tell each other, and how all of them end when one does.

Every process runs this program from its first line to its last over the same prompts in the same order, and holds its own devices' part of
each array. What one of them alone does is to write (process 0), and what they divide are rewards, each of which is computed once.
"""

from jaxrl_llm.devices.hosts.ending import together
from jaxrl_llm.devices.hosts.exchange import (
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
  told_to_end,
)
from jaxrl_llm.devices.hosts.interrupting import interrupted, interruptible
from jaxrl_llm.devices.hosts.joining import COLLECTIVES, HEARTBEAT, TIMEOUT, VARIABLES, start

__all__ = [
  "COLLECTIVES", "HEARTBEAT", "TIMEOUT", "VARIABLES", "agree", "barrier", "forget", "gather_text", "gather_under", "interrupted",
  "interruptible", "is_main", "on_main", "preempted", "share", "start", "to_host", "told_to_end", "together",
]  # fmt: skip
