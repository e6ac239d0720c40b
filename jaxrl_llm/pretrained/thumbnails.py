"""Small copies of pictures as addresses, for files of samples and the pages that show them."""

import base64
import functools
import io
from collections.abc import Sequence

from jaxrl_llm.pretrained import pictures

MAX_BYTES = 12_000
"""Most bytes of a small copy; its address is a third longer."""
MAX_PICTURES = 8
"""Most pictures of a problem that are copied."""

_SIDES = (256, 192, 128, 96, 64, 32)


def thumbnails(contents: Sequence[bytes]) -> list[str]:
  """Returns small copies of a problem's first pictures, as addresses.

  A picture that cannot be opened has no copy: a run does not stop for a page.

  Raises:
    MissingPackageError: If Pillow is not installed.
  """
  made = []
  for content in contents[:MAX_PICTURES]:
    try:
      made.append(thumbnail(content))
    except pictures.BadPicture:
      continue
  return made


@functools.lru_cache(maxsize=256)
def thumbnail(content: bytes) -> str:
  """Returns a small copy of a picture as an address, a PNG or, if that is too large, a JPEG.

  The copy is drawn anew, so that nothing of the file reaches a page but its pixels.

  Args:
    content: Content of the picture's file.

  Raises:
    BadPicture: If the picture cannot be opened. One line.
    MissingPackageError: If Pillow is not installed.

  Example:
    >>> import numpy as np
    >>> from jaxrl_llm.pretrained import png
    >>> thumbnail(png.encode(np.zeros((600, 300, 3), np.uint8)))[:22]
    'data:image/png;base64,'
  """
  array = pictures.open_picture(content)
  import PIL.Image  # `open_picture` has found it.

  whole = PIL.Image.fromarray(array)
  for side in _SIDES:
    small = whole.copy()
    small.thumbnail((side, side))  # Changes the copy; never enlarges it.
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 80}), ("jpeg", {"quality": 50})):
      buffer = io.BytesIO()
      small.save(buffer, kind, **options)
      if buffer.tell() <= MAX_BYTES:
        return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
  raise pictures.BadPicture("picture too large", f"more than {MAX_BYTES:,} bytes at {_SIDES[-1]} pixels")
