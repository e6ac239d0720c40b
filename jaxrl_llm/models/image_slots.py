"""Where pictures are in rows of tokens and in arrays of patches, on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.models.config import ModelConfig, Vision
from jaxrl_llm.pretrained import pictures as pictures_lib
from jaxrl_llm.pretrained.pictures import Grid, num_slots
from jaxrl_llm.types import Images, Patches


class Places(NamedTuple):
  """Places of the tokens of one sequence.

  Attributes:
    positions: Position of each token in time, height and width. Those of text are equal.
    slots: Index of each token's feature among those of all pictures, in order; -1 for text.
    end: Position of the token that follows.
  """

  positions: Int[np.ndarray, "T 3"]
  slots: Int[np.ndarray, " T"]
  end: int


class Pictures(NamedTuple):
  """Pictures of one prompt, with room for S image tokens each.

  Attributes:
    key: Digest of the pictures.
    positions: Position of each token of the prompt in time, height and width.
    slots: Index of each token among the I·S image tokens of the pictures; -1 for text.
    end: Position of the first token of the response.
    features: Features of the image tokens; None if they follow from the patches.
    patches: Patches of the pictures; None if there are features.
  """

  key: bytes
  positions: Int[np.ndarray, "P 3"]
  slots: Int[np.ndarray, " P"]
  end: int
  features: Float[np.ndarray, "I S F D"] | None = None
  patches: Patches | None = None

  @property
  def count(self) -> int:
    """The number of pictures."""
    return len(self.patches.mask if self.features is None else self.features)

  def span(self, start: int, end: int) -> tuple[Int[np.ndarray, "T 3"], Int[np.ndarray, " T"]]:
    """Returns the positions and slots of some tokens of the prompt and of what follows it."""
    size = len(self.slots)
    behind = np.arange(max(start, size), end)
    positions = np.concatenate([self.positions[start:end], np.repeat(self.end + behind[:, None] - size, 3, axis=1)])
    return positions, np.append(self.slots[start:end], np.full(len(behind), -1, np.int32))


def places(tokens: Sequence[int] | Int[np.ndarray, " T"], grids: Sequence[Grid], vision: Vision) -> Places:
  """Computes the places of the tokens of a sequence that shows pictures.

  Text counts on. The tokens of a picture that begins at position p are at p in time, and at p plus
  their row or column in height or width. The next text follows the larger of the two.

  Args:
    tokens: Token ids, with the image token once for each square of patches.
    grids: Patches of the pictures in time, height and width, in order.
    vision: Tower.

  Raises:
    ValueError: If the image tokens do not fit the pictures.

  Example:
    >>> found = places([5, 9, 9, 9, 9, 5], [(1, 4, 4)], Vision(24, 1024, 16, 4096, image_token=9))
    >>> found.positions.tolist(), found.end
    ([[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3, 3, 3]], 4)
  """
  tokens = np.asarray(tokens)
  is_image = tokens == vision.image_token
  expected = sum(num_slots(grid, vision.pictures) for grid in grids)
  if is_image.sum() != expected:
    each = ", ".join(str(num_slots(grid, vision.pictures)) for grid in grids)
    sizes = f"{expected}, which are {each} of {len(grids)} pictures" if grids else "none, since no picture is given"
    raise ValueError(f"tokens: found {is_image.sum()} image tokens (id {vision.image_token}), expected {sizes}")
  positions = np.zeros((len(tokens), 3), np.int32)
  slots = np.where(is_image, np.cumsum(is_image) - 1, -1).astype(np.int32)
  start = end = 0  # The first token that has no position yet, and its position.
  for i, grid in enumerate(grids):
    count = num_slots(grid, vision.pictures)
    begin = int(np.flatnonzero(is_image[start:])[0]) + start
    if not is_image[begin : begin + count].all():
      run = int(np.argmin(is_image[begin : begin + count]))
      raise ValueError(f"tokens: found a run of {run} image tokens at slot {begin}, expected the {count} of picture {i + 1}")
    positions[start:begin] = end + np.arange(begin - start)[:, None]
    end += begin - start
    height, width = (size // vision.merge_size for size in grid[1:])
    rows, columns = np.divmod(np.arange(count), width)
    positions[begin : begin + count] = end + np.stack([np.zeros_like(rows), rows, columns], axis=1)
    end += max(height, width)
    start = begin + count
  positions[start:] = end + np.arange(len(tokens) - start)[:, None]
  return Places(positions, slots, end + len(tokens) - start)


def spread(slots: Int[np.ndarray, " T"], grids: Sequence[Grid], vision: Vision, *, room: int) -> Int[np.ndarray, " T"]:
  """Returns the indices of image tokens if each picture has room for `room` of them.

  Args:
    slots: Indices from `places`, in which each picture follows the one before.
    grids: Sizes of the pictures.
    vision: Tower.
    room: Number of image tokens that each picture has room for.

  Example:
    >>> spread(np.array([-1, 0, 1, -1, 2]), [(1, 2, 4), (1, 2, 2)], Vision(24, 1024, 16, 4096), room=8).tolist()
    [-1, 0, 1, -1, 8]
  """
  counts = np.array([num_slots(grid, vision.pictures) for grid in grids], np.int64)
  shifts = np.repeat(np.arange(len(grids)) * room - (np.cumsum(counts) - counts), counts)
  return np.where(slots < 0, -1, slots + np.append(shifts, 0)[slots]).astype(np.int32)


class Room(NamedTuple):
  """Room for pictures in each row of a batch.

  Attributes:
    config: Model with a tower.
    pictures: Number of pictures of a row (I).
    tokens: Number of image tokens of a picture (S).
  """

  config: ModelConfig
  pictures: int
  tokens: int

  def shapes(self, rows: int, slots: int) -> Images:
    """Returns the shapes of the pictures of a batch with so many rows and slots."""
    config, lead, places = self.config, (rows, self.pictures), jax.ShapeDtypeStruct((rows, slots), "int32")
    if config.train_tower:
      return Images(places, patches=self.patches(*lead))
    features = (*lead, self.tokens, 1 + len(config.vision.deep_layers), config.d_model)
    return Images(places, features=jax.ShapeDtypeStruct(features, config.dtype))

  def patches(self, *lead: int) -> Patches:
    """Returns the shapes of the patches of pictures, whose numbers are `lead`."""
    vision = self.config.vision
    lead = (*lead, self.tokens * vision.merge_size**2)
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct((*lead, *shape), dtype)
    ints = lambda count: array(count, dtype="int32")
    return Patches(array(vision.patch_width), ints(2), ints(4), array(4), array(dtype="bool"))


def blank(shapes: Images) -> Images:
  """Returns pictures of zeros in host memory, and slots without any."""
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  return zeros._replace(slots=zeros.slots - 1)


def put(images: Images, row: int, first: int, pictures: Pictures) -> None:
  """Writes the pictures of a prompt into a row, beginning at place `first`."""
  here = slice(first, first + pictures.count)
  for name in ("features", "patches"):
    if getattr(images, name) is not None:
      jax.tree.map(lambda x, own: x[row].__setitem__(here, own), getattr(images, name), getattr(pictures, name))


def place(pixels: Sequence[Float[np.ndarray, "_ pixels"]], grids: Sequence[Grid], vision: Vision, *, size: int | None = None) -> Patches:
  """Lays the patches of pictures out for the tower, and says where each is in its picture.

  Args:
    pixels: Patches of each picture, from `pretrained.pictures.patches`.
    grids: Sizes of the pictures.
    vision: Tower.
    size: Number of patches to pad each picture to; None is that of the largest.

  Raises:
    ValueError: If a picture has more patches than `size`, or a number other than its grid.
  """
  counts = [height * width for _, height, width in grids]
  for i, (count, x) in enumerate(zip(counts, pixels, strict=True)):
    if x.shape != (count, vision.patch_width):
      raise ValueError(f"pixels[{i}]: found shape {x.shape}, expected {(count, vision.patch_width)} for a grid of {grids[i]}")
  size = max(counts, default=0) if size is None else size
  if max(counts, default=0) > size:
    raise ValueError(f"size: found {size}, expected at least {max(counts)} patches")

  def padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack([np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in arrays])

  coordinates = [_coordinates(grid, vision.merge_size) for grid in grids]
  corners, shares = zip(*(_corners(x, grid, vision.grid_side) for x, grid in zip(coordinates, grids, strict=True)), strict=True)
  mask = [np.ones(count, bool) for count in counts]
  return Patches(*map(padded, (pixels, coordinates, corners, shares, mask)))


def _coordinates(grid: Grid, merge: int) -> Int[np.ndarray, "N 2"]:
  """Returns row and column of each patch, square after square."""
  _, height, width = grid
  both = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1).astype(np.int32)
  return both.reshape(height // merge, merge, width // merge, merge, 2).swapaxes(1, 2).reshape(-1, 2)


def _corners(coordinates: Int[np.ndarray, "N 2"], grid: Grid, side: int) -> tuple[Int[np.ndarray, "N 4"], Float[np.ndarray, "N 4"]]:
  """Returns the four learned positions around each patch, and their shares.

  The square of learned positions is stretched so that its corners are those of the picture.
  """
  spans = np.maximum(np.asarray(grid[1:], np.float32) - 1, 1)
  exact = coordinates.astype(np.float32) * np.float32(side - 1) / spans
  low = np.floor(exact)
  taps = np.minimum(low[:, None].astype(np.int32) + np.arange(2)[:, None], side - 1)
  shares = np.stack([1 - (exact - low), exact - low], axis=1)
  corners = taps[:, :, None, 0] * side + taps[:, None, :, 1]
  weights = shares[:, :, None, 0] * shares[:, None, :, 1]
  return corners.reshape(-1, 4).astype(np.int32), weights.reshape(-1, 4).astype(np.float32)


def show(
  config: ModelConfig, tokens: Int[np.ndarray, "B T"], segments: Int[np.ndarray, "B T"], pictures: Sequence[Sequence[Any]]
) -> tuple[Int[np.ndarray, "B T 3"], Images]:
  """Returns the positions of the tokens of rows, and the patches of the pictures that they show.

  Args:
    config: Config of a model.
    tokens: Token ids of rows with one sequence each.
    segments: 0 at padding.
    pictures: Pictures of each row, in order, as uint8 arrays [H W 3] or Pillow's pictures.

  Raises:
    ValueError: If the model has no tower, or the image tokens do not fit the pictures.
  """
  vision = config.vision
  if vision is None:
    raise ValueError("images: found pictures, expected None: the model has no vision tower")
  if len(pictures) != len(tokens):
    raise ValueError(f"images: found {len(pictures)} lists of pictures, expected one for each of the {len(tokens)} rows")
  cut = [[pictures_lib.patches(picture, vision.pictures) for picture in row] for row in pictures]
  most = max((num_slots(grid, vision.pictures) for row in cut for _, grid in row), default=1)
  room = Room(config._replace(train_tower=True), max(1, *map(len, cut)), most)
  images, positions = blank(room.shapes(*tokens.shape)), np.zeros((*tokens.shape, 3), np.int32)
  for row, of_row in enumerate(cut):
    here, (pixels, grids) = np.flatnonzero(segments[row]), zip(*of_row, strict=True) if of_row else ((), ())
    if len(set(segments[row, here].tolist())) > 1:
      raise ValueError(f"segments: found several sequences in row {row}, expected one in a row with images")
    try:
      own = places(tokens[row, here], grids, vision)
    except ValueError as error:
      raise ValueError(f"row {row}: {error}") from error
    positions[row, here], images.slots[row, here] = own.positions, spread(own.slots, grids, vision, room=most)
    if of_row:
      patches = place(pixels, grids, vision, size=images.patches.mask.shape[2])
      put(images, row, 0, Pictures(b"", own.positions, own.slots, own.end, patches=patches))
  return positions, images
