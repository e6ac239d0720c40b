"""A sampler of a run in a process of its own: `python -m jaxrl_llm.cli.join WORKDIR [OPTION ...]`

  WORKDIR           folder of the run, which its learner and this process see
  --learner         HOST:PORT of the learner, if it is not the address in WORKDIR/samplers.json
  --timeout_s       seconds to wait for a learner, the first time and whenever it is gone.
                    Default: 600

The process draws with the devices that it has. It compiles, joins the run, gets its weights and
draws until the learner ends. It may come at any time and be killed at any time: its requests are
then drawn by others. SIGTERM lets it leave.

Several processes are one sampler, with one engine over the devices of all, if they find each other
as those of a run do: by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or as a job
of a cluster. If one of them ends, so do the others, and all are to be started again.

It ends with status 0 after a finished run or SIGTERM, 2 for bad input, 42 if no learner came, and 1
if its engine failed.
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm import __version__
from jaxrl_llm.config import recorded
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.messages import INTERRUPTED, RESTART, USAGE_ERROR, MissingPackageError, one_line, refuse
from jaxrl_llm.workdir import claim

_LOOK_S = 0.5


class Sampler(NamedTuple):
  """An engine that is ready to join a run.

  Attributes:
    engine: The engine, with random weights.
    weights: What it has of the run's weights, for `serve`.
    slots: Number of its rows.
    vocab_size: Number of ids of its model.
  """

  engine: Any
  weights: Any
  slots: int
  vocab_size: int


def main(argv: Sequence[str]) -> int:
  """Runs a command line and returns its exit status.

  Args:
    argv: Arguments, beginning with the program's name.

  Returns:
    0 after a finished run or SIGTERM, 1 if the engine failed, 2 for bad input, 42 if no learner
    came, and 130 after Ctrl-C.
  """
  if {"-h", "--help"} & set(argv[1:]):
    print(__doc__)
    return 0
  leave, is_ready = threading.Event(), threading.Event()

  def leave_politely(*_: Any) -> None:
    leave.set()
    if not is_ready.is_set():  # A compilation cannot be interrupted, and nothing is open yet.
      os._exit(0)

  try:
    args = _parse(argv[1:])
    signal.signal(signal.SIGTERM, leave_politely)
    if claim.is_finished(args.workdir):
      print(f"{args.workdir} holds a finished run: there is nothing to draw")
      return 0
    return _join(args, leave, is_ready)
  except (MissingPackageError, UsageError, ValueError) as error:
    return refuse(error)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> None:
    """Raises what argparse would print with the usage."""
    raise UsageError(f"{message}; expected WORKDIR [--learner=HOST:PORT] [--timeout_s=SECONDS]")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  """Reads the arguments.

  Raises:
    UsageError: If one is wrong, or the workdir holds no run. One line.
  """
  parser = _Parser(prog="jaxrl_llm.cli.join", add_help=False, allow_abbrev=False)
  parser.add_argument("workdir", type=Path)
  parser.add_argument("--learner", default=None)
  parser.add_argument("--timeout_s", type=float, default=600.0)
  args = parser.parse_args(list(argv))
  if not 0 <= args.timeout_s < float("inf"):
    raise UsageError(f"--timeout_s: found {args.timeout_s}, expected 0 or more seconds")
  if args.learner is not None:
    host, _, port = args.learner.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
      raise UsageError(f"--learner: found {args.learner!r}, expected HOST:PORT")
    args.learner = host.strip("[]"), int(port)
  if recorded.saved_config(args.workdir) is None:
    raise UsageError(f"WORKDIR: found {str(args.workdir)!r} without the config.json of a run, expected the --workdir of one")
  return args


def _join(args: argparse.Namespace, leave: threading.Event, is_ready: threading.Event) -> int:
  # Late: bad input is refused before JAX starts.
  import jax

  from jaxrl_llm.decoding.apart import gate
  from jaxrl_llm.devices import compilation_cache, hosts, xla_flags

  config, fingerprint = recorded.run_config(args.workdir), gate.fingerprint_of(args.workdir)
  compilation_cache.cache_compilations()
  xla_flags.set_flags(exact=config.numerics.exact)
  hosts.join_processes()
  watching = threading.Thread(target=_leave_if_told, args=[leave], daemon=True)
  if (count := jax.process_count()) == 1:
    # In place of JAX's handler, which tells other processes.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
  else:
    watching.start()
  plain = {UsageError: USAGE_ERROR, ValueError: USAGE_ERROR, MissingPackageError: USAGE_ERROR, KeyboardInterrupt: INTERRUPTED}
  with hosts.together(plain):
    hosts.agree({"the config's fingerprint": fingerprint, "package": __version__})
    sampler, status = make_sampler(config), 0
    is_ready.set()
    if hosts.is_main():
      of_several = f" of {count} processes" if count > 1 else ""
      print(f"ready to draw for {args.workdir}, with {sampler.slots} rows{of_several}", flush=True)
      try:
        status = _draw(args, sampler, fingerprint, leave)
      finally:
        sampler.engine.close()
    else:
      sampler.engine.follow()
    status = hosts.on_main(lambda: status)
    leave.set()
    if count > 1:
      watching.join()  # Inside the exchange it would abort the process when Python ends.
    return status


def _leave_if_told(leave: threading.Event) -> None:
  """Lets the sampler leave once a process of it was sent SIGTERM."""
  from jaxrl_llm.devices import hosts

  while not (leave.is_set() or hosts.told_to_end()):
    time.sleep(_LOOK_S)
  leave.set()


def make_sampler(config: Any) -> Sampler:
  """Builds the engine of a run on the devices of this process, and compiles all that it needs.

  Args:
    config: The run's config.

  Raises:
    MissingPackageError: If a package of the task is missing.
    ValueError: If the config is wrong, or the devices do not fit it.
  """
  import jax

  from jaxrl_llm.config import policy, sizes
  from jaxrl_llm.config.check import config_problems
  from jaxrl_llm.decoding.apart.shared_weights import SharedWeights
  from jaxrl_llm.decoding.apart.weights import HeldWeights
  from jaxrl_llm.decoding.engine.fleet import make_engines
  from jaxrl_llm.decoding.engine.lockstep import LockStep
  from jaxrl_llm.devices import hosts
  from jaxrl_llm.devices import mesh as mesh_lib
  from jaxrl_llm.models import lower_precision
  from jaxrl_llm.run.setup.data import load_measured
  from jaxrl_llm.run.setup.drawing import engine_options
  from jaxrl_llm.run.setup.sampler_processes import mesh_of_sampler, model_of_sampler

  if problems := config_problems(config):
    raise ValueError("\n".join(problems))
  mesh = mesh_of_sampler(config, jax.devices())
  task, lengths, _ = load_measured(config)
  shape = policy.model_config(config, vocab_size=task.tokenizer.vocab_size)
  bounds = sizes.Bounds(1, 1, shape.d_model, 16 if mesh_lib.platform_of(mesh) == "cpu" else 128, shape.max_positions)
  config = sizes.choose_sizes(config, lengths, bounds)
  model, template = model_of_sampler(config, shape, mesh)
  options = engine_options(config, model.config, task.tokenizer)
  # Random weights, because an engine compares what its programs draw.
  shardings = jax.tree.map(lambda x: x.sharding, template)
  params = jax.jit(lambda key: lower_precision(model.init(key), model.config.dtype), out_shardings=shardings)(jax.random.key(0))
  peers = LockStep() if jax.process_count() > 1 else None
  engine, held = make_engines(model, params, version=-1, peers=peers, **options), HeldWeights(template)
  weights = held if peers is None else SharedWeights(held, engine, peers)
  hosts.barrier()  # The first call may come now.
  return Sampler(engine, weights, options["slots"], shape.vocab_size)


def _draw(args: argparse.Namespace, sampler: Sampler, fingerprint: str, leave: threading.Event) -> int:
  """Draws for one learner after the other until the run is finished, or none comes."""
  import jax

  from jaxrl_llm.decoding.apart import gate
  from jaxrl_llm.decoding.apart.served import serve
  from jaxrl_llm.decoding.apart.weights import WeightsRefused
  from jaxrl_llm.decoding.engine.frames import WireError

  last = None

  def note(line: str) -> None:
    nonlocal last
    if line != last:
      print(line, flush=True)
    last = line

  hello = dict(limits=sampler.engine.limits, slots=sampler.slots, vocab_size=sampler.vocab_size)
  hello |= dict(fingerprint=fingerprint, name=f"{socket.gethostname()}:{os.getpid()}")
  until = time.monotonic() + args.timeout_s
  while not leave.is_set():
    if claim.is_finished(args.workdir):
      note("the run is finished")
      return 0
    if gate.fingerprint_of(args.workdir) != fingerprint:
      return refuse("the run has another config by now; start this process again", RESTART)
    learner = gate.read_learner(args.workdir)
    if learner is None:
      note("the learner is not there yet")
    else:
      try:
        connection, timeout_s = gate.knock(args.learner or learner.address, learner.secret, **hello)
        note("joined")
        end = serve(sampler.engine, connection, sampler.weights, timeout_s=timeout_s, leave=leave, note=note)
        note({"closed": "the learner has closed", "left": "left", "lost": "the learner is lost"}[end])
        until = time.monotonic() + args.timeout_s
      except gate.JoinRefused as error:
        raise UsageError(f"the learner refuses this sampler: {error}") from error
      except (OSError, WireError) as error:
        note(f"no learner at {':'.join(map(str, args.learner or learner.address))}: {one_line(error, typed=False)}")
      except WeightsRefused as error:
        return refuse(error, 1)
      except Exception as error:  # Of the engine.
        if jax.process_count() > 1:
          raise  # Perhaps because another process is gone.
        return refuse(f"the engine has failed: {one_line(error)}", 1)
    if time.monotonic() > until:
      return refuse(f"no learner within {args.timeout_s:g} s", RESTART)
    leave.wait(_LOOK_S)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
