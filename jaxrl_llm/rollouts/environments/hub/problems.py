"""Problems of an environment: their first messages, which only its programs know, and lessons.

A lesson is a conversation that a teacher holds in the place of the policy, for a warm start.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.messages import one_line
from jaxrl_llm.pretrained.chat_messages import split_calls
from jaxrl_llm.rollouts.drafts import Draft
from jaxrl_llm.rollouts.environments.hub.conversation import ProgramTurn, TurnRefused
from jaxrl_llm.rollouts.environments.hub.hub import open_hub
from jaxrl_llm.text_types import Turn

_AT_ONCE = 16
_START_S = 60.0  # Programs that start all at once take longer than a turn.

TeachFn = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], int], str]
"""`(messages, tools, seed) -> text`, the teacher's next turn in a conversation.

The seed is for teachers that are wrong at times. That of a problem's first lesson is its number.
"""

_SEEDS = 1 << 32  # Distance of the seeds of a problem's lessons, beyond the number of any problem.


class Opening:
  """A conversation without the policy, in the place of a `ProgramConversation`.

  Without a teacher it ends at its first request.

  Args:
    index: Number of the problem.
    teach: Teacher that plays it to its end; None for none.
    number: Number of the lesson among those of the problem.

  Attributes:
    draft: Draft of a `ProgramConversation`, of which only `turns` and `failed` are used.
    messages: Messages of the first request; None before it.
    tools: Tools of that request.
    lesson: The teacher's turns, each with the messages that followed.
  """

  def __init__(self, index: int, teach: TeachFn | None, number: int = 0):
    self.index, self.teach, self.seed = index, teach, index + number * _SEEDS
    self.messages, self.tools, self.lesson = None, [], []
    self.draft, self.traces, self.broken, self.idle_since = Draft(index), [], None, 0.0

  def fail(self, cause: str, line: str) -> None:
    """Says why it has not begun."""
    self.draft.failed = self.draft.failed or (cause, line)

  async def draw(self, messages, tools, known, num_new, limit) -> Any:
    """Keeps the request, and ends the conversation."""
    if self.messages is None:
      self.messages, self.tools = messages, tools
      if self.teach is None:
        self.fail("opened", "its first request is known")
    if self.draft.failed:
      raise TurnRefused("maximum context length: only the first request is asked for")
    if self.lesson:
      self.lesson[-1][1].extend(messages[len(messages) - num_new :])
    try:
      text = str(self.teach(messages, tools, self.seed))
    # The teacher is the user's own function, and may raise anything.
    except Exception as error:
      self.fail("teacher", f"the teacher raised {one_line(error)}")
      raise TurnRefused(one_line(error)) from error
    self.lesson.append((text, []))
    self.draft.turns.append(Turn(text, "", 0.0, 0))
    self.idle_since = time.monotonic()
    return ProgramTurn([], [], [], *split_calls(text, tools), True, False)


def openings(
  name: str, harness: str | None, settings: str, indices: Sequence[int], *, timeout_s: float, teach: TeachFn | None = None,
  num_lessons: int = 1,
) -> list[dict[str, Any]]:
  """Begins the given tasks of an environment, and returns what its programs ask the policy first.

  Args:
    name: Id of the environment.
    harness: Id of the harness; None for the default.
    settings: Settings of the environment's config as a JSON object.
    indices: Numbers of the tasks.
    timeout_s: Limit on the start of a program, in seconds, if it is above a minute.
    teach: Teacher that plays the tasks to their end; None for no lessons.
    num_lessons: Number of times that it plays each, with other seeds.

  Raises:
    ValueError: If the environment cannot be loaded, or a task does not begin. One line.
  """
  hub, count = open_hub(name, harness, settings), 1 if teach is None else num_lessons

  async def begin(index: int, number: int, gate: asyncio.Semaphore) -> tuple[Opening, Any]:
    async with gate:
      opening = Opening(index, teach, number)
      return opening, await hub.play(opening, index, max(timeout_s, _START_S))

  async def begin_all() -> list[tuple[Opening, Any]]:
    gate = asyncio.Semaphore(_AT_ONCE)
    return await asyncio.gather(*(begin(index, number, gate) for index in indices for number in range(count)))

  hub.task(max(indices))  # Made here, so that the event loop is not held up.
  rows, begun = [], iter(asyncio.run_coroutine_threadsafe(begin_all(), hub.loop).result())
  for index in indices:
    own = [next(begun) for _ in range(count)]
    for opening, episode in own:
      failed = opening.draft.failed
      if opening.messages is None or (failed or ("opened",))[0] != "opened":
        errors = [] if episode is None else [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        errors = [] if failed else errors
        line = f"{errors[-1].type}: {errors[-1].message}" if errors else (failed or ("", "it ended without a request"))[1]
        raise ValueError(f"environment.name: verifiers:{name}, problem {index}: the policy was asked nothing ({one_line(line)})")
    opening = own[0][0]
    question = "\n".join(text for text in (_text(message) for message in opening.messages) if text)
    lessons = {} if teach is None else {"lessons": json.dumps([opening.lesson for opening, _ in own])}
    asked = {"messages": json.dumps(opening.messages), "tools": json.dumps(opening.tools)}
    rows.append({"question": question, "seed": index} | asked | lessons)
  return rows


def _text(message: dict[str, Any]) -> str:
  content = message.get("content") or ""
  return content if isinstance(content, str) else "\n".join(part.get("text", f"<{part.get('type')}>") for part in content)
