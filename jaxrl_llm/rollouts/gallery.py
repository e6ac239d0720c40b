"""Pictures of problems, as a model reads them: patches, or the features of a frozen tower."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.models import image_slots
from jaxrl_llm.models.image_slots import Grid, Pictures, Room
from jaxrl_llm.pretrained import pictures
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.types import Images, Params, Patches, Shown

_KEPT = 1024
"""Number of pictures whose patches or features stay in host memory."""


class Gallery:
  """The pictures of a run's problems; each is read once, and seen once by a frozen tower.

  Args:
    prompts: Room for pictures in a prompt.
    rows: Room for pictures in a row of the learner.
    prompt_ids: Function from a problem to the ids of its prompt, in which each picture has all of
      its image tokens.
    features: Compiled function `(params, patches) -> features` of one picture; None if the tower is
      trained.
  """

  def __init__(
    self,
    prompts: Room,
    rows: Room,
    *,
    prompt_ids: Callable[[Mapping[str, Any]], Sequence[int]],
    features: Callable[[Params, Patches], Float[jax.Array, "1 S F D"]] | None,
  ):
    self.prompts, self.rows = prompts, rows
    self._prompt_ids, self._features = prompt_ids, features
    self._kept: OrderedDict[bytes, tuple[Grid, Any]] = OrderedDict()
    self.num_read = 0

  @property
  def settings(self) -> PictureConfig:
    """The settings with which pictures become patches."""
    return self.prompts.config.vision.pictures

  def pictures(self, example: Mapping[str, Any], params: Params) -> Pictures:
    """Returns the pictures of a problem, and where they are in its prompt.

    Args:
      example: Task row, with the contents of its pictures' files as `images`.
      params: Weights of the model, for a frozen tower.
    """
    vision, keys = self.prompts.config.vision, [hashlib.sha256(image).digest() for image in example["images"]]
    seen = [self._seen(key, image, params) for key, image in zip(keys, example["images"], strict=True)]
    grids = [grid for grid, _ in seen]
    places = image_slots.places(self._prompt_ids(example), grids, vision)
    arrays = jax.tree.map(lambda *x: np.stack(x), *(array for _, array in seen))
    kind = "patches" if self._features is None else "features"
    slots = image_slots.spread(places.slots, grids, vision, room=self.prompts.tokens)
    return Pictures(b"".join(keys), places.positions, slots, places.end, **{kind: arrays})

  def _seen(self, key: bytes, image: bytes, params: Params) -> tuple[Grid, Any]:
    """Returns the size of a picture, and its patches or features."""
    if key in self._kept:
      self._kept.move_to_end(key)
      return self._kept[key]
    vision = self.prompts.config.vision
    pixels, (_, *grid) = pictures.patches(pictures.open_picture(image), vision.pictures)
    size = self.prompts.tokens * vision.merge_size**2
    patches = image_slots.place([pixels], [tuple(grid)], vision, size=size)
    if self._features is None:
      array = jax.tree.map(lambda x: x[0], patches)
    else:
      array = np.asarray(jax.device_get(self._features(params, patches)))[0]
    self.num_read += 1
    self._kept[key] = tuple(grid), array
    if len(self._kept) > _KEPT:
      self._kept.popitem(last=False)
    return self._kept[key]

  def shown(self, examples: Sequence[Mapping[str, Any]], width: int, params: Params) -> Shown:
    """Returns the pictures of a batch of prompts, padded on the left to `width` slots."""
    images = image_slots.blank(self.prompts.shapes(len(examples), width))
    positions = np.zeros((len(examples), width, 3), np.int32)
    ends = np.zeros(len(examples), np.int32)
    for row, example in enumerate(examples):
      pictures = self.pictures(example, params)
      image_slots.put(images, row, 0, pictures)
      here = slice(width - len(pictures.slots), width)
      images.slots[row, here], positions[row, here], ends[row] = pictures.slots, pictures.positions, pictures.end
    return Shown(images, positions, ends)


def abstract_shown(room: Room, prompts: int, width: int, place: Callable[[tuple[int, ...], Any], Any]) -> Shown:
  """Returns the pictures of a batch of prompts as shapes, each made by `place(shape, dtype)`."""
  ints: Callable[..., Int[Any, ...]] = lambda *shape: place(shape, np.int32)
  images: Images = jax.tree.map(lambda x: place(x.shape, x.dtype), room.shapes(prompts, width))
  return Shown(images, ints(prompts, width, 3), ints(prompts))
