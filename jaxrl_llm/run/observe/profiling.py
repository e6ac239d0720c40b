"""A profiler of RL steps for xprof and Perfetto.

A trace shows the phases of each step on the host's line, and named scopes in the step's programs.
"""

import contextlib
from pathlib import Path

import jax


class Profiler:
  """Profiler that traces the requested RL steps and does nothing in the others.

  It writes to its folder `plugins/profile/TIME/*.xplane.pb` for xprof (or TensorBoard), and
  `perfetto_trace.json.gz`, which ui.perfetto.dev opens. It starts no browser or server.

  Args:
    folder: Folder of the traces; None traces nothing.
    start: First RL step of the trace, from 1 as in the metrics.
    num_steps: Number of traced steps.
  """

  def __init__(self, folder: Path | None, *, start: int, num_steps: int):
    self._folder, self._steps = folder, range(start, start + num_steps)
    self._step, self._phase = contextlib.ExitStack(), contextlib.ExitStack()
    self._is_tracing = False

  def step(self, step: int) -> None:
    """Begins an RL step, from 1, and ends the previous one."""
    is_requested = self._folder is not None and step in self._steps
    if is_requested:
      self._close_step()
    else:
      self.close()
    if is_requested and not self._is_tracing:
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0  # A line for every Python call would bury the phases.
      jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
      self._is_tracing = True
    if self._is_tracing:
      self._step.enter_context(jax.profiler.StepTraceAnnotation("rl_step", step_num=step))

  def phase(self, name: str) -> None:
    """Begins a phase, named as in `timing_s/*` of the metrics, and ends the previous one."""
    self._phase.close()
    if self._is_tracing:
      self._phase.enter_context(jax.profiler.TraceAnnotation(name))

  def close(self) -> None:
    """Ends the open step and writes the trace."""
    self._close_step()
    if self._is_tracing:
      self._is_tracing = False
      jax.profiler.stop_trace()

  def _close_step(self) -> None:
    self._phase.close()
    self._step.close()
