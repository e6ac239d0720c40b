"""A profile of some RL steps, for xprof and Perfetto: the phases of each step on the host's line, and scopes by name in its programs."""

import contextlib
from pathlib import Path

import jax


class Profiler:
  """Traces the RL steps it is asked for; does nothing in the others.

  What it writes below its folder: `plugins/profile/TIME/*.xplane.pb` for xprof (or TensorBoard), and `perfetto_trace.json.gz`, which
  ui.perfetto.dev opens. No browser or server is started.
  """

  def __init__(self, folder: Path | None, *, start: int, num_steps: int):
    """Traces nothing yet.

    Args:
      folder: of the traces; None traces nothing.
      start: first RL step of the trace, from 1 as in the metrics.
      num_steps: how many.
    """
    self._folder, self._steps = folder, range(start, start + num_steps)
    self._step, self._phase = contextlib.ExitStack(), contextlib.ExitStack()
    self._is_tracing = False

  def step(self, step: int) -> None:
    """Begins an RL step, and ends the one before.

    Args:
      step: from 1.
    """
    self._close_step()
    wanted = self._folder is not None and step in self._steps
    if self._is_tracing and not wanted:
      self._stop()
    if wanted and not self._is_tracing:
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0  # A line for every Python call would bury the phases.
      jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
      self._is_tracing = True
    if self._is_tracing:
      self._step.enter_context(jax.profiler.StepTraceAnnotation("rl_step", step_num=step))

  def phase(self, name: str) -> None:
    """Begins a phase of the step, and ends the one before.

    Args:
      name: as in `timing_s/*` of the metrics.
    """
    self._phase.close()
    if self._is_tracing:
      self._phase.enter_context(jax.profiler.TraceAnnotation(name))

  def close(self) -> None:
    """Ends what is still open; writes the trace."""
    self._close_step()
    if self._is_tracing:
      self._stop()

  def _close_step(self) -> None:
    self._phase.close()
    self._step.close()

  def _stop(self) -> None:
    self._is_tracing = False
    jax.profiler.stop_trace()
