"""Chat templates, which render a conversation as the string that a model was trained on.

A template is Jinja code from the publisher of the checkpoint. It runs in Jinja's immutable sandbox
and sees only text.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.messages import MissingPackageError, one_line
from jaxrl_llm.pretrained import special_text

Message = Mapping[str, Any]
"""`{"role": "system" | "user" | "assistant", "content": content}`.

The content is a text, or a list of `{"type": "text", "text": text}` and `{"type": "image"}`.
"""

CLOCK = "strftime_now"
"""Function by which templates read the date, and the option that sets it."""
DATE = "2024-07-26"
"""Date that templates read unless the option `strftime_now` gives another.

It never changes, so that a run that is resumed has the prompts that it began with. This one is the
default of Meta's templates, as they are without a clock.
"""
INPUTS = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that are no options."""

_ANSWER, _MARK = "Twelve.", "7301946"
_EXCHANGE = ({"role": "user", "content": "How many?"}, {"role": "assistant", "content": _ANSWER})


class ChatTemplate(NamedTuple):
  """A chat template with all of its inputs except the conversation.

  Attributes:
    source: Jinja source.
    path: Origin of the template, for error messages.
    variables: Variables that the template may read: special tokens such as `bos_token`, and options
      of its own such as `enable_thinking`.
    special: Names of special tokens that messages may spell without meaning the token; `render`
      hides them (see `special_text`).
  """

  source: str
  path: str
  variables: Mapping[str, Any]
  special: tuple[str, ...] = ()


def render(template: ChatTemplate, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
  """Renders a conversation as one string, with special tokens written out.

  Args:
    template: Template to render.
    messages: Messages of the conversation.
    add_generation_prompt: Whether to end with the beginning of the assistant's turn.

  Raises:
    ValueError: If the template does not compile, fails, or refuses the conversation. One line.
    MissingPackageError: If the package jinja2 is not installed.

  Example:
    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "example", {})
    >>> render(template, [{"role": "user", "content": "1 + 1"}])
    '[user]1 + 1'

  Note:
    The template is compiled and called as in transformers, so that both give the same string. Only
    today's date is not read: see `DATE`.
  """
  variables = {"tools": None, "documents": None, **template.variables}
  variables[CLOCK] = clock(variables.get(CLOCK, DATE))
  messages, variables["tools"] = special_text.hide([list(messages), variables["tools"]], template.special)
  try:
    return _compile(template.source).render(variables, messages=messages, add_generation_prompt=add_generation_prompt)
  except ImportError:
    raise
  except Exception as error:  # Third-party code may raise anything.
    roles = ", ".join(message["role"] for message in messages)
    fix = "leave config.task.system unset" if roles.startswith("system") else "set config.task.chat=False to use none"
    raise ValueError(f"{template.path}: the chat template fails on a conversation of {roles} ({one_line(error)}); {fix}") from error


def clock(date: Any) -> Callable[[str], str]:
  """Returns the function `strftime_now` of templates, for a fixed date."""
  day = datetime.datetime.strptime(date, "%Y-%m-%d")
  return lambda form: day.strftime(form)


@functools.lru_cache(maxsize=16)
def _compile(source: str):
  return environment().from_string(source)


def environment():
  """Makes the sandbox of templates, with all that transformers lets them use."""
  try:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
  except ImportError as error:
    raise MissingPackageError(
      "chat templates need the package jinja2: pip install 'jaxrl-llm[hf]'; or set config.task.chat=False"
    ) from error

  class Generation(Extension):
    """Tag `{% generation %}`, which marks the assistant's text for training and writes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  def check_name(name):
    """Refuses names with a leading underscore, which would reach into Python."""
    if str(name).startswith("_"):
      raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")

  class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):  # No named parameters, so that a template may use any name.
      for name in dict(*args[1:], **kwargs):
        check_name(name)
      jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name, value):
      check_name(name)
      jinja2.utils.Namespace.__setitem__(self, name, value)

  def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)

  # Jinja's own filter escapes HTML.
  def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
  made.filters["tojson"] = tojson
  made.globals |= {
    # A function, because the class would expose its methods.
    "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    "namespace": Namespace,
    "raise_exception": raise_exception,
  }
  return made


def turn_end(template: ChatTemplate, special_tokens: Sequence[str]) -> str | None:
  """Returns the special token with which the template ends the assistant's turn.

  Returns:
    The token, one of `special_tokens`. None if the template ends the turn in another way or does
    not render assistant messages.

  Example:
    >>> template = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}", "example", {})
    >>> turn_end(template, ["<|end|>", "<|user|>"])
    '<|end|>'
  """
  try:
    text = render(template, _EXCHANGE, add_generation_prompt=False)
  except ValueError:
    # A template that refuses assistant messages has no end of turn. It may still render prompts.
    return None
  tail = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
  return max((token for token in special_tokens if token and tail.startswith(token)), key=len, default=None)


def next_messages(template: ChatTemplate, messages: Sequence[Message], turn_end_token: str | None) -> str:
  """Returns the text from the end of one assistant turn to the beginning of the next.

  Args:
    template: Template to render.
    messages: Messages in between. The template may write them in any spelling, as JSON or trimmed.
    turn_end_token: Token returned by `turn_end`, which the policy has already written.

  Raises:
    ValueError: If the template does not write the messages of the conversation one after the other.

  Example:
    >>> source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    >>> source += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    >>> next_messages(ChatTemplate(source, "example", {}), [{"role": "user", "content": "42"}], "<|end|>")
    '<|user|>42<|end|><|assistant|>'
  """
  missing = left_out(template, [*_EXCHANGE, *messages], first=len(_EXCHANGE))
  _, separator, tail = render(template, [*_EXCHANGE, *messages]).partition(_ANSWER)
  if missing or not separator:
    role = missing["role"] if missing else "assistant"
    raise ValueError(f"{template.path}: the chat template leaves out a message ({role}); set config.task.chat=False to use none")
  return tail.lstrip(" ").removeprefix(turn_end_token or "")


def left_out(
  template: ChatTemplate, messages: Sequence[Message], *, first: int = 0, write: Callable[[Sequence[Message]], str] | None = None
) -> Message | None:
  """Returns the first message whose content changes nothing in what the template writes.

  Those with calls of tools do not count, because templates may write the calls alone.

  Args:
    template: Template to render.
    messages: Messages of the conversation, with texts as contents.
    first: Number of the first message to try.
    write: Function from messages to the text of the conversation; None for `render`.

  Raises:
    ValueError: If the template does not render the conversation. One line.

  Example:
    >>> template = ChatTemplate("{{ messages[0].content | tojson }}", "example", {})
    >>> left_out(template, [{"role": "user", "content": 'a "b"'}, {"role": "tool", "content": "c"}])
    {'role': 'tool', 'content': 'c'}
  """
  write = functools.partial(render, template) if write is None else write
  text = write(messages)
  tried = [i for i in range(first, len(messages)) if not messages[i].get("tool_calls")]
  for i in _suspects(messages, tried, write):
    other = {**messages[i], "content": f"0{messages[i]['content']}"}
    if write([*messages[:i], other, *messages[i + 1 :]]) == text:
      return messages[i]
  return None


def _suspects(messages: Sequence[Message], tried: Sequence[int], write: Callable[[Sequence[Message]], str]) -> list[int]:
  """Returns which of the tried messages are not written as they are, by one conversation of marks.

  Each message has a number as its content there, which is the same in JSON and in capitals.
  """
  marks = {i: f"{_MARK}{i:06d}" for i in tried}
  try:
    text = write([{**message, "content": marks[i]} if i in marks else message for i, message in enumerate(messages)])
  except ValueError:  # A template that demands some form of contents.
    return list(tried)
  written = set(re.findall(rf"{_MARK}[0-9]{{6}}", text))
  return [i for i in tried if marks[i] not in written]
