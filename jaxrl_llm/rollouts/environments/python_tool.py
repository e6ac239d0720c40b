"""A Python interpreter inside the policy's text: it writes `<code>...</code>`, and reads `<interpreter>...</interpreter>`."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.sandbox import Limits, Program, Refused, Sandbox, choose, execute
from jaxrl_llm.rollouts.environments.protocol import Environment, Reply
from jaxrl_llm.text_types import Completion

_CALL = re.compile(r"<code>(?:\s*```(?:python|py)?[ \t]*\n)?(.*?)(?:```\s*)?</code>\Z", re.DOTALL)


def python_tool(
  backend: str,
  *,
  timeout_s: float = 10.0,
  memory_gb: float = 1.0,
  max_chars: int = 1000,
  image: str = Sandbox().image,
  url: str = "",
) -> Environment:
  """Runs the programs that the policy writes, each in a fresh sandbox, and shows it what they print.

  A turn that runs nothing ends the conversation. `step` raises `Refused` if the sandbox does not run a program: nothing is known then,
  and the sample is not to be learned from.

  Args:
    backend: Where programs run, see `sandbox.BACKENDS`, or `auto`. There is no default: where a model's programs run is for you to say.
    timeout_s: Wall time limit of a program, in seconds.
    memory_gb: Limit of its address space, in GiB.
    max_chars: Number of characters of its output that the policy sees: the beginning and, of an error, the end.
    image: Image of the container, for `docker`.
    url: Address of the service, for `sandbox_fusion` and `piston`.

  Raises:
    ValueError: A limit is out of range, or a back end does not work here, with what to do.

  References:
    ReTool: Reinforcement Learning for Strategic Tool Use in LLMs, arXiv:2504.11536, 2025 (the tags).
  """
  for name, value in dict(timeout_s=timeout_s, memory_gb=memory_gb, max_chars=max_chars).items():
    if not value > 0:
      raise ValueError(f"python tool: found {name}={value}, expected more than 0")
  sandbox = choose(Sandbox(backend, Limits(timeout_s=timeout_s, memory_gb=memory_gb), image, url))

  def reset(row: Mapping[str, Any]) -> None:
    del row

  def step(state: None, turn: Completion) -> tuple[None, Reply]:
    call = _CALL.search(turn.text)
    if call is None:
      return state, Reply(done=not turn.text.endswith("</code>"))
    found = execute(Program(call[1]), sandbox)
    if found.status == "refused":
      raise Refused(found.cause or "the sandbox did not run the program")
    shown = found.stdout[:max_chars]
    if found.status == "failed":
      shown += found.stderr[-max_chars:] if found.cause == "exit" else f"[{found.cause}]"
    return state, Reply(f"\n<interpreter>\n{shown.rstrip()}\n</interpreter>\n")

  return Environment(reset, step, stops=("</code>",), replies=r"</code>(\s*<interpreter>.*?</interpreter>\n?)")
