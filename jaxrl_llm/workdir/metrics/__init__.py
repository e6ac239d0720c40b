"""Metrics and sample rollouts on disk: `metrics.jsonl` and `samples.jsonl`, the source of truth, and TensorBoard, a view of the first.

A row is one line of strict JSON, on the disk (fsync) before `write` returns; on a disk that is full, rows wait in memory until there is
room, and no half line is left. A killed process can leave at most one torn last line, which the next reader or writer drops. Rows hold no
time of day, so an unbroken run and a resumed one can be compared row by row.

Each phase counts its own steps. A checkpoint stores `writer.phase_steps`; a resumed run hands them to `writer.resume`, which removes every
row written after that checkpoint, so that no row repeats.
"""

from jaxrl_llm.workdir.metrics.row_file import read_rows
from jaxrl_llm.workdir.metrics.writers import PHASES, MetricWriter, SampleWriter

__all__ = ["PHASES", "MetricWriter", "SampleWriter", "read_rows"]
