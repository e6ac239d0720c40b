"""The batches of some RL steps of a run: written while it draws them, and played again in a branch.

A file has an entry STEP/DRAW for each batch: a frame with a digest of its prompts, and the frames
of its conversations. The zip's checksums tell a damaged one.
"""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.frames import Frame
from jaxrl_llm.rollouts.conversation_frames import conversation_frame, conversation_of
from jaxrl_llm.rollouts.jobs import Conversation, Job, PlayFn, Playing

ReplaceFn = Callable[[PlayFn, int, int], PlayFn]
"""`(play, step, draw) -> play`: the player of a batch in place of the run's own.

`step` is the RL step that learns from the batch, from 0, and `draw` its number among those of the
step.
"""


class Recorder:
  """Writes the batches of some steps to a file, which appears once it is complete: a `ReplaceFn`.

  Args:
    path: File to write; None in processes that write nothing.
    steps: RL steps to record, from 0.
  """

  def __init__(self, path: Path | None, steps: range):
    self._path, self._steps, self._file = path, steps, None
    if path is not None:
      self._partial = path.with_name(f"{path.name}.tmp")
      self._file = zipfile.ZipFile(self._partial, "w", zipfile.ZIP_DEFLATED)

  def __call__(self, play: PlayFn, step: int, draw: int) -> PlayFn:
    """Returns a player that also writes what it plays."""
    if self._file is None or step not in self._steps:
      return play
    return lambda engine, job: _Noted(play(engine, job), lambda played: self._write(f"{step}/{draw}", job, played))

  def _write(self, name: str, job: Job, played: list[Conversation]) -> None:
    held = [Frame("batch", {"prompts": _digest(job)}), *map(conversation_frame, played)]
    self._file.writestr(name, frames.joined(held))

  def finish(self) -> None:
    """Completes the file."""
    if self._file is not None:
      self._file.close()
      os.replace(self._partial, self._path)


class _Noted:
  """A `Playing` whose conversations are noted once all have been handed over."""

  def __init__(self, playing: Playing, note: Callable[[list[Conversation]], None]):
    self._playing, self._note = playing, note
    self.wait, self.close = playing.wait, playing.close

  def __iter__(self) -> Iterator[list[Conversation]]:
    played: list[Conversation] = []
    for finished in self._playing:
      played += finished
      yield finished
    self._note(played)


class Recorded:
  """Plays the batches of a file: a `ReplaceFn`.

  A batch that is not there, or has other prompts, is drawn by the run's own player. A run with
  another reward can need one for more refills, or with another choice of its curriculum.

  Args:
    path: File of a `Recorder`.
    steps: RL steps of the file, from 0.
    note: Function that tells of a batch that is drawn all the same.

  Raises:
    ValueError: If the file is damaged. One line.
  """

  def __init__(self, path: Path, steps: range, *, note: Callable[[str], None]):
    self._steps, self._note = steps, note
    try:
      self._file = zipfile.ZipFile(path)
      damaged = self._file.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
      raise ValueError(f"{path}: found no file that can be read ({error}), expected recorded rollouts; begin the branch again") from error
    if damaged is not None:
      raise ValueError(f"{path}: found a damaged {damaged}, expected recorded rollouts; begin the branch again")
    self._names = set(self._file.namelist())

  def __call__(self, play: PlayFn, step: int, draw: int) -> PlayFn:
    """Returns a player of the recorded batch."""
    if step not in self._steps:
      return play

    def again(engine: Any, job: Job) -> Playing:  # Sweeps get weights in its place.
      if (name := f"{step}/{draw}") in self._names:
        batch, *played = frames.parted(self._file.read(name))
        if batch.fields["prompts"] == _digest(job):
          return _Again(list(map(conversation_of, played)))
        why = "it has other prompts than the run had"
      else:
        why = "the run has drawn none"
      self._note(f"RL step {step + 1}: batch {draw + 1} is drawn with the branch's own weights, because {why}")
      return play(engine, job)

    return again


class _Again:
  """A `Playing` of conversations that have all finished."""

  def __init__(self, played: list[Conversation]):
    self._played = played

  def __iter__(self) -> Iterator[list[Conversation]]:
    yield self._played

  def wait(self) -> None:
    """Returns at once: nothing is drawn."""

  def close(self) -> None:
    """Has nothing to give up."""


def _digest(job: Job) -> str:
  shown = [[repr(example["prompt"]), repr(example.get("answer"))] for example in job.examples]
  return hashlib.sha256(json.dumps([shown, job.group_size]).encode()).hexdigest()
