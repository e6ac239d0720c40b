"""The memory of pictures against XLA's own analysis of the compiled programs."""

import jax
import pytest

from jaxrl_llm.learner import memory, picture_memory
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.models.image_slots import Room
from tests.learner.test_memory import mesh_of, program_of

SMALL = preset("tiny-vl", vocab_size=264)
WIDE = SMALL._replace(vision=SMALL.vision._replace(num_layers=6, d_model=256, num_heads=8, d_ff=1024))
SIZES = {"task.name": "figures", "rollout.prompt_images": 1, "learner.row_images": 4}

# Bounds on the estimate divided by the measurement.
LOW, HIGH = 0.65, 1.6

CASES = {
  "small pictures": (SMALL, 16, {}),
  "a picture in parts": (SMALL, 256, {}),
  "a wide tower in bfloat16": (WIDE._replace(dtype="bfloat16"), 256, {}),
  "eight devices": (WIDE, 64, {"fsdp": 4, "expert": 2}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) if "bfloat16" in case else case for case in CASES])
def test_a_frozen_tower_needs_the_predicted_memory(case):
  shape, tokens, axes = CASES[case]
  program, estimate = program_of("features", shape, mesh_of(**axes), SIZES | {"model.image_tokens": tokens})
  measured, parts = program.lower().compile().memory_analysis(), estimate.programs["tower"]
  assert parts["features of pictures"] == measured.output_size_in_bytes
  weights = measured.argument_size_in_bytes - parts["patches"]
  assert 0 < weights <= estimate.held["weights"]
  rest = sum(size for name, size in parts.items() if name not in ("features of pictures", "patches"))
  assert LOW < rest / measured.temp_size_in_bytes < HIGH


@pytest.mark.slow
@pytest.mark.parametrize(
  ("remat", "tokens", "pictures"),
  [("none", 16, 16), pytest.param("full", 64, 8, marks=pytest.mark.slow), pytest.param("full", 256, 4, marks=pytest.mark.slow)],
)
def test_a_trained_tower_needs_the_predicted_memory(remat, tokens, pictures):
  """In the backward pass of the tower alone."""
  shape = SMALL._replace(train_tower=True, remat=remat, vision=SMALL.vision._replace(num_layers=6))
  model, room = make_model(shape), Room(shape, 1, tokens)
  params, patches = jax.eval_shape(model.init, jax.random.key(0)), room.patches(pictures)

  def gradients(params, patches, cotangents):
    return jax.vjp(lambda tower: model.features({**params, "tower": tower}, patches), params["tower"])[1](cotangents)

  lowered = jax.jit(gradients).lower(params, patches, jax.eval_shape(model.features, params, patches))
  estimate = sum(picture_memory.of_update(shape, mesh_of(), room, pictures=pictures).values())
  assert LOW < estimate / lowered.compile().memory_analysis().temp_size_in_bytes < HIGH


@pytest.mark.exhaustive
def test_pictures_count_wherever_they_are_held():
  sizes = SIZES | {"model.image_tokens": 16}
  _, of_text = program_of("rl_step", SMALL, mesh_of())
  _, frozen = program_of("rl_step", SMALL, mesh_of(), sizes)
  trained_shape = SMALL._replace(train_tower=True)
  _, trained = program_of("rl_step", trained_shape, mesh_of(), sizes)
  # Rows, pictures, tokens, features, width and bytes.
  features = 16 * 4 * 16 * 2 * SMALL.d_model * 4
  assert frozen.held["batch"] - of_text.held["batch"] == pytest.approx(features, rel=0.05)
  assert "tower" in frozen.programs and "tower" not in trained.programs and "tower" not in of_text.programs
  assert frozen.programs["sampling"]["pictures of prompts"] > 0
  assert trained.programs["update"]["tower's activations"] > 0
  assert sum(trained.programs["update"].values()) > sum(frozen.programs["update"].values())
  assert any("features of pictures" in line for line in memory.table(frozen))
