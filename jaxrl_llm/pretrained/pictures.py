"""Pictures as the patches that a vision tower reads, equal to the reference's bit for bit.

Nothing here needs JAX. Pillow opens and resizes pictures; it is imported at its use.
"""

import base64
import functools
import importlib.util
import io
import json
import math
import os
import pathlib
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from jaxrl_llm.messages import MissingPackageError, one_line
from jaxrl_llm.pretrained import png

MAX_PIXELS = 2**26
"""Most pixels of a picture that is opened: 67 million, 200 MB decoded."""
MAX_BYTES = 2**26
"""Most bytes of a picture's file that is opened: 64 MiB."""
MAX_ASPECT = 200
"""Largest ratio of a picture's sides, as in the reference."""

Grid = tuple[int, int, int]
"""Numbers of a picture's patches in time, height and width."""


class PictureConfig(NamedTuple):
  """The settings with which a checkpoint cuts pictures into patches.

  The defaults are Qwen3-VL's.

  Attributes:
    patch_size: Side of a patch, in pixels.
    temporal_patch_size: Number of frames of a patch; a still picture is repeated.
    merge_size: Side of the square of patches that becomes one image token.
    min_pixels: Fewest pixels; a smaller picture is enlarged.
    max_pixels: Most pixels; a larger picture is reduced.
    image_mean: Mean of red, green and blue, on the scale from 0 to 1.
    image_std: Standard deviation of red, green and blue, on the same scale.
    rescale_factor: Factor from pixels to that scale.
  """

  patch_size: int = 16
  temporal_patch_size: int = 2
  merge_size: int = 2
  min_pixels: int = 256 * 256
  max_pixels: int = 4096 * 4096
  image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
  image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
  rescale_factor: float = 1 / 255

  @property
  def token_size(self) -> int:
    """Side of the square that becomes one image token, in pixels."""
    return self.patch_size * self.merge_size


class BadPicture(ValueError):
  """The error for a picture that cannot be used.

  Args:
    reason: Fixed text for each kind of fault.
    detail: What is wrong with this picture.
  """

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(f"{reason} ({detail})" if detail else reason)
    self.reason, self.detail = reason, detail

  def __reduce__(self):
    return type(self), (self.reason, self.detail)


def resized_size(height: int, width: int, config: PictureConfig) -> tuple[int, int]:
  """Returns the height and width to which a picture is resized.

  Both are multiples of `config.token_size`, their product lies between the fewest and the most
  pixels, and the ratio of the sides changes as little as possible.

  Args:
    height: Height of the picture, in pixels.
    width: Width of the picture, in pixels.
    config: Settings of the checkpoint.

  Raises:
    BadPicture: If one side is more than 200 times the other.

  Example:
    >>> resized_size(200, 300, PictureConfig())
    (224, 320)
  """
  if max(height, width) > MAX_ASPECT * min(height, width):
    raise BadPicture("picture too narrow", f"{width} x {height} pixels, expected sides of at most {MAX_ASPECT} to 1")
  factor = config.token_size
  rows, columns = round(height / factor) * factor, round(width / factor) * factor
  if rows * columns > config.max_pixels:
    shrink = math.sqrt(height * width / config.max_pixels)
    rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
  elif rows * columns < config.min_pixels:
    grow = math.sqrt(config.min_pixels / (height * width))
    rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
  if not rows * columns:
    raise BadPicture("picture too small", f"{width} x {height} pixels, expected at least {factor // 2 + 1} a side; raise min_pixels")
  return rows, columns


def grid_of(height: int, width: int, config: PictureConfig) -> Grid:
  """Returns the grid of patches of a picture, given its size in pixels.

  Raises:
    BadPicture: If one side is more than 200 times the other.
  """
  rows, columns = resized_size(height, width, config)
  return 1, rows // config.patch_size, columns // config.patch_size


def num_slots(grid: Grid, config: PictureConfig) -> int:
  """Returns the number of image tokens of a picture.

  Example:
    >>> num_slots(grid_of(200, 300, PictureConfig()), PictureConfig())
    70
  """
  return math.prod(grid) // config.merge_size**2


def patches(picture: Any, config: PictureConfig) -> tuple[Float[np.ndarray, "N pixels"], Grid]:
  """Cuts a picture into patches, in the order of the squares that become image tokens.

  A picture of Pillow's is converted to red, green and blue first; transparent parts become white.

  Args:
    picture: Array `[H, W, 3]` of uint8, or a picture of Pillow's.
    config: Settings of the checkpoint.

  Returns:
    The normalised patches, each flattened from `[3, time, height, width]`, and their grid.

  Raises:
    BadPicture: If one side is more than 200 times the other.
    MissingPackageError: If Pillow is not installed and the picture has to be resized.
    ValueError: If an array has another type or shape.

  Example:
    >>> pixels, grid = patches(np.zeros((64, 64, 3), np.uint8), PictureConfig(min_pixels=4096))
    >>> pixels.shape, grid, float(pixels[0, 0])
    ((16, 1536), (1, 4, 4), -1.0)

  References:
    Qwen2-VL, arXiv:2409.12191, 2024. The reference is `Qwen2VLImageProcessorPil` of transformers
    5.24, which Qwen3-VL uses too.
  """
  array = picture if isinstance(picture, np.ndarray) else rgb(picture)
  if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
    raise ValueError(f"picture: found an array {array.dtype}{list(array.shape)}, expected uint8 [H, W, 3]")
  rows, columns = resized_size(*array.shape[:2], config)
  if array.shape[:2] != (rows, columns):
    image = _pillow().Image
    array = np.asarray(image.fromarray(array).resize((columns, rows), resample=image.Resampling.BICUBIC))
  values = _values(config)
  normalised = np.stack([values[channel][array[:, :, channel]] for channel in range(3)])
  size, merge = config.patch_size, config.merge_size
  grid = (1, rows // size, columns // size)
  squares = normalised.reshape(3, grid[1] // merge, merge, size, grid[2] // merge, merge, size).transpose(1, 4, 2, 5, 0, 3, 6)
  repeated = np.repeat(squares[:, :, :, :, :, None], config.temporal_patch_size, axis=5)
  return repeated.reshape(grid[1] * grid[2], -1), grid


@functools.lru_cache(maxsize=16)
def _values(config: PictureConfig) -> Float[np.ndarray, "3 256"]:
  """Returns the normalised form of each value of a pixel, rounded as in the reference."""
  scaled = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
  mean, std = (np.asarray(values, np.float32)[:, None] for values in (config.image_mean, config.image_std))
  return (scaled - mean) / std


def rgb(picture: Any, *, source: Any = None) -> UInt8[np.ndarray, "H W 3"]:
  """Converts a picture of Pillow's to an array; transparent parts become white.

  Grey of up to 16 bits is scaled by the range of its bits, as Pillow does with colours: of 16 bits
  the upper 8 remain. The reference cuts such values at 255 instead.

  Args:
    picture: Picture of Pillow's.
    source: Picture as it was opened, which still has its format and its tags; None is the picture.

  Raises:
    BadPicture: If the values are of 32 bits or floats, whose range a file does not say.
  """
  image = _pillow().Image
  if picture.mode == "F" or picture.mode.startswith("I"):
    grey = _grey(picture, picture if source is None else source)
    return np.repeat(grey[:, :, None], 3, axis=2)
  if "A" in picture.getbands() or picture.info.get("transparency") is not None:
    picture = picture.convert("RGBA")
    picture = image.alpha_composite(image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
  return np.array(picture.convert("RGB"))


def _grey(picture: Any, source: Any) -> UInt8[np.ndarray, "H W"]:
  """Returns the upper 8 bits of a grey picture of more."""
  tags = getattr(source, "tag_v2", {})
  bits = int(np.max(tags.get(_BITS, 16)))
  # Pillow scales PGM, and older versions of it open grey PNG, as 16 bits within 32.
  if picture.mode == "F" or (picture.mode == "I" and source.format not in ("PNG", "PPM")) or bits > 16:
    kind = "floats" if picture.mode == "F" else "whole numbers of 32 bits"
    raise BadPicture("picture of an unknown range", f"{kind}, expected 8 or 16 bits a channel; convert it")
  values = np.clip(np.asarray(picture).astype(np.int32), 0, 2**bits - 1)
  clear = picture.info.get("transparency")
  grey = values >> (bits - 8) if bits >= 8 else values << (8 - bits)
  grey = 255 - grey if tags.get(_PHOTOMETRIC) == 0 else grey  # White is zero.
  return np.where(False if clear is None else values == clear, 255, grey).astype(np.uint8)


def open_picture(source: bytes | str | os.PathLike, *, max_pixels: int = MAX_PIXELS) -> UInt8[np.ndarray, "H W 3"]:
  """Decodes a picture, the first one of a file with several.

  It is turned upright as its EXIF data say. Its size is read from the header first, so that
  a small file of a huge picture is refused before it fills the memory.

  Args:
    source: Content or path of a file in a format that Pillow reads.
    max_pixels: Most pixels of a picture.

  Raises:
    BadPicture: If the file is missing or broken, or the picture is too large, one pixel, or more
      than 200 times as long as wide. One line.
    MissingPackageError: If Pillow is not installed.

  Example:
    >>> open_picture(png.encode(np.full((2, 3, 3), 7, np.uint8))).tolist()[0]
    [[7, 7, 7], [7, 7, 7], [7, 7, 7]]
  """
  with _opened(source, max_pixels) as picture:
    try:
      return rgb(_pillow().ImageOps.exif_transpose(picture), source=picture)
    except BadPicture:
      raise
    except Exception as error:  # The readers of damaged files raise almost anything.
      raise BadPicture("broken picture", one_line(error)) from error


def size_of(source: bytes | str | os.PathLike, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
  """Returns height and width of a picture as `open_picture` would, from its header alone.

  Raises:
    BadPicture: If the file is missing or no picture, or its size is refused. One line.
    MissingPackageError: If Pillow is not installed.

  Example:
    >>> size_of(png.encode(np.zeros((2, 3, 3), np.uint8)))
    (2, 3)
  """
  with _opened(source, max_pixels) as picture:
    try:
      on_its_side = picture.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
    except Exception as error:
      raise BadPicture("broken picture", one_line(error)) from error
    return (picture.width, picture.height) if on_its_side else (picture.height, picture.width)


_OPENING = threading.Lock()
_ORIENTATION, _BITS, _PHOTOMETRIC = 0x0112, 0x0102, 0x0106
_ON_ITS_SIDE = (5, 6, 7, 8)


def _opened(source: bytes | str | os.PathLike, max_pixels: int):
  """Opens a picture without decoding it, and checks its size."""
  image = _pillow().Image
  try:
    size = len(source) if isinstance(source, bytes) else os.path.getsize(source)
    if size > MAX_BYTES:
      raise BadPicture("picture's file too large", f"{size:,} bytes, expected at most {MAX_BYTES:,}")
    # The filters of warnings belong to all threads.
    with _OPENING, warnings.catch_warnings():
      # Such pictures are refused below, by a lower limit.
      warnings.simplefilter("ignore", image.DecompressionBombWarning)
      picture = image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
  except BadPicture:
    raise
  except FileNotFoundError as error:
    raise BadPicture("missing picture", f"no file {os.fspath(source)}") from error
  except image.DecompressionBombError as error:
    raise BadPicture("picture too large", one_line(error, typed=False)) from error
  except Exception as error:
    # Pillow prints the address of a buffer, which differs from run to run.
    detail = "no format that Pillow knows" if isinstance(error, image.UnidentifiedImageError) else one_line(error)
    raise BadPicture("broken picture", detail) from error
  width, height = picture.size
  try:
    if width * height > max_pixels:
      raise BadPicture("picture too large", f"{width} x {height} pixels, expected at most {max_pixels:,} in all")
    if width * height <= 1:
      raise BadPicture("picture too small", f"{width} x {height} pixels, expected more than one")
    if max(width, height) > MAX_ASPECT * min(width, height):
      raise BadPicture("picture too narrow", f"{width} x {height} pixels, expected sides of at most {MAX_ASPECT} to 1")
  except BadPicture:
    picture.close()
    raise
  return picture


def data_uri(source: bytes | str | os.PathLike) -> str:
  """Returns a picture as the address of a PNG that holds it, for a page or a chat service.

  Raises:
    BadPicture: If the picture cannot be opened. One line.
    MissingPackageError: If the picture is no PNG and Pillow is not installed.

  Example:
    >>> data_uri(png.encode(np.zeros((2, 3, 3), np.uint8)))[:30]
    'data:image/png;base64,iVBORw0K'
  """
  is_png = isinstance(source, bytes) and source.startswith(png.SIGNATURE)
  content = source if is_png else png.encode(open_picture(source))
  return f"data:image/png;base64,{base64.b64encode(content).decode()}"


FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint with its settings of pictures."""


def read_config(folder: str | os.PathLike) -> PictureConfig:
  """Reads the settings of a checkpoint.

  Args:
    folder: Folder of the checkpoint, with a `preprocessor_config.json`, or with
      a `processor_config.json` that holds the same under `image_processor`.

  Raises:
    ValueError: If there is no such file, or a value is missing or not supported. One line.
  """
  folder = pathlib.Path(folder)
  path = next((folder / name for name in FILES if (folder / name).is_file()), None)
  if path is None:
    raise ValueError(f"{folder}: found no {' and no '.join(FILES)}, expected the settings of the checkpoint's pictures; download them too")
  try:
    values = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"{path}: found a file that cannot be read ({one_line(error)}), expected JSON; download it again") from error
  if isinstance(values, dict) and path.name == FILES[1]:
    values = values.get("image_processor")
  if not isinstance(values, dict):
    raise ValueError(f"{path}: found no settings of pictures, expected an object with patch_size and others; download it again")
  return config_from(values, str(path))


def config_from(values: Mapping[str, Any], path: str = FILES[0]) -> PictureConfig:
  """Converts the values of a `preprocessor_config.json`.

  Args:
    values: Content of the file.
    path: Name of the file, for messages.

  Raises:
    ValueError: If a value is missing or not supported. One line.

  Example:
    >>> size = {"shortest_edge": 3136, "longest_edge": 12845056}
    >>> values = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    >>> config_from(values | {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}).min_pixels
    3136
  """
  for name, only in _ONLY.items():
    if values.get(name, only) != only:
      raise ValueError(f"{path}: found {name} {values[name]!r}, expected {only!r}, the only value that is supported")
  size = values.get("size") or {}
  whole = {name: values.get(name) for name in ("patch_size", "temporal_patch_size", "merge_size")}
  whole["min_pixels"] = values.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
  whole["max_pixels"] = values.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
  for name, value in whole.items():
    if type(value) is not int or value < 1:
      where = f" (also size.{'shortest' if name == 'min_pixels' else 'longest'}_edge)" if name.endswith("pixels") else ""
      raise ValueError(f"{path}: found {name} {value!r}{where}, expected a whole number of at least 1")
  if whole["min_pixels"] > whole["max_pixels"]:
    raise ValueError(f"{path}: found min_pixels {whole['min_pixels']} above max_pixels {whole['max_pixels']}, expected it below")
  colours = {name: values.get(name) for name in ("image_mean", "image_std")}
  for name, value in colours.items():
    if not _is_triple(value) or (name == "image_std" and not all(value)):
      raise ValueError(f"{path}: found {name} {value!r}, expected three numbers{' other than 0' if name == 'image_std' else ''}")
  return PictureConfig(**whole, **{name: tuple(map(float, value)) for name, value in colours.items()},
                       rescale_factor=float(values.get("rescale_factor") or 1 / 255))  # fmt: skip


def to_values(config: PictureConfig) -> dict[str, Any]:
  """Converts settings to the values of a `preprocessor_config.json`; inverts `config_from`.

  Example:
    >>> config_from(to_values(PictureConfig(patch_size=8))) == PictureConfig(patch_size=8)
    True
  """
  same = {name: getattr(config, name) for name in ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor")}
  colours = {name: list(getattr(config, name)) for name in ("image_mean", "image_std")}
  size = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
  return {"image_processor_type": "Qwen2VLImageProcessor", "size": size, **same, **colours, **_ONLY}


_ONLY = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}


def _is_triple(value: Any) -> bool:
  return isinstance(value, Sequence) and len(value) == 3 and all(isinstance(x, int | float) and math.isfinite(x) for x in value)


_MISSING = "pictures need the package pillow: pip install 'jaxrl-llm[vision]'"


def check_installed(**settings: object) -> None:
  """Checks that Pillow is installed, without importing it, for a task of any settings.

  Raises:
    MissingPackageError: If it is not. One line.
  """
  del settings
  if importlib.util.find_spec("PIL") is None:
    raise MissingPackageError(_MISSING)


def _pillow() -> Any:
  try:
    import PIL.Image
    import PIL.ImageOps
  except ImportError as error:
    raise MissingPackageError(_MISSING) from error
  return PIL
