"""Storms over asynchronous runs: a learner and its samplers, each killed again and again.

When the weights reach the samplers of such a run depends on the clock, so no undisturbed run has
the same bits. Instead its schedule (`rollouts/schedule.py`) is repeated twice, once undisturbed and
once in a storm of its own.
"""

import contextlib
import datetime
import math
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.provenance import processor, record
from experiments.reliability.attempts import Job, environment, last_step, launch, mismatches, resumed, rows, saving, stepping
from experiments.results import to_json
from jaxrl_llm.decoding.apart import gate
from jaxrl_llm.rollouts import schedule
from jaxrl_llm.workdir import logs

STALENESS = 4
SAMPLERS = 2
JOBS = {
  "text": ["--config=configs/gspo.py:tiny"],
  "calculator": ["--config=configs/tools.py:tiny", "--config.model.preset=nano-moe", "--config.moe.replay=R3"],
  "pictures": [
    "--config=configs/gspo.py:tiny", "--config.model.preset=nano-vl", "--config.task.name=figures", "--config.task.levels=(1,)",
    "--config.rollout.prompt_buckets=None",
  ],
}  # fmt: skip
"""First flags of each job: responses of one turn, conversations on replayed routes, pictures."""
FLAGS = (
  "--config.warm_start.num_steps=0",
  "--config.reward.at_random=0.5",  # Random weights are never right.
  f"--config.rollout.staleness={STALENESS}",
  "--config.rollout.update_in_flight=keep",
  # Few rows and long responses, so that new weights come while responses are in progress.
  "--config.rollout.slots=2",
  "--config.rollout.max_new_tokens=64",
  "--config.learner.row_tokens=None",
  "--config.learner.row_buckets=None",
  "--config.learner.learning_rate=1e-3",
  "--config.eval.every=40",
  "--config.log.num_table_rows=0",
  "--config.log.tensorboard=False",
)
VARIES = ("samplers/", "conversation/computed_tokens", "conversation/cached_tokens")
"""Prefixes of the metrics that a repeated run need not have in common with the first one."""

KINDS = {
  "learner": "SIGKILL of the learner at random",
  "learner while saving": "SIGKILL of the learner while a checkpoint is written",
  "sampler": "SIGKILL of a sampler at random",
}
RESTARTS = "the learner's own restarts, after a sampler was lost"

# RL steps between checkpoints, and an upper bound on those between two strikes. Several processes
# on few cores take longer for a step.
_EVERY, _EVERY_OF_SEVERAL = 8, 2
_MOST_KILLS_OF_REPLAY = 10
_MARK = "JAXRL_STORM"
_LOOK_S, _LEAVE_S, _PATIENCE_S = 0.005, 90.0, 300.0
_AGAIN = (-signal.SIGKILL, 42)  # Statuses after which the same command continues.
_BEREFT = (*_AGAIN, -signal.SIGABRT, 1)  # Of a process whose companion was killed.


class Death(NamedTuple):
  """End of a process that did not end the run.

  Attributes:
    kind: Key of `KINDS`, or "42" for a learner that asked for a new start.
    step: Last RL step on disk.
    redone: Number of RL steps on disk that the learner repeats.
  """

  kind: str
  step: int
  redone: int = 0


class Company:
  """Processes that are one learner or one sampler, and end together.

  Args:
    processes: The processes.
    output: Path of what each prints, without its number.
  """

  def __init__(self, processes: Sequence[subprocess.Popen], output: Path):
    self._processes, self._output = processes, output

  def poll(self) -> int | None:
    """Returns None while one lives, then 0, or the status with which the company has failed.

    Raises:
      RuntimeError: If a process ended in another way than it may.
    """
    statuses = [process.poll() for process in self._processes]
    if None in statuses or not any(statuses):
      return None if None in statuses else 0
    allowed = _BEREFT if -signal.SIGKILL in statuses else _AGAIN
    if wrong := [status for status in statuses if status not in allowed]:
      name = self._output.suffix[1:]
      raise RuntimeError(f"the {name} ended with status {wrong[0]} of {statuses}, expected some of {allowed}; see {self._output}.*")
    return -signal.SIGKILL if -signal.SIGKILL in statuses else 42

  def is_whole(self) -> bool:
    """Returns whether all live."""
    return all(process.poll() is None for process in self._processes)

  def wait(self, seconds: float) -> int:
    """Waits for the end of all; see `poll`."""
    until = time.monotonic() + seconds
    for process in self._processes:
      process.wait(max(until - time.monotonic(), 0.0))
    return self.poll()

  def strike(self, lots: random.Random) -> None:
    """Kills one of them; the others are to end by themselves."""
    victim = lots.choice(self._processes)
    victim.kill()
    victim.wait()

  def kill(self) -> None:
    """Kills all."""
    for process in self._processes:
      process.kill()
      process.wait()


class Cast:
  """The processes of a run: a learner and its samplers, which are started again when they end.

  Args:
    job: Run, not yet begun.
    replay: Workdir of the run to repeat; None for a run of its own.
    samplers: Number of samplers, each of as many processes as the learner.

  Attributes:
    deaths: What has ended before the run did.
    schedules: Schedule of the run at each end of its learner.
  """

  def __init__(self, job: Job, replay: Path | None = None, *, samplers: int = SAMPLERS):
    self.job, self.deaths, self.schedules = job, [], []
    self._replay = [] if replay is None else [f"--replay={replay}"]
    self._samplers: list[Company | None] = [None] * samplers
    self._starts = [0] * samplers
    self._struck: str | None = None
    self._died: int | None = None  # Index of the learner's last death.
    self.begun = time.monotonic()
    self._learner = self._start_learner()

  def __enter__(self) -> "Cast":
    """Returns itself."""
    return self

  def __exit__(self, *error: Any) -> None:
    """Ends all processes."""
    for company in [self._learner, *self._samplers]:
      if company is not None:
        company.kill()

  def _output(self, name: str) -> Path:
    return self.job.workdir.with_name(f"{self.job.workdir.name}.{name}")

  def _start(self, command: Sequence[str], name: str) -> Company:
    settings = environment(self.job) | {_MARK: str(self.job.workdir)}
    return Company(launch(command, self.job.processes, settings, self._output(name)), self._output(name))

  def _start_learner(self) -> Company:
    self.begun, self._number = time.monotonic(), logs.number(self.job.workdir / "logs")
    return self._start(learner_command(self.job, self._replay), "learner")

  def _start_sampler(self, index: int) -> Company:
    path = self._output(f"sampler-{index}.0")
    self._starts[index] = path.stat().st_size if path.exists() else 0
    return self._start(sampler_command(self.job), f"sampler-{index}")

  def has_joined(self, index: int) -> bool:
    """Returns whether a sampler draws for the learner now, as far as its output tells."""
    path = self._output(f"sampler-{index}.0")
    lines = path.read_bytes()[self._starts[index] :].decode(errors="replace").splitlines() if path.exists() else []
    known = [line for line in lines if line == "joined" or line.startswith("the learner ")]
    return known[-1:] == ["joined"]

  def is_whole(self) -> bool:
    """Returns whether all processes live."""
    return all(company is not None and company.is_whole() for company in [self._learner, *self._samplers])

  def strike(self, kind: str, lots: random.Random) -> None:
    """Kills the learner, or one of the samplers that draw; any of them if none does."""
    if kind == "sampler":
      victims = [i for i in range(len(self._samplers)) if self.has_joined(i)] or range(len(self._samplers))
      victim = self._samplers[lots.choice(victims)]
      self.deaths.append(Death(kind, last_step(self.job.workdir)))
    else:
      victim, self._struck = self._learner, kind
    victim.strike(lots)

  def look(self) -> bool:
    """Starts what has ended again; returns True once the run is finished.

    Raises:
      RuntimeError: If a process ended in another way than it may.
    """
    if (status := self._learner.poll()) is not None:
      self._note_resumed()
      if status == 0:
        return True
      self._died = len(self.deaths)
      self.deaths.append(Death(self._struck or str(status), last_step(self.job.workdir)))
      self.schedules.append(schedule.read(self.job.workdir))
      self._struck, self._learner = None, self._start_learner()
    if (self.job.workdir / "config.json").exists():
      for i, company in enumerate(self._samplers):
        if company is None or (company.poll() is not None and not self._is_finished()):
          self._samplers[i] = self._start_sampler(i)
    return False

  def _is_finished(self) -> bool:
    return self._learner.poll() == 0 or any(company is not None and company.poll() == 0 for company in self._samplers)

  def _note_resumed(self) -> None:
    """Counts what the learner that has just ended had repeated, if it had come so far."""
    if self._died is not None:
      began = resumed(self.job.workdir / "logs" / f"attempt-{self._number}.log")
      if began is not None:
        death = self.deaths[self._died]
        self.deaths[self._died] = death._replace(redone=max(0, death.step - began))

  def leave(self) -> None:
    """Waits for the samplers of a finished run to end by themselves.

    Raises:
      RuntimeError: If one does not, or with another status than 0.
    """
    for i, company in enumerate(self._samplers):
      try:
        status = None if company is None else company.wait(_LEAVE_S)
      except subprocess.TimeoutExpired:
        raise RuntimeError(f"sampler-{i} is still there {_LEAVE_S:.0f} s after the end of the run") from None
      if status == -signal.SIGKILL:  # It was killed at the very end, and need not come back.
        continue
      if status:
        raise RuntimeError(f"sampler-{i} ended with status {status} after the run; see {self._output(f'sampler-{i}')}")


def learner_command(job: Job, more: Sequence[str]) -> list[str]:
  """Returns the command of a learner."""
  return [sys.executable, "-m", "jaxrl_llm.main", *job.flags, f"--workdir={job.workdir}", *more]


def sampler_command(job: Job) -> list[str]:
  """Returns the command of a sampler."""
  return [sys.executable, "-m", "jaxrl_llm.cli.join", str(job.workdir)]


def storm(job: Job, lots: random.Random, *, kills: int, replay: Path | None = None, samplers: int = SAMPLERS) -> Cast:
  """Runs to the end, with kills on the way: about half of the learner, half of the samplers.

  Args:
    job: Run, not yet begun.
    lots: Source of the random choices of times and victims.
    kills: Number of kills.
    replay: Workdir of the run to repeat; None for a run of its own.
    samplers: Number of samplers.

  Raises:
    RuntimeError: If a process ended in a wrong way, or the run before all kills.
    TimeoutError: If nothing happens for five minutes.
  """
  of_learner = kills - kills // 2
  planned = ["learner"] * (of_learner - of_learner // 2) + ["learner while saving"] * (of_learner // 2) + ["sampler"] * (kills // 2)
  lots.shuffle(planned)
  moment = lambda: None if not planned else saving(lots) if planned[0] == "learner while saving" else stepping(lots)
  with Cast(job, replay, samplers=samplers) as cast:
    when, changed, size = moment(), time.monotonic(), -1
    while not cast.look():
      path = job.workdir / "metrics.jsonl"
      if path.exists() and path.stat().st_size != size:
        changed, size = time.monotonic(), path.stat().st_size
      if time.monotonic() - changed > _PATIENCE_S:
        raise TimeoutError(f"{job.workdir}: no new RL step for {_PATIENCE_S:.0f} s; see its logs")
      if when is not None and cast.is_whole() and when(job, (), cast.begun):
        cast.strike(kind := planned.pop(0), lots)
        print(f"{job.workdir.name}: {kind}, after RL step {last_step(job.workdir)}", flush=True)
        when, changed = moment(), time.monotonic()
      time.sleep(_LOOK_S)
    if planned:
      raise RuntimeError(f"{job.workdir} finished before {len(planned)} of {kills} kills; give it more steps")
    cast.leave()
  return cast


def failures(workdir: Path, num_steps: int, schedules: Sequence[Sequence[schedule.Batch]]) -> list[str]:
  """Checks what holds for every finished asynchronous run.

  Args:
    workdir: Folder of the run.
    num_steps: Number of its RL steps.
    schedules: Schedule at each end of its learner.

  Returns:
    A line for each promise that is broken.
  """
  lines, batches = [], schedule.read(workdir)
  if (places := [(batch.step, batch.draw) for batch in batches]) != [(step, 0) for step in range(num_steps)]:
    lines.append(f"schedule: found the batches {places}, expected one for each of {num_steps} steps")
  if wrong := [age for age in ages(batches) if not 0 <= age <= STALENESS]:
    lines.append(f"schedule: found tokens that are {sorted(wrong)} steps old, expected 0 to {STALENESS}")
  for number, before in enumerate(schedules, 1):
    if batches[: len(before)] != list(before):
      lines.append(f"schedule: what the learner had written before its end {number} is no longer there")
  learned = {row["step"]: row for row in rows(workdir) if row["phase"] == "rl"}
  for batch in batches:
    if learned.get(batch.step + 1, {}).get("conversation/turns/max", 1) > 1:
      continue  # What an environment says counts as well.
    sizes = [sum(count for turn in turns for _, count in turn) for turns in batch.turns]
    row = learned.get(batch.step + 1, {})
    seen = [row.get(f"response_length/{name}", -1.0) for name in ("max", "min", "mean")]
    if seen[:2] != [max(sizes), min(sizes)] or not math.isclose(seen[2] * len(sizes), sum(sizes), rel_tol=1e-5):
      lines.append(f"step {batch.step + 1}: {sum(sizes)} tokens were drawn, but it learned from lengths of max, min, mean {seen}")
  if (workdir / gate.FILE).exists():
    lines.append(f"{gate.FILE}: the address of a finished run's learner is left")
  lines += [f"process {pid} is left: {command}" for pid, command in left(workdir)]
  return lines


def left(workdir: Path, seconds: float = 10.0) -> list[tuple[int, str]]:
  """Returns processes of a run that outlive it by some time; none where /proc is missing."""
  until = time.monotonic() + seconds
  while True:
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
      with contextlib.suppress(OSError):
        if f"{_MARK}={workdir}\0".encode() in (folder / "environ").read_bytes():
          command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
          processes.append((int(folder.name), command[:200]))
    if not processes or time.monotonic() > until:
      return processes
    time.sleep(0.2)


def ages(batches: Sequence[schedule.Batch]) -> Counter[int]:
  """Returns the number of tokens by their age in RL steps."""
  counts: Counter[int] = Counter()
  for batch in batches:
    for version, count in (part for turns in batch.turns for turn in turns for part in turn):
      counts[batch.step - version] += count
  return counts


def differences(one: Path, other: Path) -> int:
  """Counts the differences between a run and its repetition: batches, rows, samples, arrays."""
  batches, again = schedule.read(one), schedule.read(other)
  count = abs(len(batches) - len(again)) + sum(a != b for a, b in zip(batches, again, strict=False))
  return count + mismatches(one, other, varies=VARIES)


def run(out: Path, *, job_name: str, processes: int, kills: int, seed: int, flags: Sequence[str]) -> int:
  """Runs a storm and both repetitions; prints a table and writes `asynchronous.json`.

  Args:
    out: Folder for all runs.
    job_name: Key of `JOBS`.
    processes: Number of processes of the learner and of each sampler; above 1, one sampler.
    kills: Number of kills.
    seed: Seed of the random choices.
    flags: Further flags of the run.

  Returns:
    0 if all promises hold, 1 if not.
  """
  every = _EVERY if processes == 1 else _EVERY_OF_SEVERAL
  num_steps, lots, begun = every * (kills + 1), random.Random(seed), time.monotonic()
  own = record(sys.modules[__name__])
  samplers = SAMPLERS if processes == 1 else 1
  sizes = {"rollout.samplers": samplers, "num_steps": num_steps, "checkpoint.every": every}
  flags = (*JOBS[job_name], *FLAGS, *(f"--config.{name}={value}" for name, value in sizes.items()), *flags)
  job = lambda name: Job(flags, out / name, processes, 1, every, out / "programs")
  broken, deaths, seconds = [], {}, {}
  plan = (("storm", kills, None), ("repeated", 0, out / "storm"), ("repeated in a storm", min(kills, _MOST_KILLS_OF_REPLAY), out / "storm"))
  for name, count, replay in plan:
    begun_one = time.monotonic()
    cast = storm(job(name.replace(" ", "-")), lots, kills=count, replay=replay, samplers=samplers)
    deaths[name], seconds[name] = cast.deaths, time.monotonic() - begun_one
    broken += (lines := [f"{name}: {line}" for line in failures(cast.job.workdir, num_steps, cast.schedules)])
    print(*lines, f"{name}: {len(cast.deaths)} ends of processes, {seconds[name]:.0f} s", sep="\n", flush=True)
  counts = {name: differences(out / "storm", out / name.replace(" ", "-")) for name, *_ in plan[1:]}
  batches = schedule.read(out / "storm")
  turns = [turn for batch in batches for turns in batch.turns for turn in turns]
  text = table(deaths, counts)
  print(text, *broken, sep="\n")
  results = {
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "code": {name: own[name] for name in ("commit", "changed", "started")},
    "machine": {"machine": platform.machine(), "cores": own["cores"], "processor": processor(), "jax": jax.__version__},
    "options": {"job": job_name, "processes": processes, "kills": kills, "seed": seed, "num_steps": num_steps, "flags": list(flags)},
    "seconds": {name: round(x) for name, x in seconds.items()} | {"all": round(time.monotonic() - begun)},
    "tokens_by_age": {str(age): count for age, count in sorted(ages(batches).items())},
    "responses": {"all": len(turns), "of_several_weights": sum(len(turn) > 1 for turn in turns)},
    "requests_redone": {name: redone(out / name.replace(" ", "-")) for name, *_ in plan},
    "mismatches": counts,
    "broken": broken,
    "deaths": [{"run": name, **death._asdict()} for name, of_run in deaths.items() for death in of_run],
  }
  (out / "asynchronous.json").write_text(to_json(results))
  return 1 if broken or any(counts.values()) else 0


def redone(workdir: Path) -> int:
  """Counts the requests of lost samplers that others drew again, by the rows that are left."""
  counts = [int(row.get("samplers/redone", 0)) for row in rows(workdir) if row["phase"] == "rl"]
  # A new attempt begins to count anew.
  return sum(x - before if x >= before else x for before, x in zip([0, *counts], counts, strict=False))


def table(deaths: dict[str, Sequence[Death]], mismatched: dict[str, int]) -> str:
  """Formats the ends of processes in Markdown, and what the repetitions differ in."""
  lines = ["| run | strike | times | RL steps redone: most, mean |", "|---|---|---|---|"]
  for name, of_run in deaths.items():
    for kind, words in {**KINDS, "42": RESTARTS}.items():
      if steps := [death.redone for death in of_run if death.kind == kind]:
        lines.append(f"| {name} | {words} | {len(steps)} | {max(steps)}, {sum(steps) / len(steps):.1f} |")
  counts = [f"mismatches of the run {name}: {count}" for name, count in mismatched.items()]
  return "\n".join([*lines, "", *counts])
