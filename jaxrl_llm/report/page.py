"""A page in one file: template, styles, scripts, data, and a policy against other scripts."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
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
  connect = " connect-src 'self';" if asks_for_more else ""
  assets = resources.files("jaxrl_llm") / "report" / "assets"
  return fill_template(assets, template, "page.css", scripts, data=embed_json(strict(data)), connect=connect)


def fill_template(folder: Traversable, template: str, style: str, scripts: Sequence[str], **parts: str) -> str:
  """Fills the placeholders of a page, whose policy allows no style or script but its own.

  Args:
    folder: Folder of the files.
    template: File with placeholders, such as `{{style}}` and `{{style_hash}}`.
    style: File of the style.
    scripts: Files of the script, in the order in which they run.
    **parts: Texts for further placeholders, by name.
  """
  parts["style"] = (folder / style).read_text("utf-8")
  parts["script"] = "\n".join((folder / name).read_text("utf-8") for name in scripts)
  parts |= {f"{name}_hash": _hash(parts[name]) for name in ("style", "script")}
  # A single pass, so that no text of a part is taken for a placeholder.
  return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], (folder / template).read_text("utf-8"))


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
