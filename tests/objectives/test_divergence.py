"""The divergence from a teacher against TRL's numbers, its limits, and the chunked head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.models.head import Teacher, token_logprobs
from jaxrl_llm.objectives import divergence
from jaxrl_llm.objectives.distillation import ADVICE, teacher_advantages
from jaxrl_llm.objectives.divergence import comparer
from jaxrl_llm.types import TrainBatch

MASK = np.array([[1, 0, 1], [0, 1, 1]])
INDEX = np.arange(2 * 3 * 7).reshape(2, 3, 7)
STUDENT, TEACHER = 2 * np.sin(INDEX), 3 * np.cos(0.7 * INDEX)
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)

# `GKDTrainer.generalized_jsd_loss` of trl 1.16.0 on these arrays, by beta, at the temperatures 1
# and 1.7. Its text ran unchanged, with the functions of torch that it calls written in NumPy.
TRL = {
  0.0: (2.0455904545325287, 0.9616026703942816),
  0.1: (0.1583820455125351, 0.08220631216607296),
  0.5: (0.39246239136483796, 0.21749823906443852),
  0.9: (0.1740153313981229, 0.0894519834846001),
  1.0: (2.6082861717479005, 1.1078580071991488),
}


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_the_loss_is_that_of_trl(x64, temperature):
  for beta, expected in TRL.items():
    assert abs(divergence(STUDENT, TEACHER, MASK, beta=beta, temperature=temperature) - expected[temperature != 1]) < 1e-6


def test_the_expected_policy_gradient_of_a_teachers_advantages_lowers_the_reverse_kl(x64):
  student, teacher = jnp.asarray(STUDENT[0, 0]), jnp.asarray(TEACHER[0, 0])
  log_q, log_p = (jax.nn.log_softmax(x)[None] for x in (student, teacher))
  # Each token of the vocabulary once, as if it had been drawn.
  ints, zeros = jnp.zeros(log_q.shape, int), jnp.zeros(log_q.shape)
  batch = TrainBatch(ints, ints, ints, mask=zeros + 1, advantages=zeros, old_logprobs=log_q)
  advantages, _ = teacher_advantages(batch, log_p, zeros, coef=2.0)
  expected = jax.grad(lambda z: jnp.sum(jnp.exp(log_q[0]) * advantages[0] * jax.nn.log_softmax(z)))(student)
  of_kl = jax.grad(lambda z: divergence(z[None, None], teacher[None, None], jnp.ones((1, 1)), beta=1.0))(student)
  np.testing.assert_allclose(expected, -2 * of_kl, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_of_a_chunk_is_that_of_the_loss(x64, beta):
  made = comparer(beta=beta, temperature=1.7)
  student, teacher = jnp.asarray(STUDENT[0]), jnp.asarray(TEACHER[0])
  compared, sums = made.compare(student, teacher)
  by_token = jax.grad(lambda x: jnp.sum(made.compare(x, teacher)[0].divergence))(student)
  np.testing.assert_allclose(made.gradient(student, teacher, sums), by_token, atol=1e-10)
  assert np.all(compared.kl > 0) and compared.agreement.tolist() == [float(a.argmax() == b.argmax()) for a, b in zip(student, teacher)]


def test_equal_models_have_no_divergence_and_no_gradient(x64):
  for beta in BETAS:
    loss, grad = jax.value_and_grad(lambda x, beta=beta: divergence(x, STUDENT, MASK, beta=beta))(jnp.asarray(STUDENT))
    assert abs(loss) < 1e-12 and np.max(np.abs(grad)) < 1e-12


def test_the_limits_of_beta_are_the_two_kl_divergences(x64):
  of = lambda beta: float(divergence(STUDENT, TEACHER, MASK, beta=beta))
  assert of(1e-6) / 1e-6 == pytest.approx(of(0), rel=1e-4) and of(1 - 1e-6) / 1e-6 == pytest.approx(of(1), rel=1e-4)


def test_no_counted_token_has_no_loss_and_logits_far_apart_are_finite():
  assert divergence(STUDENT, TEACHER, 0 * MASK, beta=0.5) == 0
  far = 1e4 * np.eye(7)[INDEX[..., 0] % 7]
  for beta in BETAS:
    loss, grad = jax.value_and_grad(lambda x, beta=beta: divergence(x, -far, MASK, beta=beta))(jnp.float32(far))
    assert np.isfinite(loss) and np.all(np.isfinite(grad))


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"beta": -0.1}, "beta: found -0.1, expected a number from 0 (forward KL) to 1 (reverse KL)"),
    ({"beta": 0.5, "temperature": 0}, "temperature: found 0, expected a finite number above 0"),
    ({"beta": 0.5, "mask": MASK[0]}, "mask: found shape (3,), expected (2, 3), the shape of student_logits without V"),
    ({"beta": 0.5, "teacher": TEACHER[..., :5]},
     "teacher_logits: found shape (2, 3, 5), expected (2, 3, 7), the shape of student_logits"),
  ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(settings, message):
  teacher, mask = settings.pop("teacher", TEACHER), settings.pop("mask", MASK)
  with pytest.raises(ValueError) as error:
    divergence(STUDENT, teacher, mask, **settings)
  assert str(error.value) == message


# ---------------------------------------------------------------------------------------------------------------------------------------
# The output head
# ---------------------------------------------------------------------------------------------------------------------------------------

VOCAB, WIDTH, WIDER = 48, 16, 24


def unembed(head, x):
  return jnp.einsum("cd,dv->cv", x, head, preferred_element_type=jnp.float32)


@pytest.fixture
def work(rng):
  """Heads and hidden states of a student and of a wider teacher."""
  draw = lambda *shape: jnp.float32(rng.standard_normal(shape))
  targets, counted = jnp.int32(rng.integers(VOCAB, size=(8, 12))), jnp.asarray(rng.random((8, 12)) < 0.6)
  return draw(WIDTH, VOCAB), draw(8, 12, WIDTH) / 3, draw(WIDER, VOCAB), draw(8, 12, WIDER) / 4, targets, counted


@pytest.mark.parametrize(("beta", "chunk"), [(0.0, 7), (0.3, 200), (1.0, 7)])
def test_the_chunked_head_gives_the_divergence_of_all_logits(work, beta, chunk):
  """It also gives the log-probabilities and entropies that it gives without a teacher."""
  head, hidden, teacher_head, teacher_hidden, targets, counted = work
  options = dict(unembed=unembed, filter_logits=make_filter(temperature=0.7, top_k=9), learns_entropy=True)

  def chunked(head, hidden):
    teacher = Teacher(teacher_head, teacher_hidden, unembed, comparer(beta=beta, temperature=1.3))
    logprobs, entropy, compared, _ = token_logprobs(head, hidden, targets, counted, teacher=teacher, chunk=chunk, **options)
    return jnp.sum(logprobs * entropy) + jnp.sum(compared.divergence) / jnp.sum(counted), (logprobs, entropy, compared)

  def whole(head, hidden):
    logprobs, entropy, _, _ = token_logprobs(head, hidden, targets, counted, chunk=5, **options)
    logits = [jnp.einsum("btd,dv->btv", *x) for x in ((hidden, head), (teacher_hidden, teacher_head))]
    return jnp.sum(logprobs * entropy) + divergence(*logits, counted, beta=beta, temperature=1.3), (logprobs, entropy)

  (one, (*outputs, compared)), grads = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True))(head, hidden)
  (other, expected), expected_grads = jax.jit(jax.value_and_grad(whole, argnums=(0, 1), has_aux=True))(head, hidden)
  for a, b in zip(jax.tree.leaves((one, outputs, grads)), jax.tree.leaves((other, expected, expected_grads)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(b)))))
  assert not any(np.any(np.asarray(x)[~np.asarray(counted)]) for x in compared)


def test_no_gradient_flows_to_the_teacher(work):
  head, hidden, teacher_head, teacher_hidden, targets, counted = work

  def loss(teacher_head, teacher_hidden):
    teacher = Teacher(teacher_head, teacher_hidden, unembed, comparer(beta=0.5))
    settings = dict(unembed=unembed, filter_logits=make_filter(), chunk=16)
    return jnp.sum(token_logprobs(head, hidden, targets, counted, teacher=teacher, **settings)[2].divergence)

  assert not any(np.any(x) for x in jax.grad(loss, argnums=(0, 1))(teacher_head, teacher_hidden))


@pytest.mark.parametrize("advice", ADVICE)
def test_advice_does_not_depend_on_the_packing(advice, rng):
  """Two responses in one row, behind a prompt each, are advised as in rows of their own."""
  mask = np.float32([[0, 1, 1, 1, 0, 1, 1, 0]])
  segments, ints = np.int32([[1, 1, 1, 1, 2, 2, 2, 0]]), np.zeros((1, 8), np.int32)
  old, teacher, advantages = jnp.asarray(rng.normal(size=(3, 1, 8)).astype(np.float32))
  batch = jax.tree.map(jnp.asarray, TrainBatch(ints, ints, segments, mask, advantages, old))
  parts = [slice(0, 4), slice(4, 7)]
  advise = lambda batch, scores: teacher_advantages(batch, scores, scores, coef=0.5, advice=advice)[0]
  apart = [advise(jax.tree.map(lambda x, part=part: x[:, part], batch), teacher[:, part]) for part in parts]
  together = advise(batch, teacher)
  np.testing.assert_allclose(together[:, :7], np.concatenate(apart, axis=1), rtol=1e-6)
  assert np.array_equal(np.asarray(together) != 0, mask > 0)


@pytest.mark.parametrize("gap", [-1e4, -0.1, 0.0, 0.1, 1e4])
def test_a_teacher_that_scales_flips_no_sign_and_moves_no_token_without_advantage(gap):
  advantages, ones = jnp.array([[-2.0, -1e-3, 0.0, 1e-3, 2.0]]), jnp.ones((1, 5))
  batch = TrainBatch(*3 * [jnp.ones((1, 5), int)], ones, advantages, -ones)
  scaled = advantages + teacher_advantages(batch, gap - ones, ones, coef=1.0, advice="rlsd")[0]
  assert np.array_equal(np.sign(scaled), np.sign(advantages)) and np.all(np.abs(scaled) <= 1.2001 * np.abs(advantages))
  # What the teacher finds likelier gains if the answer is right, and costs less if it is wrong.
  assert np.all(np.sign(np.abs(scaled) - np.abs(advantages))[0, [0, 4]] == [-np.sign(gap), np.sign(gap)])
