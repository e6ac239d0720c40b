"""Grammars of answers: JSON by a schema and forced calls of tools, by the package llguidance.

The package is optional (extra `grammar`), and imported when a client first asks for a grammar.
"""

import functools
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from jaxrl_llm.decoding.engine.requests import Grammar, GrammarError
from jaxrl_llm.messages import one_line
from jaxrl_llm.pretrained.chat_messages import call_form
from jaxrl_llm.pretrained.tool_calls import CALL_ID, find_calls
from jaxrl_llm.serve import fields
from jaxrl_llm.serve.refusals import Refusal, wrong
from jaxrl_llm.text_types import Tokenizer

_SPACE = r"[ \t\r\n]{1,40}"
"""Most white space between two parts of JSON: a policy may find no end of it."""
_OPTIONS = {"whitespace_pattern": _SPACE, "lenient": False, "coerce_one_of": False}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_EXPECTED = 'text, json_object or json_schema, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}'
_KEEPS_OPEN = ("ignore_eos", "min_tokens")


class TokenGrammar:
  """A `Grammar` of a compiled matcher, which any number of completions begin with a copy of.

  Args:
    matcher: Matcher of llguidance in its first state.
    num_words: Number of words of a mask; the matcher's own may have one more.
  """

  def __init__(self, matcher: Any, num_words: int):
    self._matcher, self._num_words = matcher, num_words

  def begin(self) -> "_Place":
    """Returns the state of an empty completion."""
    return _Place(self._matcher.deep_copy(), self._num_words)


class _Place:
  """Place of one completion in a `TokenGrammar`."""

  def __init__(self, matcher: Any, num_words: int):
    self._matcher, self._num_words = matcher, num_words

  def mask(self) -> UInt32[np.ndarray, " words"]:
    words = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
    self._check()  # A matcher that has failed would end the completion where it is.
    return words[: self._num_words]

  def advance(self, token: int) -> None:
    self._matcher.consume_token(token)
    self._check()

  def _check(self) -> None:
    if self._matcher.is_error():
      raise GrammarError(f"grammar: nothing can follow ({_reason(self._matcher.get_error())})")


def read_format(values: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> Grammar | None:
  """Reads the field `response_format`.

  Args:
    values: Fields of a request.
    tokenizer: Tokenizer of the checkpoint.
    vocab_size: Number of ids of the model.

  Returns:
    The grammar of the answer; None for any text.

  Raises:
    Refusal: If the field is wrong, or the service cannot obey it.
  """
  asked = values.get("response_format")
  if asked is None:
    return None
  kind = asked.get("type") if isinstance(asked, dict) else None
  if kind not in ("text", "json_object", "json_schema"):
    raise wrong("response_format", asked, _EXPECTED)
  names = ("json_schema", "type") if kind == "json_schema" else ("type",)
  fields.check_names(asked, names, inside="response_format.", neutral={}, ignored=())
  if kind == "text":
    return None
  field, schema = "response_format", {"type": "object"}
  if kind == "json_schema":
    field, named = "response_format.json_schema", asked.get("json_schema")
    if not isinstance(named, dict):
      raise wrong(field, named, 'an object, {"schema": SCHEMA}')
    # With or without `strict`, the answer obeys the schema.
    fields.check_names(named, ("schema",), inside=f"{field}.", neutral={}, ignored=("description", "name", "strict"))
    field, schema = f"{field}.schema", named.get("schema")
  if not isinstance(schema, dict):
    raise wrong(field, schema, "a JSON schema, an object")
  return _compiled([_part("answer", schema)], tokenizer, vocab_size, field)


def call_grammar(tools: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer, vocab_size: int, *, several: bool) -> Grammar:
  """Makes the grammar of an answer that calls a tool, in the form of the checkpoint's template.

  Args:
    tools: Tools of which one is called, by their fields, such as "tools[0]".
    tokenizer: Tokenizer of the checkpoint.
    vocab_size: Number of ids of the model.
    several: Whether more calls may follow the first one.

  Raises:
    Refusal: If the form is not JSON, or a tool's parameters are no schema that the service obeys.
  """
  form = call_form(tokenizer)
  if form.after_key is not None:
    expected = "expected 'auto' or 'none': only calls in JSON are forced"
    message = f"tool_choice: the checkpoint writes each parameter of a call by itself, {expected}"
    raise Refusal(400, message, field="tool_choice", code="unsupported_field")
  rules, parts = [], []
  for i, (field, tool) in enumerate(tools.items()):
    name, where = tool["function"]["name"], f"{field}.function.parameters"
    schema = _object_schema(tool["function"].get("parameters"), where)
    # By itself first, so that a refusal names its field.
    _compiled([_part("answer", schema)], tokenizer, vocab_size, where)
    parts.append(_part(f"arguments_{i}", schema))
    key, value = (json.dumps(x, ensure_ascii=False) for x in (form.keys[0], name))
    inner = ["{", key, ":", value, ",", json.dumps(form.keys[1], ensure_ascii=False), ":"] if form.after_name is None else []
    written = [*map(_quoted, inner), f"@arguments_{i}", *([_quoted("}")] if inner else [])]
    before = [] if inner else [_quoted(name), *_literal(form.after_name)]
    rules.append(f"call_{i}: " + " SPACE? ".join([*before, *written]))
    sample = "".join([*inner, "{}", "}" if inner else ""])
    if not find_calls(f"{form.opening}{'' if inner else name + form.after_name}{sample}{form.closing}", [tool], form):
      raise wrong(f"{field}.function.name", name, "a name that a call in the form of the checkpoint can have")
  choice = f"({' | '.join(f'call_{i}' for i in range(len(tools)))})"
  lark = [
    "start: call (SPACE? call)*" if several else "start: call",
    "call: " + " SPACE? ".join([*_literal(form.opening), choice, *_literal(form.closing)]),
    *rules,
    f"SPACE: /{_SPACE}/",
    "ID: /[A-Za-z0-9_-]{1,40}/",
  ]
  return _compiled([{"lark_grammar": "\n".join(lark)}, *parts], tokenizer, vocab_size, "tool_choice")


def check_ends(values: Mapping[str, Any], asked: str) -> None:
  """Refuses what would keep an answer from ending where its grammar ends.

  Args:
    values: Fields of a request.
    asked: Field that asks for the grammar.
  """
  for name in _KEEPS_OPEN:
    if values.get(name):
      raise wrong(name, values[name], f"no such field with {asked}, which says where the answer ends", code="unsupported_field")


def _object_schema(schema: Mapping[str, Any] | None, field: str) -> Mapping[str, Any]:
  """Returns the schema of a call's arguments, which are an object also if it does not say so."""
  schema = _NO_PARAMETERS if schema is None else schema
  if schema.get("type", "object") != "object":
    raise wrong(f"{field}.type", schema["type"], "'object'")
  return {**schema, "type": "object"}


def _literal(text: str) -> list[str]:
  """Returns the parts of a text between which white space may differ."""
  return [" ".join("ID" if part == CALL_ID else _quoted(part) for part in re.split(f"({CALL_ID})", word) if part) for word in text.split()]


def _quoted(text: str) -> str:
  return json.dumps(text, ensure_ascii=False)


def _part(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
  # In the place of the client's own: they could turn the schema off.
  return {"name": name, "json_schema": {**schema, "x-guidance": _OPTIONS}}


def _compiled(parts: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, vocab_size: int, field: str) -> Grammar:
  """Compiles a grammar of llguidance.

  Args:
    parts: Named grammars, the first of which is the whole.
    tokenizer: Tokenizer of the checkpoint.
    vocab_size: Number of ids of the model.
    field: Field that a refusal names.
  """
  if importlib.util.find_spec("llguidance") is None:
    message = f"{field}: the service lacks the package llguidance, expected no such field, or: pip install 'jaxrl-llm[grammar]'"
    raise Refusal(400, message, field=field, code="unsupported_field")
  try:
    return _matcher_of(json.dumps({"grammars": parts}), tokenizer, vocab_size)
  except GrammarError as error:
    raise Refusal(400, f"{field}: the service cannot obey it ({error})", field=field, code="invalid_json_schema") from error


@functools.lru_cache(maxsize=64)  # A client asks for the same schema many times.
def _matcher_of(text: str, tokenizer: Tokenizer, vocab_size: int) -> TokenGrammar:
  import llguidance

  limits = llguidance.LLParserLimits(verbose_errors=False)
  matcher = llguidance.LLMatcher(_vocabulary_of(tokenizer, vocab_size), text, log_level=0, limits=limits)
  if matcher.is_error():
    raise GrammarError(_reason(matcher.get_error()))
  grammar = TokenGrammar(matcher, -(-vocab_size // 32))
  grammar.begin().mask()  # A schema that refers to itself alone is valid, and no answer begins.
  return grammar


@functools.lru_cache(maxsize=4)
def _vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Any:
  """Returns the vocabulary for llguidance, in which stop ids end an answer.

  Raises:
    GrammarError: If the bytes of a token depend on its neighbours.
  """
  import llguidance

  try:
    pieces = list(tokenizer.token_bytes())
  except ValueError as error:
    raise GrammarError("the bytes of the tokenizer's tokens depend on their neighbours") from error
  pieces += [None] * (vocab_size - len(pieces))
  for i in tokenizer.stop_ids:
    pieces[i] = None

  class Table:
    """Vocabulary as llguidance reads it."""

    eos_token_id, bos_token_id = tokenizer.stop_ids[0], None
    tokens = [f"<|{i}|>".encode() if piece is None else piece for i, piece in enumerate(pieces)]  # noqa: RUF012
    special_token_ids = [i for i, piece in enumerate(pieces) if piece is None]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
      return tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))

  table = llguidance.TokenizerWrapper(Table())
  return llguidance.LLTokenizer(table, n_vocab=vocab_size, eos_token=list(tokenizer.stop_ids))


def _reason(text: str) -> str:
  return one_line(text.partition("<non-verbose/>")[0], limit=200)
