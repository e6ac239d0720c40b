"""Echoes of a failed save stay off stderr; all other reports through the same channels appear."""

import subprocess
import sys
import textwrap

from tests.runs import ROOT, environment

SCRIPT = textwrap.dedent("""
  import asyncio, gc, logging, sys
  from jaxrl_llm.workdir.checkpoint import orbax_noise

  async def fail(line):
    raise ValueError(line)

  async def start(line):  # A task whose error is never read.
    asyncio.ensure_future(fail(line))
    await asyncio.sleep(0)

  # The same for a function of that file, in a thread of the loop.
  async def start_in_thread(line, file):
    source = {}
    exec(compile("def write(line): raise ValueError(line)", file, "exec"), source)
    asyncio.get_running_loop().run_in_executor(None, source["write"], line)
    await asyncio.sleep(0.1)

  async def async_serialize_of_a_test(): pass
  async def forgotten(): pass

  # An error in `__del__` is unraisable. Its frame is the first one, as in a call from C++.
  def unraisable(line, direct):
    def call_soon_threadsafe(self): raise RuntimeError(line)
    def through(self): call_soon_threadsafe(self)
    type("Dead", (), {"__del__": call_soon_threadsafe if direct else through})()

  orbax_noise.silence()
  orbax_noise.silence()
  asyncio.run(start("echo 1 in OCDBT database")), gc.collect()
  logging.getLogger("absl").error("[thread=x] _SignalingThread.run() raised an exception: echo 2")
  asyncio.run(start_in_thread("echo 3", "packages/orbax/checkpoint/path.py")), gc.collect()
  async_serialize_of_a_test(), gc.collect()
  unraisable("Event loop is closed", direct=True)
  print("echoes are over", file=sys.stderr)
  asyncio.run(start("news 1")), gc.collect()
  logging.getLogger("absl").error("news 2")
  asyncio.run(start_in_thread("news 3", "packages/another/path.py")), gc.collect()
  forgotten(), gc.collect()
  unraisable("news 4", direct=True)
  unraisable("Event loop is closed", direct=False)
""")


def test_only_echoes_are_dropped():
  result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
  echoes, news = result.stderr.split("echoes are over\n")
  assert result.returncode == 0 and not echoes, result.stderr
  assert "ValueError: news 1" in news and "news 2" in news and "ValueError: news 3" in news
  assert "'forgotten' was never awaited" in news and "RuntimeError: news 4" in news
  assert news.count("Event loop is closed") == 1
