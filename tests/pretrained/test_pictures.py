"""Patches equal the reference's bit for bit, and bad pictures are refused in one line."""

import importlib.util
import io
import json
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxrl_llm.pretrained import pictures, png
from jaxrl_llm.pretrained.pictures import BadPicture, PictureConfig
from tests.pretrained import record_pictures

RECORDED = json.loads(record_pictures.PATH.read_text())
CASES = record_pictures.cases()


@pytest.mark.parametrize("name", record_pictures.CONFIGS)
def test_patches_equal_those_of_the_reference(name):
  config = record_pictures.CONFIGS[name]
  for case, picture in CASES.items():
    pixels, grid = pictures.patches(picture, config)
    assert [list(grid), record_pictures.digest(pixels)] == RECORDED[f"{name}: {case}"], case
    assert pixels.dtype == np.float32 and pixels.shape == (grid[1] * grid[2], 3 * 2 * config.patch_size**2)
    if importlib.util.find_spec("transformers") is not None:
      np.testing.assert_array_equal(pixels, record_pictures.reference(picture, config)[0])


def test_an_array_is_cut_as_its_picture_is():
  array = record_pictures.noise(90, 140, 3)
  pixels, grid = pictures.patches(array, PictureConfig())
  other, same = pictures.patches(Image.fromarray(array), PictureConfig())
  assert grid == same and pictures.num_slots(grid, PictureConfig()) == grid[1] * grid[2] // 4
  np.testing.assert_array_equal(pixels, other)
  for bad in (array.astype(np.float32), array[..., :2], array[0]):
    with pytest.raises(ValueError, match=r"expected uint8 \[H, W, 3\]"):
      pictures.patches(bad, PictureConfig())


def saved(array, form, **settings):
  file = io.BytesIO()
  Image.fromarray(array).save(file, form, **settings)
  return file.getvalue()


def test_a_picture_is_opened_from_bytes_or_a_path_and_turned_upright(tmp_path):
  array = record_pictures.noise(20, 30, 3)
  exif = Image.Exif()
  exif[0x0112] = 6
  turned = saved(array, "PNG", exif=exif)
  (tmp_path / "a.png").write_bytes(turned)
  for source in (turned, tmp_path / "a.png", str(tmp_path / "a.png")):
    np.testing.assert_array_equal(pictures.open_picture(source), np.rot90(array, -1))
    assert pictures.size_of(source) == (30, 20)
  np.testing.assert_array_equal(pictures.open_picture(png.encode(array)), array)
  assert pictures.data_uri(saved(array, "BMP")) == pictures.data_uri(png.encode(array))


RAMP = np.repeat(np.arange(64, dtype=np.uint16)[None] * 1024, 64, axis=0)


def tiff(values, bits, *, zero=1, kind=1):
  """Returns a grey TIFF; `zero` is 0 where white is zero, and `kind` is 3 for floats."""
  tags = {256: 64, 257: 64, 258: bits, 259: 1, 262: zero, 273: 8, 277: 1, 278: 64, 279: len(values), 339: kind}
  entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
  return b"II*\0" + struct.pack("<I", 8 + len(values)) + values + struct.pack("<H", len(tags)) + entries + bytes(4)


def packed(values):
  """Returns values of 12 bits, two in three bytes."""
  first, second = values.ravel()[::2], values.ravel()[1::2]
  return np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], -1).astype(np.uint8).tobytes()


DEEP = {
  "PNG": saved(RAMP, "PNG"), "TIFF": saved(RAMP, "TIFF"), "PGM": saved(RAMP, "PPM"), "JPEG 2000": saved(RAMP, "JPEG2000"),
  "12 bits": tiff(packed(RAMP >> 4), 12), "white is zero": tiff((65535 - RAMP).astype("<u2").tobytes(), 16, zero=0),
}  # fmt: skip


@pytest.mark.parametrize("case", DEEP)
def test_grey_of_more_than_8_bits_is_scaled_by_its_range(case):
  opened = pictures.open_picture(DEEP[case])
  np.testing.assert_array_equal(opened, np.repeat((RAMP >> 8)[:, :, None], 3, axis=2))
  exif = Image.Exif()
  exif[0x0112] = 6
  turned = pictures.open_picture(saved(RAMP[:32], "PNG", exif=exif))
  np.testing.assert_array_equal(turned, np.rot90(opened[:32], -1))


def test_pixels_of_pillow_are_scaled_as_those_of_files():
  for mode, form in (("I;16", "<u2"), ("I;16B", ">u2")):
    np.testing.assert_array_equal(pictures.rgb(Image.frombytes(mode, (64, 64), RAMP.astype(form).tobytes()))[..., 0], RAMP >> 8)
  clear = saved(RAMP, "PNG", transparency=1024)
  # Transparent parts become white.
  np.testing.assert_array_equal(pictures.open_picture(clear)[0, :3, 0], [0, 255, 8])


@pytest.mark.parametrize("case", ["floats", "32 bits", "32 bits by Pillow"])
def test_values_of_an_unknown_range_are_refused(case):
  made = {
    "floats": tiff((RAMP / 65535).astype("<f4").tobytes(), 32, kind=3), "32 bits": tiff(RAMP.astype("<u4").tobytes(), 32),
    "32 bits by Pillow": saved(RAMP.astype(np.int32), "TIFF"),
  }  # fmt: skip
  with pytest.raises(BadPicture, match="picture of an unknown range .*expected 8 or 16 bits a channel; convert it"):
    pictures.open_picture(made[case])


def header(width, height):
  """Returns a PNG that promises a size and holds nothing."""
  chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
  return png.SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


ARRAY = record_pictures.noise(64, 64, 3)
BAD = {
  "no file": ("/nowhere/a.png", "missing picture .no file /nowhere/a.png."),
  "text": (b"no picture", "broken picture .no format that Pillow knows."),
  "empty": (b"", "broken picture"),
  "cut short": (saved(ARRAY, "JPEG")[:900], "broken picture"),
  "a folder": ("/", "broken picture"),
  "large": (header(9000, 9000), "picture too large .9000 x 9000 pixels, expected at most 67,108,864 in all."),
  "a bomb": (header(2**30, 2**30), "picture too large"),
  "1 x 1": (png.encode(ARRAY[:1, :1]), "picture too small .1 x 1 pixels"),
  "narrow": (header(201, 1), "picture too narrow .201 x 1 pixels"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.filterwarnings("error")
def test_bad_pictures_are_refused_in_one_line(case):
  source, words = BAD[case]
  with pytest.raises(BadPicture, match=words) as error:
    pictures.open_picture(source)
  assert "\n" not in str(error.value) and str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_file_too_large_is_not_read(tmp_path):
  path = tmp_path / "a.png"
  with open(path, "wb") as file:
    file.truncate(2**26 + 1)
  with pytest.raises(BadPicture, match="picture's file too large"):
    pictures.open_picture(path)


VALUES = {
  "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
  "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip


def test_settings_are_read_from_a_checkpoint(tmp_path):
  with pytest.raises(ValueError, match="found no preprocessor_config.json"):
    pictures.read_config(tmp_path)
  (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": VALUES | {"patch_size": 14}}))
  assert pictures.read_config(tmp_path).patch_size == 14
  path = tmp_path / "preprocessor_config.json"
  path.write_text(json.dumps(VALUES))
  assert pictures.read_config(tmp_path) == PictureConfig()
  path.write_text("{")
  with pytest.raises(ValueError, match="expected JSON"):
    pictures.read_config(tmp_path)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"patch_size": "16"}, "found patch_size '16', expected a whole number"),
    ({"size": {}}, "found min_pixels None .also size.shortest_edge."),
    ({"min_pixels": 2**30}, "above max_pixels"),
    ({"image_std": [0.5, 0, 0.5]}, "image_std"),
    ({"image_mean": 0.5}, "image_mean 0.5, expected three numbers"),
    ({"resample": 2}, "found resample 2, expected 3"),
    ({"do_resize": False}, "found do_resize False"),
  ],
)
def test_settings_that_are_not_supported(change, words):
  with pytest.raises(ValueError, match=words):
    pictures.config_from(VALUES | change)
