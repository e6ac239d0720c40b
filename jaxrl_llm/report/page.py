"""A page in one file: template, styles, scripts, data, and a policy against other scripts."""

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any


def build_page(template: str, scripts: Sequence[str], data: Mapping[str, Any], *, asks_for_more: bool = False) -> str:
  """Builds a page that opens without a network.

  Args:
    template: File of `report/assets` with placeholders for the style, the script, their hashes and
      the data.
    scripts: Files of `report/assets`, in the order in which they run.
    data: JSON values. Non-finite numbers become null.
    asks_for_more: Whether the page may ask the server that it came from for more data.
  """
  assets = resources.files("jaxrl_llm") / "report" / "assets"
  script = "\n".join((assets / name).read_text("utf-8") for name in scripts)
  style = (assets / "page.css").read_text("utf-8")
  parts = {
    "{{script_hash}}": _hash(script),
    "{{style_hash}}": _hash(style),
    "{{style}}": style,
    "{{script}}": script,
    "{{data}}": embed_json(strict(data)),
    "{{connect}}": " connect-src 'self';" if asks_for_more else "",
  }
  # A single pass, so that no text of the data is taken for a placeholder.
  return re.sub(r"{{\w+}}", lambda mark: parts[mark[0]], (assets / template).read_text("utf-8"))


def write_page(page: str, path: Path) -> Path:
  """Writes a page atomically, so that a reader sees either the old one or the new one."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(page, encoding="utf-8")
  os.replace(temporary, path)
  return path


def _hash(text: str) -> str:
  """Computes the hash that identifies the page's script or style in the content security policy."""
  return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embed_json(value: Any) -> str:
  """Encodes JSON for an HTML script element.

  The text is plain ASCII, and no tag or comment can begin in it.

  Example:
    >>> embed_json({"response": "</script><!--"})
    '{"response":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
  """
  text = json.dumps(value, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def strict(value: Any) -> Any:
  """Replaces non-finite numbers, which files of other programs may hold, with None."""
  if isinstance(value, dict):
    return {str(name): strict(item) for name, item in value.items()}
  if isinstance(value, list | tuple):
    return [strict(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
