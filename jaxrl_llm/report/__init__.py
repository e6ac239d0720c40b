"""One HTML page of a run, and one figure: `python -m jaxrl_llm.report RUN`; of several runs the page of `comparison`.

The page is a single file that opens without a network: styles, scripts and data are inside it. It can be made at any time, also while the
run goes on; whatever is missing yet is left out. Model output is data, never HTML: it is embedded as JSON in which no tag can begin, the
page shows it with `textContent` only, and its content security policy allows no script but the page's own.
"""

import os
from pathlib import Path

from jaxrl_llm.report import page
from jaxrl_llm.report.data import SOURCES, report_data
from jaxrl_llm.report.learning_curves import write_figure

__all__ = ["SOURCES", "report_data", "write_figure", "write_report"]

_SCRIPTS = ("charts.js", "panels.js", "tokens.js", "rollouts.js", "page.js")


def write_report(workdir: str | os.PathLike) -> Path:
  """Writes `workdir/report.html`, replacing an older one in one step.

  Args:
    workdir: a run's folder, finished or not.

  Returns:
    The page's path.

  Raises:
    FileNotFoundError: `workdir` does not exist or holds none of `SOURCES`.
  """
  return page.write(page.build("page.html", _SCRIPTS, report_data(workdir)), Path(workdir) / "report.html")
