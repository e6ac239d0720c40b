"""A Python interpreter that the policy calls in its text with `<code>...</code>`.

The output follows as `<interpreter>...</interpreter>`.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.sandbox import Program, ProgramRefused, Sandbox, SandboxLimits, choose, execute
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
  """Makes a tool that runs the policy's programs, each in a fresh sandbox, and shows their output.

  A turn without a program ends the conversation. `step` raises `ProgramRefused` if the sandbox does
  not run a program. The result is then unknown, and nothing should be learned from the sample.

  Args:
    backend: Backend that runs the programs, one of `sandbox.BACKENDS` or `auto`. There is no
      default, because the user decides where a model's programs run.
    timeout_s: Wall-clock timeout of a program, in seconds.
    memory_gb: Limit of a program's address space, in GiB.
    max_chars: Number of characters of a program's output that the policy sees: the beginning and,
      for an error, also the end.
    image: Container image, for `docker`.
    url: Address of the service, for `sandbox_fusion` and `piston`.

  Raises:
    ValueError: If a limit is out of range or a backend does not work here. The message has the fix.

  References:
    ReTool: Reinforcement Learning for Strategic Tool Use in LLMs, arXiv:2504.11536, 2025 (the
    tags).
  """
  for name, value in dict(timeout_s=timeout_s, memory_gb=memory_gb, max_chars=max_chars).items():
    if not value > 0:
      raise ValueError(f"python tool: found {name}={value}, expected a number above 0")
  sandbox = choose(Sandbox(backend, SandboxLimits(timeout_s=timeout_s, memory_gb=memory_gb), image, url))

  def reset(row: Mapping[str, Any]) -> None:
    del row

  def step(state: None, turn: Completion) -> tuple[None, Reply]:
    call = _CALL.search(turn.text)
    if call is None:
      return state, Reply(done=not turn.text.endswith("</code>"))
    execution = execute(Program(call[1]), sandbox)
    if execution.status == "refused":
      raise ProgramRefused(execution.cause or "the sandbox did not run the program")
    shown = execution.stdout[:max_chars]
    if execution.status == "failed":
      shown += execution.stderr[-max_chars:] if execution.cause == "exit" else f"[{execution.cause}]"
    return state, Reply(f"\n<interpreter>\n{shown.rstrip()}\n</interpreter>\n")

  return Environment(reset, step, stops=("</code>",), replies=r"</code>(\s*<interpreter>.*?</interpreter>\n?)")
