"""The pages of the site besides the guides: the repository's other pages, and the API.

A hook of MkDocs, named in `mkdocs.yml`. Each page keeps the path that it has in the repository, so
that a link that works there works on the site.
"""

import ast
import html
import logging
import pathlib
import posixpath
import re
import subprocess
import sys
from collections.abc import Mapping

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = pathlib.Path(__file__).resolve().parents[1]
ADDRESSES = {"docs/README.md": "index.html", "README.md": "overview.html"}
"""Pages that are shown elsewhere than their paths say: two would be the first page of the site."""

WORKER = ("https://unpkg.com/iframe-worker/shim", "docs/iframe_worker.js")
"""Script that lets pages on disk be searched: where the theme would fetch it, and our copy."""

ASSETS = ("LICENSE", "docs/site.css", WORKER[1])
SCHEMAS = "docs/schemas/"
SHOWN = (".ipynb", ".md", ".png", ".svg")
LOG = logging.getLogger("mkdocs.plugins.site")
HREF = re.compile(r'(?<=<a )href="([^"]*)"')
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
MATHS = re.compile(r"<(pre|code|script|style)\b.*?</\1>|\$\$(?P<block>[^$]+)\$\$|\$(?P<inline>[^$\n]+)\$", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
  """Adds the modules to the navigation, by room."""
  rooms: dict[str, list[dict[str, str]]] = {}
  for module in public_modules():
    room, _, name = module.removeprefix("jaxrl_llm").removeprefix(".").partition(".")
    rooms.setdefault(room, []).append({name or "the room": _api_page(module)})
  sections = [{room: pages if len(pages) > 1 else pages[0]["the room"]} for room, pages in rooms.items() if room]
  config.nav.append({"API": ["api/index.md", *sections]})
  return config


@event_priority(100)  # Before the plugin that makes pages of notebooks.
def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Replaces the guides by all pages and pictures of the repository, and adds the API."""
  for file in list(files):
    if file.src_dir == config.docs_dir:
      files.remove(file)
  for path in tracked():
    if path.endswith(SHOWN) or path in ASSETS or path.startswith(SCHEMAS):
      files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=ADDRESSES.get(path)))
  modules = public_modules()
  for module in modules:
    files.append(File.generated(config, _api_page(module), content=f"# {module}\n\n::: {module}\n"))
  files.append(File.generated(config, "api/index.md", content=api_index(modules)))
  # MkDocs forgets what is added while it loads this file.
  sys.path += [str(ROOT), str(ROOT / "docs")]
  from objective_pages import configs, pages

  for path, content in pages().items():
    files.append(File.generated(config, path, content=content))
  linked = {path for page in tracked() if page.endswith((".ipynb", ".md")) for path in linked_sources(page)}
  for path in sorted(linked | set(configs().values())):
    files.append(File.generated(config, f"{path}.md", content=f"# {path}\n\n```python\n{(ROOT / path).read_text()}\n```\n"))
  return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Points links to a folder at its page, and links to a Python file at a page that shows it."""
  here = posixpath.dirname(page.file.src_uri)

  def page_of(match: re.Match) -> str:
    path = posixpath.normpath(posixpath.join(here, match[1]))
    if (ROOT / path / "README.md").is_file():
      return posixpath.join(match[1], "README.md")
    return f"{match[1]}.md" if path.endswith(".py") else match[1]

  return LINK.sub(page_of, markdown)


@event_priority(-100)  # After the plugin that makes pages of notebooks.
def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Turns the LaTeX of notebooks into MathML, and points their links at the pages of the site.

  Browsers show MathML without a script. MkDocs reads the links of Markdown only.
  """
  if not page.file.src_uri.endswith(".ipynb"):
    return content
  content = HREF.sub(lambda match: f'href="{html.escape(_address(html.unescape(match[1]), page, files))}"', content)

  def maths(match: re.Match) -> str:
    latex = match["block"] or match["inline"]
    if latex is None:
      return match[0]
    return latex2mathml.converter.convert(html.unescape(latex), display="block" if match["block"] else "inline")

  return MATHS.sub(maths, content)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
  """Lets a page load the script of the search from the site itself."""
  return output.replace(WORKER[0], get_relative_url(WORKER[1], page.url))


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
  """Does the same for pages that no file is made into, such as `404.html`."""
  return output.replace(WORKER[0], WORKER[1])


def tracked() -> list[str]:
  """Lists the files of the repository by their paths."""
  command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
  return [path for path in listed if path and (ROOT / path).is_file()]


def public_modules() -> dict[str, pathlib.Path]:
  """Returns the file of every module that a user may import; a room precedes what is in it."""
  modules = {}
  for path in (ROOT / "jaxrl_llm").rglob("*.py"):
    parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
    # Files of a new project are no modules.
    if not any(part.startswith("_") for part in parts) and "template" not in parts:
      modules[".".join(parts)] = path
  return dict(sorted(modules.items()))


def api_index(modules: Mapping[str, pathlib.Path]) -> str:
  """Writes the page that lists all modules, each with the first line of its docstring."""
  lines = ["# API", "", "Every public module, by room. The pages are made from the docstrings.", ""]
  for module, path in modules.items():
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    if path.parent.parent == ROOT / "jaxrl_llm" and path.name == "__init__.py":
      lines += ["", f"## [{path.parent.name}]({module}.md)", "", first, ""]
    else:
      indent = "    " * max(module.count(".") - 2, 0)
      lines.append(f"{indent}- [`{module.removeprefix('jaxrl_llm.')}`]({module}.md): {first}")
  return "\n".join(lines) + "\n"


def linked_sources(page: str) -> set[str]:
  """Returns the Python files that a page links to."""
  targets = LINK.findall((ROOT / page).read_text())
  paths = {posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) for target in targets}
  return {path for path in paths if path.endswith(".py") and (ROOT / path).is_file()}


def _address(link: str, page: Page, files: Files) -> str:
  """Returns the address of what a notebook links to, relative to its page.

  A link that leads nowhere is warned of, which stops the build.
  """
  path, hash_sign, anchor = link.partition("#")
  if not path or ":" in path:
    return link
  path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), path))
  candidates = (files.get_file_from_path(name) for name in (path, f"{path}/README.md", f"{path}.md"))
  file = next((file for file in candidates if file), None)
  if file is None:
    LOG.warning(f"'{page.file.src_uri}' contains a link '{link}', but the target is not found")
    return link
  return get_relative_url(file.url, page.url) + hash_sign + anchor


def _api_page(module: str) -> str:
  return f"api/{module}.md"
