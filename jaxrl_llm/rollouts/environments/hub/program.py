"""The chat program of the package verifiers, run in this process.

Its harness `null` starts a program for each conversation: a loop that asks the policy, calls the
tools that it names, and asks again, until it names none. Python and the clients of OpenAI and MCP
take seconds to start. Here the text of the same program runs as a task of the event loop.
"""

import argparse
import contextvars
import sys
import types
from typing import Any

HARNESS = "jaxrl_llm_chat"
"""Id of the harness for verifiers, which imports harnesses by the name of a module."""


def register() -> None:
  """Makes the harness known to verifiers; may be called more than once."""
  if HARNESS in sys.modules:
    return
  from verifiers.v1.harnesses.null import NullHarness
  from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
  from verifiers.v1.runtimes import ProgramResult

  arguments: contextvars.ContextVar[list[str]] = contextvars.ContextVar("arguments")
  opened: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("opened")
  program: dict[str, Any] = {"__name__": HARNESS, "__file__": HARNESS}
  # The package would write it to a file and run that.
  exec(compile(CHAT_PROGRAM_SOURCE, HARNESS, "exec"), program)

  class Parser(argparse.ArgumentParser):
    """Parser of the arguments of the current task."""

    def parse_args(self) -> argparse.Namespace:
      return super().parse_args(arguments.get())

  def open_client(**kwargs: Any) -> Any:
    """Opens a client that is closed with the conversation, as by the end of a process."""
    import httpx

    # Only this machine is called. Loading the certificates would take longer than the conversation.
    client = httpx.AsyncClient(**(kwargs | {"verify": False}), trust_env=False)
    opened.get().append(client)
    return client

  program["argparse"] = types.SimpleNamespace(ArgumentParser=Parser, Namespace=argparse.Namespace)
  program["DefaultAsyncHttpxClient"] = open_client

  class ChatHarness(NullHarness):
    """Harness `null` without a process of its own."""

    async def setup(self, runtime: Any) -> None:
      """Prepares nothing: the program is loaded."""

    async def launch(
      self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> Any:
      """Runs the program to its end."""
      launched = Launched(runtime)
      # `launch` of the class above, with a runtime that runs the program here.
      return await super().launch(ctx, trace, launched, endpoint, secret, mcp_urls, data, tool_interception_url)

  class Launched:
    """Runtime whose programs are the chat program in this process."""

    def __init__(self, runtime: Any):
      self.runtime = runtime

    async def prepare_uv_script(self, *args: Any, **kwargs: Any) -> list[str]:
      return []

    async def write(self, path: str, data: bytes) -> None:
      await self.runtime.write(path, data)

    async def run_program(self, argv: list[str], env: dict[str, str]) -> Any:
      prefix = "--initial-messages-file="
      arguments.set([prefix + str(self.runtime.workdir / x[len(prefix) :]) if x.startswith(prefix) else x for x in argv])
      opened.set([])
      try:
        await program["main"]()
      except SystemExit as error:
        return ProgramResult(exit_code=int(error.code or 0), stdout="", stderr="the connection to the policy was lost")
      finally:
        for client in opened.get():
          await client.aclose()
      return ProgramResult(exit_code=0, stdout="", stderr="")

  module = types.ModuleType(HARNESS, __doc__)
  module.ChatHarness, module.__all__ = ChatHarness, ["ChatHarness"]
  ChatHarness.__module__ = HARNESS
  sys.modules[HARNESS] = module
