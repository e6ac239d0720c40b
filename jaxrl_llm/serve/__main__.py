"""The command `python -m jaxrl_llm.serve --checkpoint=WHERE`, which serves a checkpoint over HTTP.

The routes are those of OpenAI (`/v1/chat/completions`, `/v1/completions`, `/v1/models`) and
`/inference/v1/generate` with token ids, on which training environments call. A browser finds a page
to chat with the checkpoint at the address that is printed. With `--tinker --model=NAME=WHERE`, the
routes are those of the Tinker API, on which the `tinker` SDK trains adapters and samples from them.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.devices.addresses import KEY_VARIABLE, check_address
from jaxrl_llm.messages import one_line, refuse

_DEFAULT_CONTEXT = 4096


def main(argv: Sequence[str]) -> int:
  """Serves until Ctrl-C or SIGTERM.

  Args:
    argv: Arguments, without the program's name.

  Returns:
    0 when it has been stopped, 1 if the server failed, and 2 for bad input.
  """
  parser = _parser()
  args = parser.parse_args(argv)
  _check_form(parser, args)
  key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None
  try:
    from jaxrl_llm.serve import server

    check_address(args.host, key)  # Before a weight is read.
    server.check_installed()
    return _serve_tinker(args, key) if args.tinker else _serve(args, key)
  except (ImportError, OSError, ValueError) as error:
    return refuse(error)


def _serve(args: argparse.Namespace, key: str | None) -> int:
  # Late: bad input is refused before JAX starts.
  from jaxrl_llm.decoding.engine.fleet import make_engines
  from jaxrl_llm.devices import compilation_cache, xla_flags
  from jaxrl_llm.run.jobs.serving import open_checkpoint
  from jaxrl_llm.serve import server
  from jaxrl_llm.serve.calls import MAX_LIKELIEST

  compilation_cache.cache_compilations()
  xla_flags.set_flags()
  opened = open_checkpoint(args.checkpoint, dtype=args.dtype, tensor=args.tensor)
  positions = opened.model.config.max_positions
  context = args.context or min(positions or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
  if positions is not None and context > positions:
    raise ValueError(f"--context: found {context:,}, expected at most {positions:,}, the positions of the model")
  if args.return_routed_experts and opened.model.config.experts is None:
    raise ValueError("--return_routed_experts: found a model without experts, expected one with them, or no such flag")
  options = dict(slots=args.slots, context=context, max_requests=args.max_requests, likeliest=MAX_LIKELIEST)
  options |= dict(records_routes=args.return_routed_experts, records_kept=args.return_sampling_mask)
  engine = make_engines(opened.model, opened.params, tokenizer=opened.tokenizer, version=opened.version, **options)
  try:
    address = dict(host=args.host, port=args.port, api_key=key, tells_cached=args.report_cached_tokens or None)
    vocab_size = opened.model.config.vocab_size
    service = server.start(engine, opened.tokenizer, name=args.name or opened.name, vocab_size=vocab_size, **address)
    return _until_ended(service, f"serving {args.name or opened.name} at {service.url}, {context:,} tokens of context")
  finally:
    engine.close()


def _serve_tinker(args: argparse.Namespace, key: str | None) -> int:
  from jaxrl_llm.devices import compilation_cache, xla_flags
  from jaxrl_llm.serve import server
  from jaxrl_llm.serve.tinker import start

  compilation_cache.cache_compilations()
  xla_flags.set_flags()
  options = dict(dtype=args.dtype, tensor=args.tensor, context=args.context or _DEFAULT_CONTEXT, slots=args.slots)
  rules = server.rules_of(args.host, key)
  bases, app = start.make(args.model, Path(args.states), rules=rules, max_requests=args.max_requests, **options)
  try:
    service = server.listen(app, host=args.host, port=args.port)
    return _until_ended(service, f"the Tinker API serves {', '.join(bases)} at {service.url}")
  finally:
    start.close(bases)


def _until_ended(service: Any, words: str) -> int:
  """Serves until Ctrl-C or SIGTERM; returns the status to exit with."""
  ended = threading.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: ended.set())
  try:
    print(f"{words}; Ctrl-C ends it", flush=True)
    while service.is_alive() and not ended.wait(1.0):
      continue
    has_failed = not ended.is_set()
  finally:
    service.close()
  print("error: the server ended by itself" if has_failed else "ended", file=sys.stderr)
  return int(has_failed)


def _check_form(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  """Ends the program if flags do not go together."""
  of_tinker, of_others = ("model",), ("checkpoint", "name", "report_cached_tokens", "return_routed_experts", "return_sampling_mask")
  given = lambda names: next((name for name in names if getattr(args, name)), None)
  if (flag := given(of_others if args.tinker else of_tinker)) is not None:
    parser.error(f"--{flag}: found it {'with' if args.tinker else 'without'} --tinker, expected no such flag")
  if not given(of_tinker if args.tinker else ("checkpoint",)):
    parser.error(f"expected --{'model=NAME=WHERE with --tinker' if args.tinker else 'checkpoint=WHERE'}")


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.serve", description=__doc__, allow_abbrev=False)
  where = "workdir of a run (its newest checkpoint), WORKDIR@STEP, a folder in Hugging Face's format, or another model.path"
  parser.add_argument("--checkpoint", help=where)
  tinker = "speak the Tinker API, on which the tinker SDK trains adapters of --model and samples from them"
  parser.add_argument("--tinker", action="store_true", help=tinker)
  model = "model of the Tinker API: its name for clients and what --checkpoint takes; may be given several times"
  parser.add_argument("--model", action="append", metavar="NAME=WHERE", help=model)
  states = "folder of the checkpoints that clients of the Tinker API save; default: %(default)s"
  parser.add_argument("--states", default="tinker_states", help=states)
  host = "address to listen on; any but this machine's own needs a key; default: %(default)s"
  parser.add_argument("--host", default="127.0.0.1", help=host)
  port = "port to listen on, 0 for a free one; default: %(default)s"
  parser.add_argument("--port", type=int, choices=range(65536), default=8000, metavar="PORT", help=port)
  key = f"key that each call must carry; default: {KEY_VARIABLE} of the environment, which other users cannot see"
  parser.add_argument("--api_key", help=key)
  parser.add_argument("--name", help="name of the model; default: that of the checkpoint")
  parser.add_argument("--slots", type=_whole, default=8, help="sequences that are decoded at the same time; default: %(default)s")
  parser.add_argument(
    "--context", type=_whole, help=f"most tokens of a prompt and its completion; default: {_DEFAULT_CONTEXT} or what the model has"
  )
  tensor = "devices that split the heads of a model which fits no single one; each group is an engine; default: %(default)s"
  parser.add_argument("--tensor", type=_whole, default=1, help=tensor)
  parser.add_argument("--max_requests", type=_whole, default=256, help="most open requests; default: %(default)s")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of published weights; default: float32")
  cached = "tell clients how many tokens of their prompts were cached, from which they can guess what others have asked"
  parser.add_argument("--report_cached_tokens", action="store_true", help=f"{cached}; default: only without a key")
  routes = "return the experts of every token with /inference/v1/generate, for a trainer that replays them"
  parser.add_argument("--return_routed_experts", action="store_true", help=routes)
  kept = "return the ids that top-k and top-p left to draw each token from, with /inference/v1/generate"
  parser.add_argument("--return_sampling_mask", action="store_true", help=kept)
  return parser


def _whole(text: str) -> int:
  """Returns a whole number of at least 1."""
  try:
    value = int(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(f"found {one_line(text, limit=40)!r}, expected a whole number") from error
  if value < 1:
    raise argparse.ArgumentTypeError(f"found {value}, expected at least 1")
  return value


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
