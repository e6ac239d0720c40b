"""Pictures as PNG files, written with the standard library alone."""

import struct
import zlib

import numpy as np
from jaxtyping import UInt8

SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""First bytes of a PNG file."""
_EIGHT_BIT_RGB = (8, 2, 0, 0, 0)  # Bits, colour type, compression, filter, no interlacing.


def encode(picture: UInt8[np.ndarray, "H W 3"]) -> bytes:
  """Encodes a picture as a PNG file.

  Example:
    >>> encode(np.zeros((2, 3, 3), np.uint8))[1:4]
    b'PNG'
  """
  height, width, _ = picture.shape
  # Each row begins with the number of its filter.
  rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)
  header = struct.pack(">IIBBBBB", width, height, *_EIGHT_BIT_RGB)
  return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
  return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
