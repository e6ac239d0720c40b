"""Tests of programming problems, in the form that a row's `tests` has: a JSON object.

    {"kind": "stdin", "cases": [{"input": "1 2\\n", "output": "3\\n"}],
     "seconds": 2.0, "megabytes": 256}
    {"kind": "call", "function": "add", "cases": [{"input": "1\\n2", "output": "3"}]}
    {"kind": "check", "function": "add", "prompt": "def add(a, b):\\n",
     "code": "def check(candidate): ..."}

The cases of a "call" have the arguments in JSON, one per line, and the result in JSON. Limits are
the problem's own, and are absent if it has none. A "tolerance" replaces the error of 1e-6 that is
allowed where a float is expected.
"""

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.messages import one_line
from jaxrl_llm.tasks.files.columns import Unusable

MAX_TEST_BYTES = 256 * 2**20  # Unpacked; the largest published tests have tens of megabytes.


def stdin_tests(cases: Iterable[Mapping[str, Any]], *, seconds: float | None = None, megabytes: float | None = None) -> str:
  """Returns the tests of a program that reads its input and writes its output.

  Args:
    cases: Test cases with `input` and `output`, both text.
    seconds: Time limit; None is no limit of the problem's own.
    megabytes: Memory limit; None is no limit of the problem's own.

  Raises:
    Unusable: If there are no tests, or one has no input or output.

  Example:
    >>> stdin_tests([{"input": "1 2", "output": "3"}], seconds=2.0)
    '{"kind": "stdin", "cases": [{"input": "1 2", "output": "3"}], "seconds": 2.0}'
  """
  return _write({"kind": "stdin", "cases": _cases(cases), "seconds": seconds, "megabytes": megabytes})


def call_tests(cases: Iterable[Mapping[str, Any]], *, function: str) -> str:
  """Returns the tests of a function.

  Args:
    cases: Test cases with `input`, the arguments in JSON, one per line, and `output`, the result in
      JSON.
    function: Name of the function.

  Raises:
    Unusable: If there are no tests, or one has no input or output.
  """
  return _write({"kind": "call", "function": function, "cases": _cases(cases)})


def check_tests(*, function: str, prompt: str, code: str) -> str:
  """Returns tests that are a Python program of their own.

  Args:
    function: Name of the function.
    prompt: Beginning of the program, which the policy completes.
    code: Program that defines `check(candidate)`, which raises if the function is wrong.
  """
  return _write({"kind": "check", "function": function, "prompt": prompt, "code": code})


def unpack(text: str) -> list[dict[str, str]]:
  """Decodes LiveCodeBench's test cases.

  They are JSON, or JSON that was pickled, compressed and encoded in base64. Reading a pickle can
  run any program. This one must contain a single text, and is read by an unpickler that knows no
  functions or classes.

  Raises:
    Unusable: If the tests are damaged, too large, or a pickle of anything but one text.

  Example:
    >>> unpack('[{"input": "1 2", "output": "3", "testtype": "stdin"}]')
    [{'input': '1 2', 'output': '3', 'testtype': 'stdin'}]
  """
  if not text.lstrip().startswith("["):
    text = _unpickle(_decompress(text))
  try:
    cases = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise Unusable("tests cannot be read", f"no JSON: {error}") from error
  if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
    raise Unusable("tests cannot be read", "no list of objects")
  return cases


def _decompress(text: str) -> bytes:
  try:
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TEST_BYTES)
  except (binascii.Error, zlib.error, ValueError) as error:
    raise Unusable("tests cannot be read", f"neither JSON nor compressed: {error}") from error
  if unpacker.unconsumed_tail:
    raise Unusable("tests too large", f"more than {MAX_TEST_BYTES // 2**20} MiB")
  if not unpacker.eof:
    raise Unusable("tests cannot be read", "compressed data cut short")
  return unpacked


class _TextUnpickler(pickle.Unpickler):
  """An unpickler of texts, numbers and containers of them."""

  def find_class(self, module: str, name: str):
    raise pickle.UnpicklingError(f"names {module}.{name}, where one text is expected")

  def persistent_load(self, pid: Any):
    raise pickle.UnpicklingError("refers to an external object")


def _unpickle(data: bytes) -> str:
  try:
    value = _TextUnpickler(io.BytesIO(data)).load()
  except Exception as error:  # On damaged data, the unpickler may raise almost any exception.
    raise Unusable("tests cannot be read", f"a pickle that is not safe, or damaged: {one_line(error, typed=False)}") from error
  if not isinstance(value, str):
    raise Unusable("tests cannot be read", f"a pickled {type(value).__name__}, where one text is expected")
  return value


def _cases(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
  cases = [{"input": case.get("input"), "output": case.get("output")} for case in cases or ()]
  if not cases:
    raise Unusable("no tests")
  if not all(isinstance(text, str) for case in cases for text in case.values()):
    raise Unusable("a test without input or output")
  return cases


def _write(tests: dict[str, Any]) -> str:
  return json.dumps({name: value for name, value in tests.items() if value is not None}, ensure_ascii=False)
