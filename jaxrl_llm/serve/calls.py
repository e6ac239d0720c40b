"""What a client asks for, from the JSON of three routes to requests of the engine."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxrl_llm.decoding.engine.requests import EngineLimits, Request
from jaxrl_llm.messages import one_line, shown
from jaxrl_llm.pretrained.chat_messages import opening_text
from jaxrl_llm.pretrained.chat_template import ChatTemplate
from jaxrl_llm.serve import fields
from jaxrl_llm.serve.conversation import read_messages, with_options
from jaxrl_llm.serve.refusals import Refusal, hint, wrong
from jaxrl_llm.serve.tools import read_tools
from jaxrl_llm.text_types import Tokenizer

MAX_CHOICES = 128
MAX_STOPS, LONGEST_STOP, MAX_STOP_IDS, LONGEST_SALT = 32, 128, 64, 256
MAX_SEED = 2**64 - 1  # Any seed of a run's own requests.
_DEFAULT_COMPLETION_TOKENS = 16
_CHARACTERS_PER_TOKEN = 16

_SAMPLING = frozenset(
  "ignore_eos logprobs max_tokens n seed skip_special_tokens stop stop_token_ids temperature top_k top_p".split()
)
_EXPERTS_START = "routed_experts_prompt_start"
_GENERATE = frozenset("cache_salt model return_token_ids sampling_params stream token_ids".split())
_OPENAI = _SAMPLING | frozenset("cache_salt model return_token_ids return_tokens_as_token_ids stream stream_options".split())
_CHAT = _OPENAI | frozenset("chat_template_kwargs max_completion_tokens messages tool_choice tools".split())
_COMPLETION = _OPENAI | {"prompt"}


class Served(NamedTuple):
  """The checkpoint that calls are made to.

  Attributes:
    name: Name of the model.
    tokenizer: Tokenizer of the checkpoint.
    limits: Limits of the engine.
    vocab_size: Number of ids that the model reads and draws, at least those of the tokenizer.
  """

  name: str
  tokenizer: Tokenizer
  limits: EngineLimits
  vocab_size: int

  @property
  def chat_template(self) -> ChatTemplate | None:
    """Chat template of the checkpoint; None if it has none."""
    return getattr(self.tokenizer, "chat_template", None)


class Format(NamedTuple):
  """A format of OpenAI's.

  Attributes:
    prefix: Beginning of the answers' ids.
    whole: Type of a whole answer.
    chunk: Type of a chunk.
    is_chat: Whether the text is a message.
  """

  prefix: str
  whole: str
  chunk: str
  is_chat: bool


CHAT = Format("chatcmpl", "chat.completion", "chat.completion.chunk", True)
COMPLETION = Format("cmpl", "text_completion", "text_completion", False)


class Call(NamedTuple):
  """A client's request, checked.

  Attributes:
    prompts: Token ids of each prompt.
    requests: Requests of the engine: the choices of the first prompt, then those of the next.
    form: Format of the answer; None for that of `/inference/v1/generate`.
    stream: Whether to send the completion while it is drawn.
    usage: Whether a stream ends with the numbers of tokens.
    logprobs: Whether to return log-probabilities.
    names_ids: Whether log-probabilities name tokens by id, as "token_id:N".
    returns_ids: Whether to return the token ids of prompt and completion.
    skip_special: Whether the text leaves out special tokens.
    routes_from: Number of the first token whose experts are returned, if the engine records them.
    tools: Tools whose calls are read from completions.
  """

  prompts: list[list[int]]
  requests: list[Request]
  form: Format | None = None
  stream: bool = False
  usage: bool = False
  logprobs: bool = False
  names_ids: bool = False
  returns_ids: bool = False
  skip_special: bool = True
  routes_from: int = 0
  tools: tuple[Mapping[str, Any], ...] = ()


def parse_json(body: bytes) -> dict[str, Any]:
  """Parses the body of a request.

  Raises:
    Refusal: If it is not an object in JSON and UTF-8.

  Example:
    >>> parse_json(b'{"temperature": NaN}')
    Traceback (most recent call last):
    ...
    jaxrl_llm.serve.refusals.Refusal: the body is not JSON (ValueError: NaN is no number of JSON)
  """

  def refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")

  try:
    values = json.loads(body.decode("utf-8"), parse_constant=refuse)
  # Deep nesting exhausts the stack of the parser.
  except (ValueError, RecursionError) as error:
    raise Refusal(400, f"the body is not JSON ({one_line(error)})", code="invalid_json") from error
  if not isinstance(values, dict):
    raise Refusal(400, f"the body is a JSON {type(values).__name__}, expected an object", code="invalid_json")
  return values


def generate(values: Mapping[str, Any], served: Served) -> Call:
  """Reads a call of `/inference/v1/generate`: token ids in, token ids out.

  Raises:
    Refusal: If a field is wrong.
  """
  fields.check_names(values, _GENERATE)
  _check_model(values, served)
  sampling = values.get("sampling_params", {})
  if not isinstance(sampling, dict):
    raise wrong("sampling_params", sampling, "an object")
  fields.check_names(sampling, _SAMPLING | {_EXPERTS_START}, inside="sampling_params.")
  if fields.flag(values, "stream", False):
    raise wrong("stream", True, "false; the other routes stream")
  prompt = _prompt_ids(values.get("token_ids"), "token_ids", served)
  make = _request_maker(sampling, served, salt=_salt(values), budget=None, inside="sampling_params.")
  logprobs = fields.whole(sampling, "logprobs", None, low=0, high=1, inside="sampling_params.") is not None
  routes_from = fields.whole(sampling, _EXPERTS_START, 0, low=0, high=len(prompt), inside="sampling_params.")
  returns_ids = fields.flag(values, "return_token_ids", False)
  return Call([prompt], make(prompt), logprobs=logprobs, names_ids=True, returns_ids=returns_ids, routes_from=routes_from)


def completion(values: Mapping[str, Any], served: Served) -> Call:
  """Reads a call of `/v1/completions`: one prompt or several, as texts or token ids.

  Raises:
    Refusal: If a field is wrong.
  """
  fields.check_names(values, _COMPLETION)
  _check_model(values, served)
  prompts = _prompts(values.get("prompt"), served)
  make = _request_maker(values, served, salt=_salt(values), budget=_DEFAULT_COMPLETION_TOKENS)
  requests = [request for prompt in prompts for request in make(prompt)]
  if len(requests) > served.limits.requests:
    raise wrong("prompt", f"{len(requests)} completions", f"at most {served.limits.requests}, the open requests of the service")
  logprobs = fields.whole(values, "logprobs", None, low=0, high=1) is not None
  return Call(prompts, requests, COMPLETION, logprobs=logprobs, **_options(values))


def chat(values: Mapping[str, Any], served: Served) -> Call:
  """Reads a call of `/v1/chat/completions`: a conversation that the checkpoint's template renders.

  Raises:
    Refusal: If a field is wrong, or the checkpoint has no chat template.
  """
  fields.check_names(values, _CHAT)
  _check_model(values, served)
  template = served.chat_template
  if template is None:
    raise Refusal(400, "the checkpoint has no chat template; call /v1/completions with a prompt", code="no_chat_template")
  template = with_options(template, values.get("chat_template_kwargs"))
  messages, tools = read_messages(values.get("messages"), most=served.limits.context), read_tools(values)
  try:
    text = opening_text(messages, tools, template)
  except ValueError as error:
    # The error's own text names the file of the template.
    reason = one_line(error.__cause__ or "it cannot be rendered", typed=False)
    raise Refusal(400, f"messages: the checkpoint's chat template refuses the conversation ({reason})", field="messages") from error
  prompt = _checked(_encode(text, "messages", served), "messages", served)
  budget = {"max_tokens": values.get("max_completion_tokens")} if values.get("max_completion_tokens") is not None else {}
  field = "max_completion_tokens" if budget else "max_tokens"
  make = _request_maker({**values, **budget}, served, salt=_salt(values), budget=None, budget_field=field)
  return Call([prompt], make(prompt), CHAT, logprobs=fields.flag(values, "logprobs", False), tools=tools, **_options(values))


def _check_model(values: Mapping[str, Any], served: Served) -> None:
  name = fields.text(values, "model", served.name, most=1000)
  if name != served.name:
    message = f"model: found {shown(name)}, expected {served.name!r}, the only model of this service{hint(name, [served.name])}"
    raise Refusal(404, message, field="model", code="model_not_found")


def _options(values: Mapping[str, Any]) -> dict[str, bool]:
  stream = fields.flag(values, "stream", False)
  options = values.get("stream_options")
  if options is not None and not isinstance(options, dict):
    raise wrong("stream_options", options, "an object")
  if options:
    fields.check_names(options, ("include_usage", "continuous_usage_stats", "include_obfuscation"), inside="stream_options.")
    if fields.flag(options, "continuous_usage_stats", False, inside="stream_options."):
      raise wrong("stream_options.continuous_usage_stats", True, "false")
  return dict(
    stream=stream,
    usage=fields.flag(options or {}, "include_usage", False, inside="stream_options."),
    names_ids=fields.flag(values, "return_tokens_as_token_ids", False),
    returns_ids=fields.flag(values, "return_token_ids", False),
    skip_special=fields.flag(values, "skip_special_tokens", True),
  )


def _salt(values: Mapping[str, Any]) -> str:
  return fields.text(values, "cache_salt", "", most=LONGEST_SALT)


def _request_maker(
  values: Mapping[str, Any], served: Served, *, salt: str, budget: int | None, budget_field: str = "max_tokens", inside: str = ""
) -> Callable[[list[int]], list[Request]]:
  """Returns the function from a prompt to its requests.

  Args:
    values: Fields of the sampling.
    served: Checkpoint.
    salt: Salt of cached prefixes.
    budget: Default budget of a completion, in tokens; None fills the context.
    budget_field: Name under which the client gave the budget.
    inside: Dotted path in front of the names.
  """
  tokenizer, context = served.tokenizer, served.limits.context
  temperature = fields.number(values, "temperature", 1.0, low=0, high=100, inside=inside)
  top_p = fields.number(values, "top_p", 1.0, low=0, high=1, inside=inside)
  if not top_p:
    raise wrong(f"{inside}top_p", top_p, "a number above 0, up to 1")
  # Services of others write -1 for all tokens.
  top_k = max(fields.whole(values, "top_k", 0, low=-1, high=2**31 - 1, inside=inside), 0)
  seed = fields.whole(values, "seed", None, low=0, high=MAX_SEED, inside=inside)
  seed = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
  most = min(MAX_CHOICES, served.limits.requests)
  n = fields.whole(values, "n", 1, low=1, high=most, inside=inside)
  stops = fields.texts(values, "stop", most=MAX_STOPS, longest=LONGEST_STOP, inside=inside)
  given = values.get("stop_token_ids") or []
  own = fields.ids(given, f"{inside}stop_token_ids", vocab_size=served.vocab_size, most=MAX_STOP_IDS, empty=True)
  ends = () if fields.flag(values, "ignore_eos", False, inside=inside) else tokenizer.stop_ids
  fields.flag(values, "skip_special_tokens", True, inside=inside)
  asked = fields.whole(values, "max_tokens", None, low=1, high=2**63, inside=inside)

  def make(prompt: list[int]) -> list[Request]:
    room = context - len(prompt)
    if asked is not None and asked > room:
      message = (
        f"{inside}{budget_field}: found {asked:,}, expected at most {room:,}: this model's maximum context length is "
        f"{context:,} tokens, and the prompt has {len(prompt):,}"
      )
      raise Refusal(400, message, field=inside + budget_field, code="context_length_exceeded")
    request = Request(
      tokens=prompt,
      max_tokens=asked or (room if budget is None else min(budget, room)),
      temperature=temperature,
      top_k=top_k if top_k < served.vocab_size else 0,
      top_p=top_p,
      stop_ids=tuple(dict.fromkeys([*ends, *own])),
      stops=stops,
      seed=seed,
      salt=salt,
    )
    return [request._replace(seed=_seed_of(seed, i)) for i in range(n)]

  return make


def _seed_of(seed: int, choice: int) -> int:
  """Returns the seed of a choice: the client's own for the first, unrelated ones for the others."""
  if not choice:
    return seed
  return int.from_bytes(hashlib.sha256(f"{seed}/{choice}".encode()).digest()[:8], "big") & (2**63 - 1)


def _prompts(value: Any, served: Served) -> list[list[int]]:
  if isinstance(value, str):
    return [_plain_prompt(value, "prompt", served)]
  if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
    # Before anything is encoded.
    if len(value) > served.limits.requests:
      most = f"at most {served.limits.requests}, the open requests of the service"
      raise Refusal(400, f"prompt: found {len(value):,} prompts, expected {most}", field="prompt")
    read = lambda item, field: _plain_prompt(item, field, served) if isinstance(item, str) else _prompt_ids(item, field, served)
    return [read(item, f"prompt[{i}]") for i, item in enumerate(value)]
  if isinstance(value, list):
    return [_prompt_ids(value, "prompt", served)]
  raise wrong("prompt", value, "a text, a list of token ids, or a list of these")


def _prompt_ids(value: Any, field: str, served: Served) -> list[int]:
  # The length is checked first, so that a long list is not walked through.
  if isinstance(value, list) and value:
    _checked(value, field, served)
  return fields.ids(value, field, vocab_size=served.vocab_size, most=served.limits.context)


def _plain_prompt(text: str, field: str, served: Served) -> list[int]:
  """Encodes a text to be continued, after the begin token if the checkpoint uses one."""
  tokenizer = served.tokenizer
  if served.chat_template is None:
    return _checked(tokenizer.encode_prompt(text), field, served)
  bos = getattr(tokenizer, "bos_id", None)
  return _checked([*([] if bos is None else [bos]), *_encode(text, field, served)], field, served)


def _encode(text: str, field: str, served: Served) -> list[int]:
  """Encodes a text, but only its beginning if that alone is far too long."""
  context = served.limits.context
  # A tokenizer takes seconds for a text of a million digits.
  head = text[: _CHARACTERS_PER_TOKEN * context]
  if len(head) < len(text) and len(tokens := served.tokenizer.encode(head)) > 2 * context:
    _checked(tokens, field, served, more="more than ")
  return served.tokenizer.encode(text)


def _checked(prompt: Sequence[Any], field: str, served: Served, *, more: str = "") -> list[Any]:
  context = served.limits.context
  if not prompt:
    raise Refusal(400, f"{field}: found no tokens, expected at least one", field=field)
  if len(prompt) >= context:
    message = f"{field}: found {more}{len(prompt):,} tokens; this model's maximum context length is {context:,} tokens with the completion"
    raise Refusal(400, message, field=field, code="context_length_exceeded")
  return list(prompt)
