"""Processes of this machine, as tests of workers and sandboxes see them."""

import subprocess
import time


def ps_lines(*columns):
  return subprocess.run(["ps", "-e", "-ww", *columns], capture_output=True, text=True, check=True).stdout.splitlines()


def becomes_true(condition, within_s):
  """Returns whether a condition holds within so many seconds."""
  until = time.monotonic() + within_s
  while not (holds := condition()) and time.monotonic() < until:
    time.sleep(0.02)
  return holds
