"""The HTML page and the figure of a run: `python -m jaxrl_llm.report RUN`.

For several runs, the command writes the page of `comparison`.

The page is a single file with styles, scripts and data, which opens without a network. It can be
written at any time, even while the run is in progress; missing parts are left out. Model output is
data, never HTML. It is embedded as JSON in which no tag can begin, and the page shows it with
`textContent` only. The content security policy allows no script but the page's own.
"""

import os
from pathlib import Path

from jaxrl_llm.report import page
from jaxrl_llm.report.data import SOURCES, report_data
from jaxrl_llm.report.learning_curves import write_figure
from jaxrl_llm.workdir import disk

__all__ = ["TEMPLATES", "SOURCES", "report_data", "write_figure", "write_report"]

TEMPLATES = {
  "run": ("page.html", ("charts.js", "panels.js", "tokens.js", "rollouts.js", "page.js")),
  "comparison": ("comparison.html", ("charts.js", "arms.js", "comparison.js")),
}
"""Template and scripts, in the order in which they run, of a run's page and of a comparison's."""


def write_report(workdir: str | os.PathLike) -> Path:
  """Writes `workdir/report.html`, which atomically replaces an older one.

  Args:
    workdir: Folder of a run, finished or not.

  Returns:
    Path of the page.

  Raises:
    FileNotFoundError: If `workdir` does not exist or holds none of `SOURCES`.
  """
  path = Path(workdir) / "report.html"
  disk.replace(path, page.build_page(*TEMPLATES["run"], report_data(workdir)))
  return path
