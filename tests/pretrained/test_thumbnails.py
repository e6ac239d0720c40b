"""Small copies of pictures: bounded in bytes, drawn anew, and never a reason to stop."""

import base64
import io

import numpy as np
import pytest

from jaxrl_llm.pretrained import png, thumbnails
from jaxrl_llm.pretrained.pictures import open_picture

PIL = pytest.importorskip("PIL.Image")

NOISE = np.random.default_rng(0).integers(256, size=(900, 1200, 3), dtype=np.uint8)


def content_of(address):
  head, _, text = address.partition(";base64,")
  assert head in ("data:image/png", "data:image/jpeg")
  return base64.b64decode(text)


@pytest.mark.parametrize(
  ("picture", "size"), [(np.zeros((48, 40, 3), np.uint8), (48, 40)), (NOISE, None), (np.zeros((600, 1200, 3), np.uint8), (128, 256))]
)
def test_a_copy_is_small(picture, size):
  content = content_of(thumbnails.thumbnail(png.encode(picture)))
  assert len(content) <= thumbnails.MAX_BYTES
  shape = open_picture(content).shape[:2]
  assert shape == size if size else max(shape) <= 256


def test_only_pixels_reach_a_copy():
  buffer = io.BytesIO()
  exif = PIL.Exif()
  exif[0x010E] = "<script>"
  PIL.fromarray(NOISE[:64, :64]).save(buffer, "jpeg", exif=exif)
  assert b"<script>" in buffer.getvalue() and b"<script>" not in content_of(thumbnails.thumbnail(buffer.getvalue()))


def test_pictures_that_cannot_be_opened_are_left_out():
  good = png.encode(np.zeros((9, 9, 3), np.uint8))
  assert thumbnails.thumbnails([b"no picture", good]) == [thumbnails.thumbnail(good)]
  assert len(thumbnails.thumbnails([good] * 40)) == thumbnails.MAX_PICTURES
