"""What a client asks for, from the JSON of three routes to requests of the engine."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxrl_llm.decoding.engine.requests import EngineLimits, Grammar, Request
from jaxrl_llm.decoding.filters import LEAST_TEMPERATURE
from jaxrl_llm.messages import one_line, shown
from jaxrl_llm.pretrained.chat_template import ChatTemplate
from jaxrl_llm.serve import fields, grammars
from jaxrl_llm.serve.conversation import opening, read_messages, with_options
from jaxrl_llm.serve.refusals import Refusal, hint, wrong
from jaxrl_llm.serve.tools import read_choice, read_tools
from jaxrl_llm.text_types import Tokenizer

MAX_CHOICES = 128
MAX_STOPS, LONGEST_STOP, MAX_STOP_IDS, LONGEST_SALT = 32, 128, 64, 256
MAX_LIKELIEST = 20  # As in vLLM, and in OpenAI's chats.
MAX_SEED = 2**64 - 1  # Any seed of a run's own requests.
_DEFAULT_COMPLETION_TOKENS = 16
_CHARACTERS_PER_TOKEN = 16
_DEEPEST, _LONGEST_ID = 64, 128

_SAMPLING = frozenset(
  "ignore_eos logprobs max_tokens min_tokens n seed skip_special_tokens stop stop_token_ids temperature top_k top_p".split()
)
_EXPERTS_START, _PROMPT_SCORES = "routed_experts_prompt_start", "prompt_logprobs"
_GENERATE = frozenset("cache_salt model request_id return_token_ids sampling_params stream token_ids".split())
_OPENAI = _SAMPLING | frozenset("cache_salt model request_id return_token_ids return_tokens_as_token_ids stream stream_options".split())
_CHAT = _OPENAI | frozenset(
  "chat_template_kwargs max_completion_tokens messages parallel_tool_calls response_format tool_choice tools top_logprobs".split()
)
_COMPLETION = _OPENAI | {"echo", "prompt", "response_format"}
# A route without text has no stop string to include, and one without a stream has whole answers.
_NEUTRAL_OF_IDS = fields.NEUTRAL | {"include_stop_str_in_output": (False, True), "output_kind": (0, 1, 2)}
_NEUTRAL_OF_TEXT = fields.NEUTRAL | {"add_special_tokens": (True,)}
_TOKENIZE = ("add_special_tokens", "chat_template_kwargs", "model", "return_token_strs", "tools")
_NEUTRAL_OF_TOKENIZE = {"add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": ()}
_NEUTRAL_OF_CHAT = fields.NEUTRAL | {"add_special_tokens": (False,)}


class Served(NamedTuple):
  """The checkpoint that calls are made to.

  Attributes:
    name: Name of the model.
    tokenizer: Tokenizer of the checkpoint.
    limits: Limits of the engine.
    vocab_size: Number of ids that the model reads and draws, at least those of the tokenizer.
    tells_cached: Whether answers tell how many tokens of a prompt were cached, which tells a client
      what others have asked.
  """

  name: str
  tokenizer: Tokenizer
  limits: EngineLimits
  vocab_size: int
  tells_cached: bool = True

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
    running_usage: Whether each chunk of a stream has the numbers of tokens so far.
    logprobs: Whether to return log-probabilities.
    names_ids: Whether log-probabilities name tokens by id, as "token_id:N".
    returns_ids: Whether to return the token ids of prompt and completion.
    skip_special: Whether the text leaves out special tokens.
    routes_from: Number of the first token whose experts are returned, if the engine records them.
    tools: Tools whose calls are read from completions.
    one_tool: Whether only the first call of a completion counts.
    request_id: Name of the call in its answer; "" for one that is made up.
    echo: Whether the text and its log-probabilities begin with those of the prompt.
    is_cut: Whether the completion is left out.
  """

  prompts: list[list[int]]
  requests: list[Request]
  form: Format | None = None
  stream: bool = False
  usage: bool = False
  running_usage: bool = False
  logprobs: bool = False
  names_ids: bool = False
  returns_ids: bool = False
  skip_special: bool = True
  routes_from: int = 0
  tools: tuple[Mapping[str, Any], ...] = ()
  one_tool: bool = False
  request_id: str = ""
  echo: bool = False
  is_cut: bool = False


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
  if _is_deep(values):
    raise Refusal(400, f"the body is nested more than {_DEEPEST} deep", code="invalid_json")
  if not isinstance(values, dict):
    raise Refusal(400, f"the body is a JSON {type(values).__name__}, expected an object", code="invalid_json")
  return values


def _is_deep(value: Any) -> bool:
  """Returns whether a JSON value is nested too deeply for what walks through it."""
  level = [value]
  for _ in range(_DEEPEST):
    inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
    level = [x for part in inner for x in part if isinstance(x, dict | list)]
  return bool(level)


def generate(values: Mapping[str, Any], served: Served) -> Call:
  """Reads a call of `/inference/v1/generate`: token ids in, token ids out.

  Raises:
    Refusal: If a field is wrong.
  """
  fields.check_names(values, _GENERATE, neutral=_NEUTRAL_OF_IDS)
  check_model(fields.text(values, "model", served.name, most=1000), served)
  sampling = values.get("sampling_params", {})
  if not isinstance(sampling, dict):
    raise wrong("sampling_params", sampling, "an object")
  fields.check_names(sampling, _SAMPLING | {_EXPERTS_START, _PROMPT_SCORES}, inside="sampling_params.", neutral=_NEUTRAL_OF_IDS)
  if fields.flag(values, "stream", False):
    raise wrong("stream", True, "false; the other routes stream")
  prompt = _prompt_ids(values.get("token_ids"), "token_ids", served)
  inside = "sampling_params."
  scores = _scores(sampling, _PROMPT_SCORES, served, scored=0, inside=inside)
  likeliest = _scores(sampling, "logprobs", served, scored=2, inside=inside)
  # Trainers ask for 1, and read the drawn token's under the distribution it was drawn from.
  scored = likeliest if likeliest is not None and likeliest > 1 else None
  make = _request_maker(sampling, served, salt=_salt(values), budget=None, inside=inside, likeliest=scored, prompt_likeliest=scores)
  routes_from = fields.whole(sampling, _EXPERTS_START, 0, low=0, high=len(prompt), inside="sampling_params.")
  returns_ids = fields.flag(values, "return_token_ids", False)
  options = dict(names_ids=True, returns_ids=returns_ids, routes_from=routes_from, request_id=_request_id(values))
  return Call([prompt], make(prompt), logprobs=likeliest is not None, **options)


def completion(values: Mapping[str, Any], served: Served) -> Call:
  """Reads a call of `/v1/completions`: one prompt or several, as texts or token ids.

  Raises:
    Refusal: If a field is wrong.
  """
  fields.check_names(values, _COMPLETION, neutral=_NEUTRAL_OF_TEXT)
  check_model(fields.text(values, "model", served.name, most=1000), served)
  prompts, echo = _prompts(values.get("prompt"), served), fields.flag(values, "echo", False)
  likeliest = _scores(values, "logprobs", served, scored=0 if echo else 2)
  if echo and fields.flag(values, "stream", False):
    raise wrong("stream", True, "false with echo", code="unsupported_field")
  scores = dict(likeliest=_of_text(likeliest, values, served), prompt_likeliest=likeliest if echo else None)
  grammar = _grammar(values, served)
  sizes = dict(budget=_DEFAULT_COMPLETION_TOKENS, least=0 if echo else 1)
  make = _request_maker(values, served, salt=_salt(values), grammar=grammar, **sizes, **scores)
  requests = [request for prompt in prompts for request in make(prompt)]
  if len(requests) > served.limits.requests:
    raise wrong("prompt", f"{len(requests)} completions", f"at most {served.limits.requests}, the open requests of the service")
  # A completion of no tokens is drawn and left out.
  is_cut = values.get("max_tokens") == 0
  return Call(prompts, requests, COMPLETION, logprobs=likeliest is not None, echo=echo, is_cut=is_cut, **_options(values))


def chat(values: Mapping[str, Any], served: Served) -> Call:
  """Reads a call of `/v1/chat/completions`: a conversation that the checkpoint's template renders.

  Raises:
    Refusal: If a field is wrong, or the checkpoint has no chat template.
  """
  fields.check_names(values, _CHAT, neutral=_NEUTRAL_OF_CHAT)
  check_model(fields.text(values, "model", served.name, most=1000), served)
  template = served.chat_template
  if template is None:
    raise Refusal(400, "the checkpoint has no chat template; call /v1/completions with a prompt", code="no_chat_template")
  template = with_options(template, values.get("chat_template_kwargs"))
  messages, tools = read_messages(values.get("messages"), most=served.limits.context), read_tools(values)
  text = opening(messages, tools, template)
  prompt = _checked(_encode(text, "messages", served), "messages", served)
  field = "max_tokens" if values.get("max_completion_tokens") is None else "max_completion_tokens"
  logprobs, one_tool = fields.flag(values, "logprobs", False), not fields.flag(values, "parallel_tool_calls", True)
  alternatives = _scores(values, "top_logprobs", served, scored=1) or 0
  if alternatives and not logprobs:
    raise wrong("top_logprobs", alternatives, "0 or null without logprobs: true")
  likeliest = _of_text(alternatives, values, served) if logprobs else None
  grammar = _grammar(values, served, tools, several=not one_tool)
  make = _request_maker(values, served, salt=_salt(values), budget=None, budget_field=field, likeliest=likeliest, grammar=grammar)
  return Call([prompt], make(prompt), CHAT, logprobs=logprobs, tools=tools, one_tool=one_tool, **_options(values))


def tokenize(values: Mapping[str, Any], served: Served) -> list[int]:
  """Reads a call of `/tokenize`: the ids of a prompt, or of a conversation.

  Raises:
    Refusal: If a field is wrong, or there are more tokens than the context holds.
  """
  form = chat if values.get("messages") is not None else completion
  fields.check_names(values, ("messages" if form is chat else "prompt", *_TOKENIZE), neutral=_NEUTRAL_OF_TOKENIZE)
  known = ("model", "messages", "tools", "chat_template_kwargs", "prompt", "add_special_tokens")
  asked = {name: values[name] for name in known if name in values}
  return form(asked, served).prompts[0]


def detokenize(values: Mapping[str, Any], served: Served) -> str:
  """Reads a call of `/detokenize`: the text of ids.

  Raises:
    Refusal: If a field is wrong.
  """
  fields.check_names(values, ("model", "tokens"), neutral={})
  check_model(fields.text(values, "model", served.name, most=1000), served)
  ids = fields.ids(values.get("tokens"), "tokens", vocab_size=served.vocab_size, most=served.limits.context, empty=True)
  return served.tokenizer.decode(ids)


def check_model(name: str, served: Served) -> None:
  """Refuses the name of a model that the service does not have."""
  if name != served.name:
    message = f"model: found {shown(name)}, expected {served.name!r}, the only model of this service{hint(name, [served.name])}"
    raise Refusal(404, message, field="model", code="model_not_found")


def _grammar(
  values: Mapping[str, Any], served: Served, tools: Sequence[Mapping[str, Any]] = (), *, several: bool = False
) -> Grammar | None:
  """Reads what an answer is limited to: a format, or calls of tools; None for any text.

  Args:
    values: Fields of a request.
    served: Checkpoint.
    tools: Tools that the policy may call.
    several: Whether an answer may call several times.
  """
  vocabulary, asked = (served.tokenizer, served.vocab_size), "response_format"
  grammar, chosen = grammars.read_format(values, *vocabulary), read_choice(values.get("tool_choice"), tools)
  if grammar is not None and tools:
    raise wrong(asked, values[asked], "text with tools, whose calls are no such answer", code="unsupported_field")
  if chosen:
    # A named tool is called once, as by services of others.
    grammar, asked = grammars.call_grammar(chosen, *vocabulary, several=several and values["tool_choice"] == "required"), "tool_choice"
  if grammar is not None:
    grammars.check_ends(values, asked)
  return grammar


def _options(values: Mapping[str, Any]) -> dict[str, bool]:
  stream = fields.flag(values, "stream", False)
  options = values.get("stream_options")
  if options is not None and not isinstance(options, dict):
    raise wrong("stream_options", options, "an object")
  if options:
    fields.check_names(options, ("include_usage", "continuous_usage_stats", "include_obfuscation"), inside="stream_options.")
    fields.flag(options, "include_obfuscation", False, inside="stream_options.")
  of_stream = lambda name: fields.flag(options or {}, name, False, inside="stream_options.")
  return dict(
    stream=stream,
    usage=of_stream("include_usage"),
    running_usage=of_stream("continuous_usage_stats"),
    request_id=_request_id(values),
    names_ids=fields.flag(values, "return_tokens_as_token_ids", False),
    returns_ids=fields.flag(values, "return_token_ids", False),
    skip_special=fields.flag(values, "skip_special_tokens", True),
  )


def _request_id(values: Mapping[str, Any]) -> str:
  return fields.text(values, "request_id", "", most=_LONGEST_ID)


def _scores(values: Mapping[str, Any], name: str, served: Served, *, scored: int, inside: str = "") -> int | None:
  """Reads a number of likeliest tokens, which takes scores from `scored` on; None if there is none.

  Raises:
    Refusal: If it is no number, or the engine gives no scores and this one takes some.
  """
  asked, most = fields.whole(values, name, None, low=0, high=MAX_LIKELIEST, inside=inside), served.limits.likeliest
  if asked is not None and asked >= scored and (asked > most or not most):
    expected = f"at most {most}" if most else "no such field: the engine gives no scores"
    raise wrong(inside + name, asked, expected, code="unsupported_field")
  return asked


def _of_text(likeliest: int | None, values: Mapping[str, Any], served: Served) -> int | None:
  """Returns the number of likeliest tokens with which the engine scores tokens of a text.

  None means none. The log-probability of a drawn token alone is no score, except at temperature 0,
  where clients want that of the model. Engines without scores give the one that they have.
  """
  temperature = values.get("temperature")
  is_greedy = isinstance(temperature, int | float) and temperature < LEAST_TEMPERATURE
  return likeliest if served.limits.likeliest and (likeliest or is_greedy) else None


def _salt(values: Mapping[str, Any]) -> str:
  return fields.text(values, "cache_salt", "", most=LONGEST_SALT)


def _request_maker(
  values: Mapping[str, Any], served: Served, *, salt: str, budget: int | None, budget_field: str = "max_tokens", inside: str = "",
  least: int = 1, likeliest: int | None = None, prompt_likeliest: int | None = None, grammar: Grammar | None = None,
) -> Callable[[list[int]], list[Request]]:  # fmt: skip
  """Returns the function from a prompt to its requests.

  Args:
    values: Fields of the sampling.
    served: Checkpoint.
    salt: Salt of cached prefixes.
    budget: Default budget of a completion, in tokens; None fills the context, beyond which no
      completion goes.
    budget_field: Name under which the client gave the budget.
    inside: Dotted path in front of the names.
    least: Least budget of a client.
    likeliest: Number of likeliest tokens in the score of each drawn token; None for no scores.
    prompt_likeliest: Number of likeliest tokens in the score of each token of the prompt; None for
      no scores.
    grammar: Grammar of the completions; None for any text.
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
  asked = fields.whole(values, budget_field, None, low=least, high=2**63, inside=inside)

  min_tokens = fields.whole(values, "min_tokens", 0, low=0, high=2**63, inside=inside)
  if min_tokens and stops:
    raise wrong(f"{inside}min_tokens", min_tokens, "0 with stop strings; stop ids go with it", code="unsupported_field")

  def make(prompt: list[int]) -> list[Request]:
    room = context - len(prompt)
    most = min(budget or room if asked is None else max(asked, 1), room)
    if min_tokens > most:
      raise wrong(f"{inside}min_tokens", min_tokens, f"at most {most}, the budget")
    request = Request(
      tokens=prompt,
      max_tokens=most,
      temperature=temperature,
      top_k=top_k if top_k < served.vocab_size else 0,
      top_p=top_p,
      stop_ids=tuple(dict.fromkeys([*ends, *own])),
      stops=stops,
      seed=seed,
      salt=salt,
      likeliest=likeliest,
      min_tokens=min_tokens,
      grammar=grammar,
    )
    # The first choice scores the prompt for all.
    return [request._replace(seed=seed_of(seed, i), prompt_likeliest=None if i else prompt_likeliest) for i in range(n)]

  return make


def seed_of(seed: int, choice: int) -> int:
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
  """Encodes a text, but only as much of it as is far too long."""
  context, size = served.limits.context, _CHARACTERS_PER_TOKEN * served.limits.context
  # A tokenizer takes seconds for a text of a million digits or spaces.
  tokens: list[int] = []
  for start in range(0, len(text) if len(text) > size else 0, size):
    tokens += served.tokenizer.encode(text[start : start + size])
    if len(tokens) > 2 * context:
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
