"""Log-probabilities and entropies of given tokens, without ever holding all `[B, T, V]` logits.

Only tokens that count are computed, one chunk at a time, so that at most `[chunk, V]` logits exist.
The backward pass recomputes the logits of each chunk. This takes a third more work in the output
head, for memory that does not grow with the batch.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.devices.memory import device_memory
from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards, platform_of
from jaxrl_llm.kernels import permutations
from jaxrl_llm.types import Comparer, Comparison

Unembed = Callable[[Any, Float[Array, "c D"]], Float[Array, "c V"]]
"""Function `(head, hidden) -> float32 logits`."""

Filter = Callable[[Float[Array, "c V"], Int[Array, " c"]], Float[Array, "c V"]]
"""Function `(logits, keep) -> logits` of the distribution that tokens are drawn from."""

# On a CPU, the logits of a chunk should not exceed the cache by far.
_CPU_ENTRIES = 2**23
# On an accelerator, the float32 logits of a chunk take at most this part of a device's memory, of
# which a device that does not report it has the given number of bytes.
_SHARE, _UNKNOWN = 1 / 16, 16 * 2**30
# Each chunk reads the head three times and adds to its gradient once, 14·V·D bytes in bfloat16. Its
# products take 8·V·D FLOPs per token, so more than about 1,000 tokens hide these bytes on every
# accelerator whose peaks are known. The last chunk is computed whole, so many more would be waste.
_LEAST, _MOST = 128, 2048


class VocabularyPiece(NamedTuple):
  """Static settings of the computation on a chunk; see `token_logprobs`."""

  unembed: Unembed
  filter_logits: Filter
  chunk: int
  learns_entropy: bool
  teacher_unembed: Unembed | None = None
  comparer: Comparer | None = None


class Teacher(NamedTuple):
  """A frozen model that a policy is compared with, at the same tokens.

  Attributes:
    head: Weights that `unembed` reads.
    hidden: Hidden state that each target is predicted from.
    unembed: Function from hidden states to logits.
    comparer: Comparison of a chunk's logits.
  """

  head: Any
  hidden: Float[Array, "B T E"]
  unembed: Unembed
  comparer: Comparer


def chunk_tokens(vocab_size: int, mesh: Mesh | None = None) -> int:
  """Returns the default number of tokens per chunk on each device.

  On an accelerator it is the largest power of two up to 2,048 whose logits take at most a sixteenth
  of the device's memory, but at least 128. With a teacher, whose logits exist beside the policy's,
  half as many tokens take this memory.

  Args:
    vocab_size: Number of logits of a token.
    mesh: Device mesh, possibly of absent devices; None is the default device. The vocabulary may be
      sharded over tensor.

  Example:
    >>> chunk_tokens(4096), chunk_tokens(151_936)
    (2048, 128)
  """
  if platform_of(mesh) == "cpu":
    return max(_CPU_ENTRIES // vocab_size // _LEAST, 1) * _LEAST
  bytes_per_token = 4 * vocab_size / (1 if mesh is None else mesh.shape["tensor"])
  tokens = int(_SHARE * (device_memory(mesh) or _UNKNOWN) / bytes_per_token)
  # The TPU compiler divides other numbers into worse tiles.
  return 2 ** int(math.log2(max(min(tokens, _MOST), _LEAST)))


@jax.named_scope("head")
def token_logprobs(
  head: Any,
  hidden: Float[Array, "B T D"],
  targets: Int[Array, "B T"],
  counted: Bool[Array, "B T"],
  *,
  unembed: Unembed,
  filter_logits: Filter,
  chunk: int,
  learns_entropy: bool = False,
  mesh: Mesh | None = None,
  teacher: Teacher | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Comparison | None, Float[Array, "B T"]]:
  """Computes log softmax(filter(unembed(h)))[target] and the entropy of that distribution.

  Args:
    head: Weights that `unembed` reads.
    hidden: Hidden state that each target is predicted from.
    targets: Token ids.
    counted: Boolean mask of the tokens whose log-probability is computed.
    unembed: Function from hidden states to logits.
    filter_logits: Function from logits to those of the sampling distribution.
    chunk: Number of tokens computed at a time on each device.
    learns_entropy: Whether the entropy has a gradient. Without one it costs nothing in the backward
      pass.
    mesh: Device mesh; None is one device. Rows are sharded over data, fsdp and expert, and slots
      over context; each device computes its own tokens. The vocabulary may be sharded over tensor.
    teacher: Model whose logits are compared with the unfiltered ones; None for no comparison. A
      chunk has the logits of both models. No gradient flows to the teacher.

  Returns:
    Log-probabilities and entropies in float32, 0 for tokens that are not counted; the comparison
    with the teacher, None without one; and Σ_v ([v = target] − p_v)², the squared norm of the
    gradient of the log-probability in the logits, which has no gradient itself.

  Example:
    >>> head, hidden = jnp.eye(3), jnp.array([[[0.0, 0.0, 5.0], [0.0, 0.0, 0.0]]])
    >>> settings = dict(unembed=lambda head, x: x @ head, filter_logits=lambda logits, keep: logits, chunk=1)
    >>> targets, counted = jnp.array([[2, 1]]), jnp.array([[True, True]])
    >>> logprobs, entropy, _, score_norm = token_logprobs(head, hidden, targets, counted, **settings)
    >>> logprobs.round(3).tolist(), entropy.round(3).tolist()
    ([[-0.013, -1.099]], [[0.08, 1.099]])
    >>> score_norm.round(4).tolist()
    [[0.0003, 0.6667]]
  """
  of_teacher = () if teacher is None else (teacher.unembed, teacher.comparer)
  piece = VocabularyPiece(unembed, filter_logits, chunk, learns_entropy, *of_teacher)
  return _on_mesh(piece, mesh, head, hidden, targets, counted, None if teacher is None else (teacher.head, teacher.hidden))


def _on_mesh(
  piece: VocabularyPiece, mesh: Mesh | None, head: Any, hidden: Array, targets: Array, counted: Array, teacher: tuple[Any, Array] | None
) -> tuple[Array, Array, Comparison | None, Array]:
  """Lets each device compute its own tokens."""
  if mesh is None or mesh.size == mesh.shape["tensor"]:
    return _outputs(piece, head, hidden, targets, counted, teacher)
  context = "context" if "context" in mesh.shape and hidden.shape[1] % mesh.shape["context"] == 0 else None
  # Rows that do not divide evenly, such as a single one, are replicated on every device.
  split_rows = BATCH_AXES if hidden.shape[0] % num_row_shards(mesh) == 0 else None
  rows, manual = PartitionSpec(split_rows, context), frozenset(mesh.axis_names) - {"tensor"}
  on_shard = partial(_outputs, piece)
  of_teacher = None if teacher is None else (PartitionSpec(), rows)
  specs = dict(in_specs=(PartitionSpec(), rows, rows, rows, of_teacher), out_specs=rows)
  return jax.shard_map(on_shard, mesh=mesh, axis_names=manual, check_vma=False, **specs)(head, hidden, targets, counted, teacher)


def _outputs(
  piece: VocabularyPiece, head: Any, hidden: Array, targets: Array, counted: Array, teacher: tuple[Any, Array] | None
) -> tuple[Array, Array, Comparison | None, Array]:
  flat = counted.reshape(-1)
  piece = piece._replace(chunk=min(piece.chunk, len(flat)))  # A chunk may exceed all tokens.
  # Put counted tokens first, so that the loop ends after the last of them.
  order, place = permutations.true_first(flat)
  num_chunks = (jnp.sum(flat) + piece.chunk - 1) // piece.chunk
  ordered = lambda x: permutations.permuted(x.reshape(len(flat), -1), order, place)
  if teacher is not None:
    teacher = jax.lax.stop_gradient((teacher[0], ordered(teacher[1])))
  outputs = _chunked(piece, head, ordered(hidden), targets.reshape(-1)[order], num_chunks, teacher)
  return jax.tree.map(lambda y: jnp.where(flat, y[place], 0).reshape(counted.shape), outputs)


def chunk_logprobs(logits: Array, targets: Array) -> tuple[Array, Array, Array, tuple[Array, Array]]:
  """Computes log-probabilities, entropies, score norms, largest logits and log-sums of a chunk."""
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
  # Differences of large logits would lose the digits that the results consist of. All results read
  # the same differences: a compiler may fuse the subtraction with the filter's division, so that
  # the largest is not 0.
  relative = logits - top[:, None]
  masses = jnp.exp(relative)
  total = jnp.sum(masses, axis=-1)
  log_total = jnp.log(total)
  entropy = log_total - jnp.sum(masses * relative, axis=-1) / total
  of_targets = jnp.take_along_axis(relative, targets[:, None], axis=-1)[:, 0]
  # (1 - p)² plus the other squares: 1 - 2·p + Σ p² would lose the digits of a likely token.
  is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
  others = jnp.sum(jnp.where(is_target, 0, masses), axis=-1) / total
  score_norm = jnp.square(others) + jnp.sum(jnp.where(is_target, 0, jnp.square(masses)), axis=-1) / jnp.square(total)
  return of_targets - log_total, jnp.maximum(entropy, 0), score_norm, (top, log_total)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
  piece: VocabularyPiece, head: Any, x: Array, targets: Array, num_chunks: Array, teacher: tuple[Any, Array] | None
) -> tuple[Array, Array, Comparison | None, Array]:
  return _chunked_fwd(piece, head, x, targets, num_chunks, teacher)[0]


def _rounded(head: Any, dtype: Any) -> Any:
  """Casts the head for the products of all chunks; a compiler may repeat the cast for each."""
  return jax.tree.map(lambda a: a if a.dtype == dtype else jax.lax.optimization_barrier(a.astype(dtype)), head)


def _padded(piece: VocabularyPiece, x: Array) -> Array:
  """Returns tokens with more behind them, so that all chunks are whole."""
  return jnp.pad(x, ((0, -len(x) % piece.chunk), *((0, 0),) * (x.ndim - 1)))


def _chunked_fwd(piece: VocabularyPiece, head: Any, x: Array, targets: Array, num_chunks: Array, teacher: tuple[Any, Array] | None):
  rows, ids = _padded(piece, x), _padded(piece, targets)
  teacher_head, teacher_rows = (None, None) if teacher is None else (teacher[0], _padded(piece, teacher[1]))
  rounded = _rounded(head, x.dtype)

  def of_chunk(i):
    part = lambda a: jax.lax.dynamic_slice_in_dim(a, i * piece.chunk, piece.chunk)
    raw = piece.unembed(rounded, part(rows))
    own = chunk_logprobs(piece.filter_logits(raw, part(ids)), part(ids))
    return own, None if teacher is None else piece.comparer.compare(raw, piece.teacher_unembed(teacher_head, part(teacher_rows)))

  def body(i, outputs):
    return jax.tree.map(lambda a, y: jax.lax.dynamic_update_slice_in_dim(a, y, i * piece.chunk, 0), outputs, of_chunk(i))

  zeros = jax.tree.map(lambda y: jnp.zeros(len(rows), jnp.float32), jax.eval_shape(of_chunk, 0))
  outputs = jax.lax.fori_loop(0, num_chunks, body, zeros)
  (logprobs, entropy, score_norm, log_totals), compared = jax.tree.map(lambda y: y[: len(x)], outputs)
  comparison, sums = (None, None) if compared is None else compared
  return (logprobs, entropy, comparison, score_norm), (head, x, targets, num_chunks, teacher, (entropy, log_totals, sums))


def _chunked_bwd(piece: VocabularyPiece, saved, cotangents):
  head, x, targets, num_chunks, teacher, of_tokens = saved
  pad = lambda tree: jax.tree.map(partial(_padded, piece), tree)
  rows, ids, (entropies, (tops, log_totals), sums) = (pad(a) for a in (x, targets, of_tokens))
  of_logprobs, of_entropy, of_comparison, _ = pad(cotangents)
  teacher_head, teacher_rows = (None, None) if teacher is None else (teacher[0], pad(teacher[1]))

  rounded = _rounded(head, x.dtype)

  def body(i, total):
    part = lambda a: jax.lax.dynamic_slice_in_dim(a, i * piece.chunk, piece.chunk)
    raw, to_rows = jax.vjp(lambda rows: piece.unembed(rounded, rows), part(rows))
    # The gradient of the head is not rounded, and does not read the head.
    _, to_head = jax.vjp(lambda head: piece.unembed(head, part(rows)), head)
    logits, filter_vjp = jax.vjp(lambda raw: piece.filter_logits(raw, part(ids)), raw)
    # With the sums of the forward pass there is nothing to reduce. XLA on CPUs fuses a softmax into
    # the product before it, which then takes five times as long.
    logprobs = logits - part(tops)[:, None] - part(log_totals)[:, None]
    probs = jnp.exp(logprobs)
    # d log p_target / d logit_v = [v = target] - p_v;  dH / d logit_v = -p_v·(log p_v + H).
    is_target = jnp.arange(logits.shape[-1]) == part(ids)[:, None]
    ct = part(of_logprobs)[:, None] * (is_target - probs)
    if piece.learns_entropy:
      ct -= part(of_entropy)[:, None] * probs * (logprobs + part(entropies)[:, None])
    (ct,) = filter_vjp(ct)
    if teacher is not None:
      theirs = piece.teacher_unembed(teacher_head, part(teacher_rows))
      ct += part(of_comparison.divergence)[:, None] * piece.comparer.gradient(raw, theirs, jax.tree.map(part, sums))
    (of_head,), (of_rows,) = to_head(ct), to_rows(ct)
    heads, hidden = total
    heads = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), heads, of_head)
    return heads, jax.lax.dynamic_update_slice_in_dim(hidden, of_rows, i * piece.chunk, 0)

  zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), head)
  heads, hidden = jax.lax.fori_loop(0, num_chunks, body, (zeros, jnp.zeros_like(rows)))
  return jax.tree.map(lambda a, b: a.astype(b.dtype), heads, head), hidden[: len(x)], None, None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)
