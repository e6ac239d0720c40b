"""What the site reads differently in a docstring: a section "Example" is code, as "Examples" is."""

import re

import griffe


class Examples(griffe.Extension):
  """Extension of griffe, named in `mkdocs.yml`."""

  def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
    """Gives the section the name that griffe knows."""
    if obj.docstring:
      obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
