"""The tests. `python -m tests` sets up what they need and runs them; see `tests/__main__.py`."""

# This file must parse on any Python, so that an old one is told what is wrong.
import sys

if sys.version_info < (3, 11):
  sys.exit("jaxrl_llm needs Python 3.11 to 3.13; this is Python %d.%d. Try `python3.11 -m tests`." % sys.version_info[:2])
