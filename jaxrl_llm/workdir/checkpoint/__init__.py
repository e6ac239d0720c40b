"""Checkpoints: all state in one atomic step, with a digest of every file.

A damaged step is reported, and the step before it is restored.
"""

from jaxrl_llm.workdir.checkpoint.manifest import problem, whole_steps
from jaxrl_llm.workdir.checkpoint.restoring import restore_latest
from jaxrl_llm.workdir.checkpoint.saving import save
from jaxrl_llm.workdir.checkpoint.store import Checkpoints, SaveFailedError, failures, finish, open_checkpoints

__all__ = [
  "Checkpoints",
  "SaveFailedError",
  "failures",
  "finish",
  "open_checkpoints",
  "problem",
  "restore_latest",
  "save",
  "whole_steps",
]
