"""Models with a vision tower, against transformers, and their pictures in sampler and learner."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter, make_sampler, seeded
from jaxrl_llm.devices.mesh import make_mesh, param_shardings, row_sharding
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.train_step import init_state, make_train_step, policy_outputs
from jaxrl_llm.models import image_slots, load, logits, make_model, preset, save_hf, trainable
from jaxrl_llm.models.files import safetensors
from jaxrl_llm.models.files.loading import open_source
from jaxrl_llm.pretrained import pictures
from jaxrl_llm.types import Images, Shown
from tests.marks import few

FOLDER = pathlib.Path(__file__).parent / "pictures"
NAMES = ("qwen3_vl", "qwen3_vl_moe")
COUNTS = (0, 1, 2)
ROOM, WIDTH = 16, 32  # Image tokens of a picture, and slots of a prompt.


@functools.cache
def loaded(name, **changes):
  model, params = load(FOLDER / name)
  return make_model(model.config._replace(**changes)), params


@functools.cache
def recorded(name):
  with np.load(FOLDER / name / "logits.npz") as arrays:
    return dict(arrays)


def of_row(name, count):
  """Returns the tokens, pictures and logits of a recorded prompt."""
  arrays = recorded(name)
  return arrays[f"tokens{count}"], [arrays[f"picture{i}"] for i in range(count)], arrays[f"logits{count}"]


def features_of(model, params, patches):
  return jax.jit(model.features)(params, patches)


def seen(model, params, name, count, *, as_patches=False):
  """Returns the pictures of a recorded prompt as the learner takes them."""
  vision, (tokens, shown, _) = model.config.vision, of_row(name, count)
  cut = [pictures.patches(picture, vision.pictures) for picture in shown]
  grids = [grid for _, grid in cut]
  places = image_slots.places(tokens, grids, vision)
  slots = image_slots.spread(places.slots, grids, vision, room=ROOM)
  patches = image_slots.place(
    [pixels for pixels, _ in cut] or [np.zeros((0, vision.patch_width), np.float32)], grids or [(1, 0, 0)], vision, size=4 * ROOM
  )
  if as_patches:
    return image_slots.Pictures(b"%d" % count, places.positions, slots, places.end, patches=patches)
  return image_slots.Pictures(b"%d" % count, places.positions, slots, places.end, features=np.asarray(features_of(model, params, patches)))


def prompts(model, params, name, **how):
  """Returns all recorded prompts, padded on the left, and their pictures."""
  room = image_slots.Room(model.config._replace(train_tower=how.get("as_patches", False)), 2, ROOM)
  images, n = image_slots.blank(room.shapes(len(COUNTS), WIDTH)), len(COUNTS)
  tokens, mask = np.zeros((n, WIDTH), np.int32), np.zeros((n, WIDTH), bool)
  positions, ends = np.zeros((n, WIDTH, 3), np.int32), np.zeros(n, np.int32)
  for row, count in enumerate(COUNTS):
    own, ids = seen(model, params, name, count, **how), of_row(name, count)[0]
    here = slice(WIDTH - len(ids), WIDTH)
    tokens[row, here], mask[row, here] = ids, True
    images.slots[row, here], positions[row, here], ends[row] = own.slots, own.positions, own.end
    image_slots.put(images, row, 0, own)
  return jnp.asarray(tokens), jnp.asarray(mask), jax.tree.map(jnp.asarray, Shown(images, positions, ends))


@pytest.mark.parametrize("name", few(NAMES, 0))
def test_logits_are_those_of_transformers(name):
  """In one batch, with padding."""
  model, params = loaded(name)
  rows = [of_row(name, count) for count in COUNTS]
  tokens, segments = np.zeros((2, len(rows), WIDTH), np.int32)
  for i, (ids, _, _) in enumerate(rows):
    tokens[i, i : i + len(ids)], segments[i, i : i + len(ids)] = ids, 1
  got = logits(model, params, tokens, segments=segments, images=[shown for _, shown, _ in rows])
  for i, (ids, _, expected) in enumerate(rows):
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(got[i, i : i + len(ids)], expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("count", COUNTS[1:])
def test_patches_and_positions_are_those_of_transformers(count):
  name = NAMES[0]
  tokens, shown, _ = of_row(name, count)
  vision = loaded(name)[0].config.vision
  cut = [pictures.patches(picture, vision.pictures) for picture in shown]
  np.testing.assert_array_equal(np.concatenate([pixels for pixels, _ in cut]), recorded(name)[f"pixels{count}"])
  places = image_slots.places(tokens, [grid for _, grid in cut], vision)
  np.testing.assert_array_equal(places.positions, recorded(name)[f"positions{count}"])
  assert places.end == places.positions.max() + 1


def test_another_picture_changes_the_logits():
  """But not those before it."""
  model, params = loaded(NAMES[0])
  tokens, (picture,), _ = of_row(NAMES[0], 1)
  one, other = (logits(model, params, tokens[None], images=[[x]])[0] for x in (picture, 255 - picture))
  begin = int(np.argmax(tokens == model.config.vision.image_token))
  np.testing.assert_array_equal(one[:begin], other[:begin])
  assert np.all(np.abs(one - other)[begin:].max(axis=1) > 1e-2)


def test_text_alone_is_that_of_a_language_model():
  model, params = loaded(NAMES[0])
  language = make_model(model.config._replace(vision=None))
  tokens = of_row(NAMES[0], 0)[0][None]
  of_decoder = {name: x for name, x in params.items() if name != "tower"}
  np.testing.assert_array_equal(logits(model, params, tokens), logits(language, of_decoder, tokens))


@pytest.mark.parametrize("name", NAMES)
def test_saved_weights_are_those_that_were_loaded(name, tmp_path):
  """All experts of a layer are saved as published; transformers 5 saves them turned."""
  model, params = loaded(name)
  save_hf(tmp_path / "out", model, params, tokenizer_from=None)
  (config, source), (expected, original) = open_source(tmp_path / "out"), open_source(FOLDER / name)
  assert config == expected and source.shapes == original.shapes
  for tensor in source.shapes:
    np.testing.assert_array_equal(source.read(tensor), original.read(tensor))
  saved, theirs = (safetensors.read_header(folder / "model.safetensors") for folder in (tmp_path / "out", FOLDER / name))
  turned = {(saved[tensor].shape, theirs[tensor].shape) for tensor in saved if tensor.endswith("gate_up_proj")}
  assert turned == ({((4, 32, 24), (4, 24, 32))} if name == "qwen3_vl_moe" else set())


@pytest.mark.parametrize(
  ("images", "message"),
  [
    ([[]], r"row 0: tokens: found 3 image tokens \(id 90\), expected none, since no picture is given"),
    ([[np.zeros((8, 8, 3), np.uint8)]], r"row 0: tokens: found 3 image tokens \(id 90\), expected 1, which are 1 of 1 pictures"),
    ([[], []], "images: found 2 lists of pictures, expected one for each of the 1 rows"),
    ([[np.zeros((9, 23, 3), np.float32)]], r"picture: found an array float32\[9, 23, 3\], expected uint8"),
  ],
)
def test_pictures_that_do_not_fit_the_tokens_are_refused(images, message):
  tokens = of_row(NAMES[0], 1)[0]
  with pytest.raises(ValueError, match=message):
    logits(*loaded(NAMES[0]), tokens[None], images=images)


def test_a_language_model_refuses_pictures():
  model = make_model(preset("nano", vocab_size=264))
  with pytest.raises(ValueError, match="images: found pictures, expected None: the model has no vision tower"):
    logits(model, model.init(jax.random.key(0)), [[1, 2]], images=[[np.zeros((8, 8, 3), np.uint8)]])


def test_features_do_not_depend_on_padding():
  """Nor on other pictures, nor on how many queries attend at a time."""
  from jaxrl_llm.models import tower

  model, params = loaded(NAMES[0])
  cut = [pictures.patches(picture, model.config.vision.pictures) for picture in of_row(NAMES[0], 2)[1]]
  pixels, grids = zip(*[(x, grid) for x, grid in cut], strict=True)
  together = features_of(model, params, image_slots.place(pixels, grids, model.config.vision, size=64))
  for i in range(2):
    alone = features_of(model, params, image_slots.place(pixels[i : i + 1], grids[i : i + 1], model.config.vision))[0]
    np.testing.assert_allclose(together[i, : len(alone)], alone, atol=1e-5)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tower, "_QUERIES", 7)
    in_parts = features_of(model, params, image_slots.place(pixels, grids, model.config.vision, size=64))
  np.testing.assert_allclose(in_parts, together, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "as_patches"),
  few([
    ("qwen3_vl", False),
    ("qwen3_vl_moe", True),
    pytest.param("qwen3_vl", True, marks=pytest.mark.exhaustive),
    pytest.param("qwen3_vl_moe", False, marks=pytest.mark.exhaustive),
  ], 0),
)
def test_sampler_and_learner_agree(name, as_patches):
  """Also with prompts shared by their responses, and with a row for each sequence."""
  model, params = loaded(name)
  tokens, mask, shown = prompts(model, params, name, as_patches=as_patches)
  sample = jax.jit(make_sampler(model, group_size=2, max_new_tokens=12, stop_ids=(3,), pad_id=0))
  drawn = sample(params, tokens, mask, seeded(jax.random.key(1), 2 * len(tokens)), shown)
  sequences = []
  for i in range(len(drawn.tokens)):
    prompt, response = of_row(name, COUNTS[i // 2])[0], np.asarray(drawn.tokens[i])[np.asarray(drawn.mask[i])]
    own = seen(model, params, name, COUNTS[i // 2], as_patches=as_patches) if i // 2 else None
    sequences.append(packing.demonstration(prompt.tolist(), response.tolist(), pictures=own)._replace(num_prompt=len(prompt)))
  by_layout, room = [], image_slots.Room(model.config._replace(train_tower=as_patches), 6, ROOM)
  for share in (True, False):
    layout = packing.arrange(sequences, row_tokens=96, row_buckets=(2, 6), share_prompts=share, group_size=2)
    batch = packing.pack(sequences, layout, room)
    outputs = policy_outputs(model.logprobs, make_filter(), params, jax.tree.map(jnp.asarray, batch))
    of_sequences, lengths = packing.lift(np.asarray(outputs.logprobs), layout), np.asarray(drawn.mask).sum(axis=1)
    by_layout.append([x[-n:] for x, n in zip(of_sequences, lengths, strict=True)])
  for i, (together, apart) in enumerate(zip(*by_layout, strict=True)):
    np.testing.assert_allclose(together, np.asarray(drawn.logprobs[i])[np.asarray(drawn.mask[i])], atol=1e-5)
    np.testing.assert_allclose(together, apart, atol=1e-5)


def test_prompts_with_other_pictures_are_not_shared():
  model, params = loaded(NAMES[0])
  own = seen(model, params, NAMES[0], 1)
  one, other = (packing.demonstration(of_row(NAMES[0], 1)[0].tolist(), [5], pictures=own._replace(key=key)) for key in (b"a", b"b"))
  assert [unit.members for unit in packing.units_of([one, one, other], share_prompts=True)] == [(0, 1), (2,)]


def test_a_row_without_room_for_its_pictures_is_refused():
  model, params = loaded(NAMES[0])
  sequences = [packing.demonstration(of_row(NAMES[0], 2)[0].tolist(), [5], pictures=seen(model, params, NAMES[0], 2)) for _ in range(2)]
  layout = packing.arrange(sequences, row_tokens=96, row_buckets=(1,))
  with pytest.raises(ValueError, match="config.learner.row_images: found 3, expected at least 4 for the pictures of a row"):
    packing.pack(sequences, layout, image_slots.Room(model.config, 3, ROOM))


@pytest.mark.parametrize("train_tower", few([False, True], rest="slow", by_hand=(0,)))
def test_only_a_trained_tower_changes_in_an_update(train_tower):
  model, params = loaded(NAMES[0], train_tower=train_tower)
  own = lambda count: seen(model, params, NAMES[0], count, as_patches=train_tower)
  sequences = [packing.demonstration(of_row(NAMES[0], count)[0].tolist(), [5, 6, 7], pictures=own(count)) for count in (1, 2)]
  layout = packing.arrange(sequences, row_tokens=48, row_buckets=(2,))
  batch = jax.tree.map(jnp.asarray, packing.pack(sequences, layout, image_slots.Room(model.config, 3, ROOM)))
  trained, optimizer = trainable(model.config, params), optax.sgd(0.1)
  outputs = functools.partial(policy_outputs, model.logprobs, make_filter())
  step = make_train_step(outputs, objectives.make("sft"), optimizer, learning_rate=lambda step: 0.1, trainable=trained, rows_at_once=1)
  state, metrics = jax.jit(step)(init_state(params, optimizer, trainable=trained), batch)
  changed = jax.tree.map(lambda x, y: bool(np.any(x != y)), params, state.params)
  assert np.isfinite(metrics["actor/loss"] if "actor/loss" in metrics else metrics["actor/pg_loss"])
  assert any(jax.tree.leaves(changed["tower"])) == train_tower and all(jax.tree.leaves(changed["layers"]))


@pytest.mark.slow
def test_devices_share_the_pictures_and_gather_weights():
  """Without constraints, XLA shares the width of the states and adds up every product."""
  mesh, shape = make_mesh(fsdp=2, expert=2, devices=jax.devices()[:4]), preset("nano-vl", vocab_size=264)
  model, spread, grid = make_model(shape), make_model(shape, mesh=mesh), (1, 16, 16)
  pixels = np.random.default_rng(0).normal(size=(4, 256, shape.vision.patch_width)).astype(np.float32)
  patches = jax.tree.map(jnp.asarray, image_slots.place(list(pixels), [grid] * 4, shape.vision))
  params, shardings = model.init(jax.random.key(0)), param_shardings(mesh, spread.logical_axes, model.init(jax.random.key(0)))
  placed = jax.device_put((params, patches), (shardings, row_sharding(mesh)))
  compiled = jax.jit(spread.features, out_shardings=row_sharding(mesh)).lower(*placed).compile()
  np.testing.assert_allclose(compiled(*placed), model.features(params, patches), atol=1e-5)
  assert "all-gather" in compiled.as_text() and "all-reduce" not in compiled.as_text()


def test_images_without_any_change_nothing():
  """Rows of text in a batch that has room for pictures."""
  model, params = loaded(NAMES[0])
  tokens = jnp.asarray(of_row(NAMES[0], 0)[0])[None]
  blank = image_slots.blank(image_slots.Room(model.config, 1, ROOM).shapes(1, tokens.shape[1]))
  positions, ones = jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)
  images = Images(*jax.tree.map(jnp.asarray, blank))
  got = model.logits(params, tokens, jnp.repeat(positions[..., None], 3, axis=-1), ones, images)
  np.testing.assert_allclose(got, model.logits(params, tokens, positions, ones), atol=1e-6)
