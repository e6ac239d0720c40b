"""Trials on a Slurm cluster: one job array with submitit's script, `max_parallel` tasks at a time.

A trial gets SIGTERM when it is preempted, and two minutes before the time limit: it saves, ends
with 42, and is queued again. Each GPU (or node without GPUs) gets one task, and `jax.distributed`
finds the other tasks in Slurm's variables. The script starts trials by their commands, so that a
dry run needs no Slurm, and nothing is pickled. Tried with Slurm 22.05.8 on one machine without
GPUs: time limit, preemption, two processes per trial.

References:
  sbatch, https://slurm.schedmd.com/sbatch.html; submitit,
  https://github.com/facebookincubator/submitit
"""

import getpass
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.launch.rows import SweepError
from experiments.launch.trial import Trial
from jaxrl_llm.workdir import claim

_TIME = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}"
_RECORD = "jobs.jsonl"
_OURS = (
  "array", "error", "job-name", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "no-requeue", "signal"
)  # fmt: skip


class Options(NamedTuple):
  """Flags of the Slurm target.

  Attributes:
    partition: Partition of the cluster.
    account: Account to charge.
    qos: Quality of service.
    time: Time limit of one start of a trial, in Slurm's notation: minutes, H:MM:SS or D-HH:MM. A
      trial that needs longer is queued again.
    nodes: Number of nodes of a trial.
    gpus_per_node: Number of GPUs per node; 0 for none.
    tasks_per_node: Number of processes of a trial per node; 0 for one per GPU, or for one if there
      are no GPUs.
    cpus_per_task: Number of CPUs per process; 0 for the cluster's default.
    mem: Memory per node, as in 64G.
    constraint: Features that the nodes must have.
    exclude: Nodes to leave out.
    max_restarts: Maximum number of restarts of a trial in one submission, after preemptions and
      time limits.
    grace_seconds: Time from SIGTERM to the time limit, in s.
    setup: Shell lines to run first, as in "module load cuda"; may be given several times.
    sbatch: Any other option of sbatch, as NAME=VALUE; may be given several times.
    python: Python interpreter on the nodes; by default the launcher's own.
  """

  partition: str = ""
  account: str = ""
  qos: str = ""
  time: str = "60"
  nodes: int = 1
  gpus_per_node: int = 0
  tasks_per_node: int = 0
  cpus_per_task: int = 0
  mem: str = ""
  constraint: str = ""
  exclude: str = ""
  max_restarts: int = 20
  grace_seconds: int = 120
  setup: tuple[str, ...] = ()
  sbatch: tuple[str, ...] = ()
  python: str = ""


def check(options: Options) -> None:
  """Refuses settings that Slurm would refuse or misread.

  Raises:
    SweepError: If there are any. One line for each.
  """
  wrong = []
  if not re.fullmatch(_TIME, options.time):
    wrong.append(
      f"--time: found {options.time!r}, expected minutes, H:MM:SS or D-HH:MM, as in 90, 12:00:00 or 2-00:00"
    )
  if options.mem and not re.fullmatch(r"\d+[KMGT]?", options.mem):
    wrong.append(f"--mem: found {options.mem!r}, expected a number and K, M, G or T, as in 64G")
  least = dict(nodes=1, gpus_per_node=0, tasks_per_node=0, cpus_per_task=0, max_restarts=0, grace_seconds=1)
  wrong += [f"--{name}: found {x}, expected {y} or more" for name, y in least.items() if (x := getattr(options, name)) < y]
  if options.gpus_per_node and options.tasks_per_node not in (0, options.gpus_per_node):
    why = "on Slurm JAX gives each process one GPU, and the others would be idle"
    wrong.append(
      f"--tasks_per_node: found {options.tasks_per_node} for --gpus_per_node={options.gpus_per_node}, "
      f"expected as many; {why}"
    )
  if 0 < (limit := _seconds(options.time)) <= options.grace_seconds:
    wrong.append(
      f"--grace_seconds: found {options.grace_seconds} with --time={options.time} ({limit} s), "
      "expected less, or no time is left to train"
    )
  wrong += [f"--sbatch: found {each!r}, expected NAME=VALUE" for each in options.sbatch if not re.fullmatch(r"[a-z-]+=.+", each)]
  for name in (each.partition("=")[0] for each in options.sbatch):
    if name.replace("-", "_") in Options._fields:
      wrong.append(f"--sbatch: found {name}, expected it as a flag of its own, --{name.replace('-', '_')}")
    elif name in _OURS:
      wrong.append(f"--sbatch: found {name}, which the launcher sets itself; expected another option")
  if wrong:
    raise SweepError("\n".join(wrong))


def _seconds(time: str) -> int:
  """Returns a time limit in s; 0 for no limit or an invalid time."""
  if not re.fullmatch(_TIME, time):
    return 0
  days, dash, rest = time.rpartition("-")
  parts = [int(part) for part in rest.split(":")]
  # After days the hours come first; without days it is M, M:S or H:M:S.
  hours, minutes, seconds = (*parts, 0, 0)[:3] if dash else parts if len(parts) == 3 else (0, *parts, 0)[:3]
  return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def script(trials: Sequence[Trial], folder: Path, *, max_parallel: int, options: Options) -> str:
  """Writes the text of the script for sbatch.

  Args:
    trials: Trials, one task of the array for each.
    folder: Folder of the sweep.
    max_parallel: Maximum number of trials at a time; 0 for no limit.
    options: Options of the target.

  Raises:
    ImportError: If submitit is not installed.
    SweepError: If an option is invalid.
  """
  check(options)
  try:
    # The public API requires srun and a function to pickle.
    from submitit.slurm.slurm import _make_sbatch_string
  except ImportError as error:
    raise ImportError(f'--target=slurm needs submitit: pip install "jaxrl-llm[sweeps]" ({error})') from error
  texts = ("partition", "account", "qos", "mem", "constraint", "exclude")
  given = {name: value for name in (*texts, "gpus_per_node", "cpus_per_task") if (value := getattr(options, name))}
  arms = [f"  {i}) trial=({shlex.join(_command(trial, options))}) ;;  # {trial.name}" for i, trial in enumerate(trials)]
  # Not SLURM_JOB_ID: one task's is the array's, which would requeue all tasks, even finished ones.
  task = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
  teardown = [
    "code=$?",
    f'if [ "$code" -eq 42 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.max_restarts} ]; then scontrol requeue {task}; fi',
    'exit "$code"',
  ]
  # Replaces submitit's SIGUSR2, which a run does not handle. It goes to the tasks, not the script.
  more = {"signal": f"TERM@{options.grace_seconds}", "requeue": True, "chdir": str(Path.cwd())}
  more |= dict(each.split("=", 1) for each in options.sbatch)
  text = _make_sbatch_string(
    command='"${trial[@]}"',
    folder=(folder / "slurm" / "logs").absolute(),
    job_name=trials[0].name.removesuffix(f"-{trials[0].row.id}"),
    time=options.time,
    nodes=options.nodes,
    ntasks_per_node=options.tasks_per_node or options.gpus_per_node or 1,
    setup=[*options.setup, 'case "$SLURM_ARRAY_TASK_ID" in', *arms, "esac"],
    teardown=teardown,
    array_parallelism=max_parallel or len(trials),
    map_count=len(trials),
    stderr_to_stdout=True,
    wckey=None,
    additional_parameters=more,
    **given,
  )
  return text + "\n"


def _command(trial: Trial, options: Options) -> list[str]:
  python, *rest = trial.command
  return [options.python or sys.executable if python == "python" else python, *rest]


def write(trials: Sequence[Trial], folder: Path, *, options: Options, max_parallel: int = 0) -> list[Path]:
  """Writes the script of the trials that are not finished.

  Args:
    trials: Trials of the sweep.
    folder: Folder of the sweep, in which `slurm/sweep.sbatch` is written.
    options: Options of the target.
    max_parallel: Maximum number of trials at a time; 0 for no limit.

  Returns:
    The path of the script, or no path if all trials are finished.
  """
  todo = [trial for trial in trials if not claim.is_finished(Path(trial.workdir))]
  if len(todo) < len(trials):
    print(f"{len(trials) - len(todo)} of {len(trials)} trials finished earlier and are skipped")
  return [_write(todo, folder, options=options, max_parallel=max_parallel)] if todo else []


def _write(trials: Sequence[Trial], folder: Path, *, options: Options, max_parallel: int) -> Path:
  text = script(trials, folder, max_parallel=max_parallel, options=options)
  # Without this folder Slurm's jobs end silently.
  (folder / "slurm" / "logs").mkdir(parents=True, exist_ok=True)
  path = folder / "slurm" / "sweep.sbatch"
  path.write_text(text, encoding="utf-8")
  return path


def submit(trials: Sequence[Trial], folder: Path, *, options: Options, max_parallel: int = 0, tell=print) -> list[str]:
  """Submits the trials that are neither finished, waiting nor running.

  Args:
    trials: Trials of the sweep.
    folder: Folder of the sweep, on a file system that the nodes share.
    options: Options of the target.
    max_parallel: Maximum number of trials at a time; 0 for no limit.
    tell: Function that prints a line.

  Returns:
    The ids of the submitted rows.

  Raises:
    SweepError: If sbatch is missing or refuses the script.
  """
  check(options)
  if missing := [name for name in ("sbatch", "squeue") if shutil.which(name) is None]:
    where = "run this on a login node of the cluster, or with --dry_run to write the script only"
    raise SweepError(f"--target=slurm: {missing[0]} is not on the PATH; {where}")
  queued = waiting(folder)
  todo = []
  for trial in trials:
    if claim.is_finished(Path(trial.workdir)):
      tell(f"{trial.row.id}: finished; skipped")
    elif job := queued.get(trial.row.id):
      tell(f"{trial.row.id}: job {job} is waiting or running; skipped")
    else:
      todo.append(trial)
  if not todo:
    tell("nothing to submit")
    return []
  path = _write(todo, folder, options=options, max_parallel=max_parallel)
  said = _ask("sbatch", "--parsable", str(path)).strip()
  job, ids = said.split(";")[0], [trial.row.id for trial in todo]
  with open(folder / "slurm" / _RECORD, "a", encoding="utf-8") as file:
    file.write(json.dumps({"job": job, "rows": ids}) + "\n")
  tell(f"job {job}: {len(ids)} trial(s) submitted; `squeue --job {job}` shows them, `scancel {job}` ends them")
  return ids


def waiting(folder: Path) -> dict[str, str]:
  """Returns the jobs of earlier submissions that are waiting or running, by row.

  Raises:
    SweepError: If squeue fails.
  """
  path = folder / "slurm" / _RECORD
  if not path.exists():
    return {}
  alive = set(_ask("squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%F_%K").split())
  waiting_jobs = {}
  for line in path.read_text(encoding="utf-8").splitlines():
    submission = json.loads(line)
    jobs = {row_id: f"{submission['job']}_{i}" for i, row_id in enumerate(submission["rows"])}
    waiting_jobs |= {row_id: job for row_id, job in jobs.items() if job in alive}
  return waiting_jobs


def _ask(*command: str) -> str:
  result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
  if result.returncode:
    lines = (result.stderr or result.stdout).strip().splitlines() or ["it printed nothing"]
    # The reason is the first line or the last.
    said = "; ".join(line.strip() for line in lines if not line.startswith("Try "))
    raise SweepError(f"{command[0]}: exit status {result.returncode}: {said[:300]}")
  return result.stdout
