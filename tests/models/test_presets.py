"""Tests of the published sizes: exact numbers of weights, and the fit of a tokenizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import image_slots
from jaxrl_llm.models.config import Experts
from jaxrl_llm.models.files.tensor_names import num_active_params, num_params
from jaxrl_llm.models.model import make_model
from jaxrl_llm.models.presets import LOCAL, PRESETS, preset
from jaxrl_llm.pretrained.pictures import patches
from tests.marks import few

# Numbers that the repositories of the published checkpoints state, from the headers of their
# safetensors.
PUBLISHED = {
  "qwen2.5-0.5b": 494_032_768,
  "qwen2.5-1.5b": 1_543_714_304,
  "qwen2.5-3b": 3_085_938_688,
  "qwen2.5-7b": 7_615_616_512,
  "qwen2.5-14b": 14_770_033_664,
  "qwen2.5-32b": 32_763_876_352,
  "qwen2.5-72b": 72_706_203_648,
  "qwen3-0.6b": 596_049_920,
  "qwen3-1.7b": 1_720_574_976,
  "qwen3-4b": 4_022_468_096,
  "qwen3-8b": 8_190_735_360,
  "qwen3-14b": 14_768_307_200,
  "qwen3-32b": 32_762_123_264,
  "qwen3-30b-a3b": 30_532_122_624,
  "qwen3-235b-a22b": 235_093_634_560,
  "qwen3-vl-2b": 2_127_532_032,
  "qwen3-vl-4b": 4_437_815_808,
  "qwen3-vl-8b": 8_767_123_696,
  "qwen3-vl-32b": 33_357_390_064,
  "qwen3-vl-30b-a3b": 31_070_754_032,
  "qwen3-vl-235b-a22b": 235_670_022_896,
  "llama3.1-8b": 8_030_261_248,
  "llama3.1-70b": 70_553_706_496,
  "llama3.2-1b": 1_235_814_400,
  "llama3.2-3b": 3_212_749_824,
  "llama3.3-70b": 70_553_706_496,
  "smollm2-135m": 134_515_008,
  "smollm2-360m": 361_821_120,
  "smollm2-1.7b": 1_711_376_384,
  "gemma3-270m": 268_098_176,
  "gemma3-1b": 999_885_952,
  "olmo3-7b": 7_298_011_136,
  "olmo3-32b": 32_233_522_176,
}


def test_published_sizes_have_the_published_number_of_weights():
  assert {name: num_params(config) for name, config in PRESETS.items() if name not in LOCAL} == PUBLISHED


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-30b-a3b"])
def test_the_model_has_as_many_weights_as_the_table(name):
  config = PRESETS[name]._replace(num_layers=2, dtype="bfloat16", param_dtype="bfloat16")
  model = make_model(config)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert model.num_params == num_params(config) == sum(x.size for x in jax.tree.leaves(shapes))


def test_active_weights_are_those_of_the_experts_that_a_token_visits():
  active = {name: num_active_params(PRESETS[name]) for name in ("qwen3-30b-a3b", "qwen3-235b-a22b")}
  assert active == {"qwen3-30b-a3b": 3_353_032_704, "qwen3-235b-a22b": 22_190_763_520}
  config = PRESETS["nano"]._replace(experts=Experts(num_experts=8, top_k=2, d_ff=16, layers=(1,)))
  assert num_params(config) - num_active_params(config) == 6 * 3 * 32 * 16
  assert num_active_params(PRESETS["nano"]) == num_params(PRESETS["nano"])


def test_a_published_size_keeps_its_vocabulary():
  assert preset("qwen3-0.6b") == preset("qwen3-0.6b", vocab_size=151669) == PRESETS["qwen3-0.6b"]
  assert preset("qwen3-0.6b", dtype="bfloat16", remat="full") == PRESETS["qwen3-0.6b"]._replace(dtype="bfloat16", remat="full")
  assert preset("nano", vocab_size=99).vocab_size == 99


@pytest.mark.parametrize(
  ("name", "fields", "words"),
  [
    ("qwen3-0.6b", dict(vocab_size=151937), "the tokenizer has 151937 ids, but the embedding of 'qwen3-0.6b' has 151936 rows; choose"),
    ("nano", {}, "model.preset: 'nano' has no vocabulary of its own, expected the tokenizer's vocab_size"),
    ("Qwen3-0.6B", {}, "model.preset: found 'Qwen3-0.6B', expected one of tiny, nano, "),
    ("Qwen3-0.6B", {}, "; did you mean 'qwen3-0.6b'?"),
    ("llama-3.1-8b", {}, "; did you mean 'llama3.1-8b'?"),
    ("nanu", {}, "; did you mean 'nano'?"),
    ("nano", dict(dtype="float16"), "model.dtype: found 'float16', expected one of float32, bfloat16"),
  ],
)
def test_a_bad_name_or_vocabulary_is_refused(name, fields, words):
  with pytest.raises(ValueError) as error:
    preset(name, **fields)
  assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", few(["tiny-vl", "nano-vl"], rest="slow", by_hand=(1,)))
def test_a_random_tower_tells_where_a_dot_is(name):
  """Neither white paper nor the dot itself may drown its place."""
  config = preset(name, vocab_size=264)
  model, white = make_model(config), np.full((48, 48, 3), 255, np.uint8)
  assert not patches(white, config.vision.pictures)[0].any()
  drawn = [white.copy() for _ in range(9)]
  for i, picture in enumerate(drawn):
    row, column = (16 * place for place in divmod(i, 3))
    picture[row : row + 4, column : column + 4] = 0
  pixels, grids = zip(*(patches(picture, config.vision.pictures) for picture in drawn), strict=True)
  features = jax.jit(model.features)(model.init(jax.random.key(0)), image_slots.place(pixels, grids, config.vision))
  of_dots = jnp.stack([features[i, i] for i in range(9)])  # Each dot is at another image token.
  assert jnp.sqrt(jnp.mean(jnp.var(of_dots, axis=0)) / jnp.mean(of_dots**2)) > 0.6
