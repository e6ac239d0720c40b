"""Which weights drew which token of a run: written down, and repeated.

Draws depend on keys and weights alone, so what varies from one asynchronous run to the next is when
new weights reached the sampler. `WORKDIR/schedule.jsonl` records that. Its lines, one for each
batch of rollouts, are all that it takes to repeat a run to the last bit, at any speed:

  {"step": 7, "draw": 0, "settings": "5c1d...", "tokens": 30541989, "turns": [[[6, 31, 7, 12]]]}

`turns` has a list for each sequence, and in it one for each turn that was drawn: versions of the
weights, each with the number of tokens that it drew. `tokens` is a checksum of what was drawn, and
`settings` one of the config. With a window, `groups` has the numbers of the groups that the step
learned from; see `window`.
"""

import hashlib
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rollouts.jobs import Conversation, turn_seed

FILE = "schedule.jsonl"


TurnVersions = tuple[tuple[int, int], ...]
"""How a turn was drawn: versions of the weights, each with the number of tokens that it drew."""


class Batch(NamedTuple):
  """How a batch of rollouts was drawn, and what is in it.

  Attributes:
    step: RL step that learned from it, from 0.
    draw: Number of the batch among those of the step, from 0.
    settings: Checksum of the config; see `checksum_of`.
    tokens: Checksum of the tokens; see `checksum_of_tokens`.
    turns: Turns of each sequence.
    groups: Numbers of the groups, n of each step and from 0; empty if they are the step's own.
  """

  step: int
  draw: int
  settings: str
  tokens: int
  turns: tuple[tuple[TurnVersions, ...], ...]
  groups: tuple[int, ...] = ()


def places_of(step: int, size: int, groups: Sequence[int]) -> list[tuple[int, int]]:
  """Returns the step that each sequence of a batch was begun for, and its number among those.

  Args:
    step: RL step that learns from the batch.
    size: Number of sequences of a step.
    groups: Numbers of the groups of the batch; empty if they are the step's own.

  Example:
    >>> places_of(1, 4, [1, 2]), places_of(1, 2, [])
    ([(0, 2), (0, 3), (1, 0), (1, 1)], [(1, 0), (1, 1)])
  """
  group_size = size // (len(groups) or 1)
  numbers = [group * group_size + i for group in groups or [step] for i in range(group_size)]
  return [divmod(number, size) for number in numbers]


def checksum_of(settings: Mapping[str, Any]) -> str:
  """Returns a checksum of a config's fields.

  Example:
    >>> checksum_of({"seed": 0}) == checksum_of({"seed": 0}), checksum_of({"seed": 0}) == checksum_of({"seed": 1})
    (True, False)
  """
  return hashlib.sha256(json.dumps(dict(settings), sort_keys=True, default=repr).encode()).hexdigest()[:12]


def checksum_of_tokens(played: Sequence[Conversation]) -> int:
  """Returns a checksum of the tokens of conversations, in the order of their sequences."""
  total = 0
  for conversation in sorted(played, key=lambda conversation: conversation.sequence):
    total = zlib.crc32(np.array([len(conversation.tokens), *conversation.tokens], "<i4").tobytes(), total)
  return total


def versions_of(conversation: Conversation, turns: Sequence[TurnVersions]) -> list[int]:
  """Returns the version of the weights that drew each token, -1 for replies.

  Example:
    >>> conversation = Conversation(0, (), (5, 6, 7), (-1.0,) * 3, (True, False, True), (), 0)
    >>> versions_of(conversation, [((2, 1),), ((3, 1),)])
    [2, -1, 3]
  """
  drawn = iter([version for turn in turns for version, count in turn for _ in range(count)])
  return [next(drawn, -1) if own else -1 for own in conversation.written]


def to_line(batch: Batch) -> str:
  """Converts a batch to a line of the file.

  Example:
    >>> batch = Batch(1, 0, "5c1d", 7, ((((1, 3), (2, 4)),),))
    >>> to_line(batch)
    '{"step":1,"draw":0,"settings":"5c1d","tokens":7,"turns":[[[1,3,2,4]]]}'
    >>> from_line(to_line(batch)) == batch
    True
  """
  turns = [[[x for part in turn for x in part] for turn in turns] for turns in batch.turns]
  row = {name: x for name, x in batch._asdict().items() if name != "groups" or x}
  return json.dumps(row | {"turns": turns}, separators=(",", ":"))


def from_line(line: str) -> Batch:
  """Inverts `to_line`.

  Raises:
    ValueError: If the line is damaged.
  """
  try:
    row = json.loads(line)
    turns = tuple(tuple(tuple(zip(x[::2], x[1::2], strict=True)) for x in own) for own in row["turns"])
    return Batch(row["step"], row["draw"], row["settings"], row["tokens"], turns, tuple(row.get("groups", ())))
  except (KeyError, TypeError, IndexError) as error:
    raise ValueError(f"found {line[:60]!r}, expected a batch of a schedule") from error


def read(folder: Path) -> list[Batch]:
  """Reads the schedule of a run; a last line that was cut while it was written is left out.

  Raises:
    ValueError: If another line is damaged. One line, which names the file.
  """
  path = folder / FILE
  lines = path.read_text().splitlines() if path.exists() else []
  batches: list[Batch] = []
  for number, line in enumerate(lines, 1):
    try:
      batches.append(from_line(line))
    except ValueError as error:
      if number == len(lines):
        break
      raise ValueError(f"{path}: line {number}: {error}") from error
  return batches


class Schedule:
  """The schedule of a run as it is written, and what is known beforehand because it is repeated.

  What a run has done since its last checkpoint it does again in the same way once it resumes.

  Args:
    folder: Workdir of the run; None writes nothing.
    settings: Checksum of the run's config. What was drawn with another one is not repeated.
    alike: Further checksums of the same config, in the fields of earlier versions.
    first: Number of RL steps behind the run.
    repeated: Schedule of another run to repeat; None repeats this run's own.
  """

  def __init__(
    self, folder: Path | None, settings: str, *, first: int, repeated: Sequence[Batch] | None = None, alike: Collection[str] = ()
  ):
    own = [] if folder is None else read(folder)
    kept = [batch for batch in own if batch.step < first or batch.settings in {settings, *alike}]
    self._settings, self._path = settings, None if folder is None else folder / FILE
    if self._path is not None and (own or self._path.exists()):
      # Without a line that was cut, or that other settings have made void.
      temporary = self._path.with_suffix(".tmp")
      temporary.write_text("".join(f"{to_line(batch)}\n" for batch in kept))
      temporary.replace(self._path)
    self._written = {(batch.step, batch.draw) for batch in kept}
    self._known = {(batch.step, batch.draw): batch for batch in (kept if repeated is None else repeated) if batch.step >= first}
    self._turns: dict[tuple[int, int], dict[int, tuple[TurnVersions, ...]]] = {}
    for batch in self._known.values():
      places = places_of(batch.step, len(batch.turns), batch.groups)
      for (step, sequence), turns in zip(places, batch.turns, strict=True):
        self._turns.setdefault((step, batch.draw), {})[sequence] = turns

  def known(self, step: int, draw: int) -> Batch | None:
    """Returns what a step is to learn from; None if that is open."""
    return self._known.get((step, draw))

  def turns(self, step: int, draw: int, seeds: Sequence[int]) -> dict[int, TurnVersions]:
    """Returns how turns are to be drawn that are begun for a step, by the seed of their request.

    `seeds` are those of its sequences. What is missing is open.
    """
    known = self._turns.get((step, draw), {})
    return {turn_seed(seeds[sequence], i): turn for sequence, turns in known.items() for i, turn in enumerate(turns)}

  def note(
    self, step: int, draw: int, played: Sequence[Conversation], turns: Sequence[Sequence[TurnVersions]], groups: Sequence[int] = ()
  ) -> None:
    """Writes down how a batch was drawn.

    Raises:
      ReplayDiffersError: If it is a repeated one and its tokens differ.
    """
    batch = Batch(step, draw, self._settings, checksum_of_tokens(played), tuple(map(tuple, turns)), tuple(groups))
    known = self._known.get((step, draw))
    if known is not None and known.tokens != batch.tokens:
      raise ReplayDiffersError(
        f"replay: the rollouts of step {step + 1} have the checksum {batch.tokens}, expected {known.tokens}: other devices or package "
        "versions round differently, and an environment may have answered in another way"
      )
    if self._path is None or (step, draw) in self._written:
      return
    self._written.add((step, draw))
    with self._path.open("a") as file:
      file.write(f"{to_line(batch)}\n")


class ReplayDiffersError(RuntimeError):
  """A repeated run draws other tokens than the first one. The message is one line."""
