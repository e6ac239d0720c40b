"""The page on which to chat with the checkpoint, in one file."""

import base64
import hashlib
import re
from importlib import resources


def build_chat_page() -> str:
  """Builds the page from its template, style and script.

  The page asks its own origin only, and its policy allows no other script.

  Example:
    >>> page = build_chat_page()
    >>> "connect-src 'self'" in page, "{{" in page
    (True, False)
  """
  folder = resources.files("jaxrl_llm") / "serve" / "page"
  script, style = ((folder / name).read_text("utf-8") for name in ("chat.js", "chat.css"))
  parts = {"{{script_hash}}": _hash(script), "{{style_hash}}": _hash(style), "{{style}}": style, "{{script}}": script}
  # A single pass, so that no text of a part is taken for a placeholder.
  return re.sub(r"{{\w+}}", lambda mark: parts[mark[0]], (folder / "chat.html").read_text("utf-8"))


def _hash(text: str) -> str:
  return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
