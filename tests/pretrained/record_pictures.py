"""Records what transformers makes of pictures; run where it is installed, torch is not needed.

    python -m tests.pretrained.record_pictures
"""

import hashlib
import json
import pathlib

import numpy as np
from PIL import Image

from jaxrl_llm.pretrained.pictures import PictureConfig

PATH = pathlib.Path(__file__).parent / "pictures.json"

CONFIGS = {
  "qwen3_vl": PictureConfig(),
  "qwen2_vl": PictureConfig(
    patch_size=14, min_pixels=3136, max_pixels=12845056,
    image_mean=(0.48145466, 0.4578275, 0.40821073), image_std=(0.26862954, 0.26130258, 0.27577711),
  ),
  "small": PictureConfig(patch_size=8, min_pixels=1024, max_pixels=4096),
}  # fmt: skip
"""Settings by name: those of two published families, and of a small tower."""


def noise(*shape: int) -> np.ndarray:
  """Returns an array of smooth and of random pixels."""
  rng = np.random.default_rng(sum(shape))
  ramp = np.linspace(0, 200, int(np.prod(shape))).reshape(shape)
  return (ramp + rng.integers(0, 56, shape)).astype(np.uint8)


def cases() -> dict[str, Image.Image]:
  """Returns pictures of all kinds, by name."""
  transparent = Image.fromarray(noise(40, 50, 4))
  palette = Image.fromarray(noise(33, 47, 3)).convert("P")
  clear = palette.copy()
  clear.info["transparency"] = 7
  turned = Image.fromarray(noise(30, 60, 3))
  turned.getexif()[0x0112] = 6
  return {
    "rgb 200 x 300": Image.fromarray(noise(200, 300, 3)),
    "rgb 48 x 48": Image.fromarray(noise(48, 48, 3)),
    "rgb 1 x 1": Image.fromarray(noise(1, 1, 3)),
    "rgb 3 x 500": Image.fromarray(noise(3, 500, 3)),
    "rgb 500 x 3": Image.fromarray(noise(500, 3, 3)),
    "rgb 400 x 399": Image.fromarray(noise(400, 399, 3)),
    "rgba": transparent,
    "grey": Image.fromarray(noise(70, 90)),
    "grey, transparent": Image.fromarray(noise(70, 90, 2), mode="LA"),
    "black and white": Image.fromarray(noise(41, 43)).convert("1"),
    "palette": palette,
    "palette, transparent": clear,
    "cmyk": Image.fromarray(noise(37, 60, 4), mode="CMYK"),
    "turned by exif": turned,
  }


def digest(pixels: np.ndarray) -> str:
  """Returns a digest of an array's bits."""
  return hashlib.blake2b(np.ascontiguousarray(pixels, np.float32).tobytes(), digest_size=12).hexdigest()


def reference(picture: Image.Image, config: PictureConfig) -> tuple[np.ndarray, list[int]]:
  """Returns patches and grid of the reference."""
  from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

  values = config._asdict()
  size = {"shortest_edge": values.pop("min_pixels"), "longest_edge": values.pop("max_pixels")}
  made = Qwen2VLImageProcessorPil(size=size, **values)(images=[picture], return_tensors="np")
  return made["pixel_values"], made["image_grid_thw"][0].tolist()


def main() -> None:
  """Writes the file of digests."""
  recorded = {}
  for name, config in CONFIGS.items():
    for case, picture in cases().items():
      pixels, grid = reference(picture, config)
      recorded[f"{name}: {case}"] = [grid, digest(pixels)]
  lines = [f"{json.dumps(case)}: {json.dumps(value)}" for case, value in recorded.items()]
  PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
  main()
