"""Makes the pages of the API from the docstrings: `python docs/make_api.py [--out=api]`, then open `api/index.html`."""

import argparse
import pathlib
import sys
import warnings
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]


def public_modules() -> list[str]:
  """Every module of the package that a user may import, by dotted name; rooms come before what is in them."""
  found = []
  for path in sorted((ROOT / "jaxrl_llm").rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
      parts = parts[:-1]
    if not any(part.startswith("_") for part in parts):
      found.append(".".join(parts))
  return sorted(found)


def main(argv: Sequence[str] | None = None) -> int:
  """Parses the command line and writes the pages. Returns the exit status."""
  parser = argparse.ArgumentParser(prog="python docs/make_api.py", description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("api"), help="folder of the pages")
  args = parser.parse_args(argv)
  try:
    import pdoc
  except ImportError:
    print("error: the pages of the API need pdoc: pip install -e '.[docs]'", file=sys.stderr)
    return 2
  sys.path.insert(0, str(ROOT))
  pdoc.render.configure(docformat="google", show_source=False)
  # Named one by one: pdoc leaves out the modules of a room that its `__all__` does not name.
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of modules that are named twice and of quoted names; the pages are complete.
    pdoc.pdoc(*public_modules(), output_directory=args.out)
  print(args.out / "index.html")
  return 0


if __name__ == "__main__":
  sys.exit(main())
