"""Metrics and sample rollouts on disk: `metrics.jsonl`, `samples.jsonl` and TensorBoard events.

The two `.jsonl` files are the source of truth. TensorBoard shows a view of `metrics.jsonl`.

A row is one line of strict JSON, which is on the disk (fsync) before `write` returns. If the disk
is full, rows wait in memory until there is room, and no partial line is left. A killed process can
leave at most one torn last line, which the next reader or writer drops. Rows hold no time of day,
so that an uninterrupted run and a resumed one can be compared row by row.

Each phase counts its own steps. A checkpoint stores `writer.phase_steps`. A resumed run passes them
to `writer.resume`, which removes every row written after that checkpoint, so that no row repeats.
"""

from jaxrl_llm.workdir.metrics.row_file import read_rows, reproducible
from jaxrl_llm.workdir.metrics.writers import PHASES, MetricWriter, SampleWriter

__all__ = ["PHASES", "MetricWriter", "SampleWriter", "read_rows", "reproducible"]
