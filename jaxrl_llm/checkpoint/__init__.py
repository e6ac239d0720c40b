"""Checkpoints: all state in one atomic step, with a digest of every file; a damaged step is named, and the one before it taken."""

from jaxrl_llm.checkpoint.manifest import problem
from jaxrl_llm.checkpoint.saving import open_checkpoints, restore_latest, save, whole_steps

__all__ = ["open_checkpoints", "problem", "restore_latest", "save", "whole_steps"]
