"""Chat templates: a checkpoint's own Jinja text writes a conversation as the one string that the model was trained on.

A template is code from whoever published the checkpoint. It runs in Jinja's immutable sandbox and sees text only.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.messages import one_line

Message = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`."""

_ANSWER = "Twelve."
_EXCHANGE = ({"role": "user", "content": "How many?"}, {"role": "assistant", "content": _ANSWER})


class ChatTemplate(NamedTuple):
  """A template with all that it is given but the conversation.

  Attributes:
    source: Jinja text.
    path: where it comes from, for messages.
    variables: names that it may read: special tokens such as `bos_token`, and options of its own such as `enable_thinking`.
  """

  source: str
  path: str
  variables: Mapping[str, Any]


def render(template: ChatTemplate, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
  """A conversation as one string, special tokens written out.

  Args:
    template: the template.
    messages: the conversation.
    add_generation_prompt: whether to end with whatever begins the assistant's turn.

  Raises:
    ValueError: the template does not compile, fails, or refuses the conversation. One line.
    ImportError: without the package jinja2.

  Example:
    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "example", {})
    >>> render(template, [{"role": "user", "content": "1 + 1"}])
    '[user]1 + 1'

  Note:
    Compiled and called as transformers does, so that both write the same string. A template that writes today's date (Llama 3's) makes
    runs differ from day to day: give it the date as one of `variables`, such as `date_string`.
  """
  try:
    return _compile(template.source).render(
      {"tools": None, "documents": None, **template.variables}, messages=list(messages), add_generation_prompt=add_generation_prompt
    )
  except ImportError:
    raise
  except Exception as error:  # Foreign code: it may raise anything.
    roles = ", ".join(message["role"] for message in messages)
    fix = "leave config.task.system unset" if roles.startswith("system") else "set config.task.chat=False to use none"
    raise ValueError(f"{template.path}: the chat template fails on a conversation of {roles} ({one_line(error)}); {fix}") from error


@functools.lru_cache(maxsize=16)
def _compile(source: str):
  try:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
  except ImportError as error:
    raise ImportError("chat templates need the package jinja2: pip install 'jaxrl-llm[hf]'; or set config.task.chat=False") from error

  class Generation(Extension):
    """`{% generation %}` marks what the assistant says, for those who train on it; it writes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  def check_name(name):
    """Underscored attributes would reach into Python."""
    if str(name).startswith("_"):
      raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")

  class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):  # Without names of its own, so that a template may use any.
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

  environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
  environment.filters["tojson"] = tojson
  environment.globals |= {
    "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # A function: the class would bring its methods along.
    "namespace": Namespace,
    "raise_exception": raise_exception,
    "strftime_now": lambda form: datetime.datetime.now().strftime(form),
  }
  return environment.from_string(source)


def turn_end(template: ChatTemplate, special_tokens: Sequence[str]) -> str | None:
  """The one of `special_tokens` with which the template ends the assistant's turn.

  Returns:
    The token; None for a template that ends the turn otherwise, or does not write assistants.

  Example:
    >>> template = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}", "example", {})
    >>> turn_end(template, ["<|end|>", "<|user|>"])
    '<|end|>'
  """
  try:
    text = render(template, _EXCHANGE, add_generation_prompt=False)
  except ValueError:
    return None  # A template that refuses an assistant has no end of its turn; whether it can write prompts is another question.
  tail = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
  return max((token for token in special_tokens if token and tail.startswith(token)), key=len, default=None)


def next_message(template: ChatTemplate, text: str, turn_end_token: str | None) -> str:
  """What stands between the end of the assistant's turn and the beginning of its next one, when the user says `text` in between.

  Args:
    template: the template.
    text: what the user says.
    turn_end_token: of `turn_end`; the policy has written it already.

  Raises:
    ValueError: a template that does not write the conversation's messages one after the other.

  Example:
    >>> source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    >>> source += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    >>> next_message(ChatTemplate(source, "example", {}), "42", "<|end|>")
    '<|user|>42<|end|><|assistant|>'
  """
  _, found, tail = render(template, [*_EXCHANGE, {"role": "user", "content": text}]).partition(_ANSWER)
  if not found or text.strip() not in tail:
    raise ValueError(f"{template.path}: the chat template leaves out a message; set config.task.chat=False to use none")
  return tail.lstrip(" ").removeprefix(turn_end_token or "")
