"""Pictures of problems, as a model reads them: patches, or the features of a frozen tower."""

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm.devices import hosts
from jaxrl_llm.models import image_slots
from jaxrl_llm.models.image_slots import Pictures, Room
from jaxrl_llm.pretrained import pictures
from jaxrl_llm.pretrained.pictures import Grid, PictureConfig
from jaxrl_llm.tasks.files.storage import IMAGES
from jaxrl_llm.types import Params, Patches, Shown

KEPT = 1024
"""Number of pictures whose patches or features stay in host memory, or those of a batch if more."""


_THREADS = 32
"""Most threads that open pictures; Pillow and NumPy let others run meanwhile."""


class Gallery:
  """The pictures of a run's problems. A frozen tower sees each of a batch once.

  Args:
    prompts: Room for pictures in a prompt.
    rows: Room for pictures in a row of the learner.
    prompt_ids: Function from a problem to the ids of its prompt, in which each picture has all of
      its image tokens.
    features: Compiled function `(params, patches) -> features`; None if the tower is trained.
    at_once: Number of pictures that the function takes.
  """

  def __init__(
    self,
    prompts: Room,
    rows: Room,
    *,
    prompt_ids: Callable[[Mapping[str, Any]], Sequence[int]],
    features: Callable[[Params, Patches], Float[jax.Array, "I S F D"]] | None,
    at_once: int = 16,
  ):
    self.prompts, self.rows = prompts, rows
    self._prompt_ids, self._features, self._at_once = prompt_ids, features, at_once
    self._kept: OrderedDict[bytes, tuple[Grid, Any]] = OrderedDict()
    self.num_read = 0

  @property
  def settings(self) -> PictureConfig:
    """The settings with which pictures become patches."""
    return self.prompts.config.vision.pictures

  @property
  def bytes_of_picture(self) -> int:
    """Bytes of host memory that a kept picture takes."""
    images = self.prompts._replace(pictures=1).shapes(1, 1)._replace(slots=None)
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(images))

  def pictures(self, examples: Sequence[Mapping[str, Any]], params: Params) -> list[Pictures | None]:
    """Returns the pictures of each problem, and where they are in its prompt; None without any.

    Args:
      examples: Task rows, with the contents of their pictures' files as `images`.
      params: Weights of the model, for a frozen tower.
    """
    of_rows = [example.get(IMAGES, ()) for example in examples]
    keys = [[hashlib.sha256(image).digest() for image in images] for images in of_rows]
    contents = {key: image for row, images in zip(keys, of_rows, strict=True) for key, image in zip(row, images, strict=True)}
    seen = self._seen(contents, params)
    known = [[seen[key] for key in row] for row in keys]
    return [self._of_prompt(*of_row) if of_row[1] else None for of_row in zip(examples, keys, known, strict=True)]

  def _of_prompt(self, example: Mapping[str, Any], keys: Sequence[bytes], seen: Sequence[tuple[Grid, Any]]) -> Pictures:
    grids, vision = [grid for grid, _ in seen], self.prompts.config.vision
    places = image_slots.places(self._prompt_ids(example), grids, vision)
    arrays = jax.tree.map(lambda *x: np.stack(x), *(array for _, array in seen))
    kind = "patches" if self._features is None else "features"
    slots = image_slots.spread(places.slots, grids, vision, room=self.prompts.tokens)
    return Pictures(b"".join(keys), places.positions, slots, places.end, **{kind: arrays})

  def _seen(self, contents: Mapping[bytes, bytes], params: Params) -> dict[bytes, tuple[Grid, Any]]:
    """Returns the size of each picture, and its patches or features."""
    vision, missing = self.prompts.config.vision, [key for key in contents if key not in self._kept]
    for start in range(0, len(missing), self._at_once):
      keys = missing[start : start + self._at_once]
      pixels, grids = zip(*self._cut([contents[key] for key in keys]), strict=True)
      arrays = image_slots.place(pixels, grids, vision, size=self.prompts.tokens * vision.merge_size**2)
      if self._features is not None:
        whole = jax.tree.map(lambda x: np.pad(x, [(0, self._at_once - len(x))] + [(0, 0)] * (x.ndim - 1)), arrays)
        arrays = hosts.to_host(self._features(params, whole))
      # A view would keep the arrays of all pictures of the call.
      own = lambda i, arrays=arrays: jax.tree.map(lambda x: np.array(x[i]), arrays)
      self._kept |= {key: (grid, own(i)) for i, (key, grid) in enumerate(zip(keys, grids, strict=True))}
    self.num_read += len(missing)
    seen = {key: self._kept[key] for key in contents}
    for key in contents:
      self._kept.move_to_end(key)
    while len(self._kept) > max(KEPT, len(contents)):
      self._kept.popitem(last=False)
    return seen

  def _cut(self, contents: Sequence[bytes]) -> list[tuple[Float[np.ndarray, "_ pixels"], Grid]]:
    """Cuts pictures into patches, several at a time."""
    cut = lambda content: pictures.patches(pictures.open_picture(content), self.settings)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
      return list(pool.map(cut, contents))

  def shown(self, pictures: Sequence[Pictures | None], mask: Bool[np.ndarray, "n P"]) -> Shown:
    """Lays the pictures of a batch of prompts out for the sampler.

    Args:
      pictures: Pictures of each prompt, from `self.pictures`.
      mask: Mask of the tokens that are not padding, which is on the left.
    """
    images = image_slots.blank(self.prompts.shapes(*mask.shape))
    positions = np.repeat(np.maximum(np.cumsum(mask, axis=1, dtype=np.int32) - 1, 0)[..., None], 3, axis=-1)
    ends = np.sum(mask, axis=1, dtype=np.int32)
    for row, own in enumerate(pictures):
      if own is not None:
        image_slots.put(images, row, 0, own)
        images.slots[row, mask[row]], positions[row, mask[row]], ends[row] = own.slots, own.positions, own.end
    return Shown(images, positions, ends)


def abstract_shown(room: Room, prompts: int, width: int, place: Callable[[tuple[int, ...], Any], Any]) -> Shown:
  """Returns the pictures of a batch of prompts as shapes, each made by `place(shape, dtype)`."""
  images = jax.tree.map(lambda x: place(x.shape, x.dtype), room.shapes(prompts, width))
  return Shown(images, place((prompts, width, 3), np.int32), place((prompts,), np.int32))
