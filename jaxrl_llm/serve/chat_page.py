"""The page on which to chat with the checkpoint, in one file."""

from importlib import resources

from jaxrl_llm.report.page import fill_template


def build_chat_page() -> str:
  """Builds the page from its template, style and script.

  The page asks its own origin only, and its policy allows no other script.

  Example:
    >>> page = build_chat_page()
    >>> "connect-src 'self'" in page, "{{" in page
    (True, False)
  """
  return fill_template(resources.files("jaxrl_llm") / "serve" / "page", "chat.html", "chat.css", ["chat.js"])
