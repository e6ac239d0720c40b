"""Operations and bytes of a compiled program, read from its text, against counts by hand."""

import pytest

from experiments.pod import hlo
from experiments.pod.kernels import Load
from experiments.pod.operations import count

PRODUCTS = """
%nested (p: f32[2,6,8]) -> f32[6,8] {
  %whole = f32[2,6,8]{2,1,0} parameter(0)
  ROOT %slice = f32[1,6,8]{2,1,0} dynamic-slice(%whole, %i, %zero, %zero)
}
%fused (p: f32[4,6], q: f32[2,6,8]) -> f32[4,8] {
  %left = f32[4,6]{1,0} parameter(0)
  %stack = f32[2,6,8]{2,1,0} parameter(1)
  %weight = f32[1,6,8]{2,1,0} fusion(%stack), kind=kLoop, calls=%nested
  %flat = f32[6,8]{1,0} bitcast(%weight)
  ROOT %y = f32[4,8]{1,0} convolution(%left, %flat), dim_labels=bf_io->bf
}
%updated (p: f32[9,4,8], q: f32[4,8]) -> f32[9,4,8] {
  %stack.1 = f32[9,4,8]{2,1,0} parameter(0)
  %new = f32[4,8]{1,0} parameter(1)
  %part = f32[1,4,8]{2,1,0} bitcast(%new)
  ROOT %put = f32[9,4,8]{2,1,0} dynamic-update-slice(%stack.1, %part, %i, %zero, %zero)
}
%body (p: (s32[], f32[4,6], f32[2,6,8])) -> (s32[], f32[4,6], f32[2,6,8]) {
  %p = (s32[], f32[4,6]{1,0}, f32[2,6,8]{2,1,0}, f32[9,4,8]{2,1,0}) parameter(0)
  %out = f32[4,8]{1,0} fusion(%p#1, %p#2), kind=kOutput, calls=%fused
  %kept = f32[9,4,8]{2,1,0} fusion(%p#3, %out), kind=kLoop, calls=%updated
}
%condition (p: (s32[])) -> pred[] {
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
ENTRY %main (a: f32[4,6]) -> f32[8] {
  %w = (s32[]) while(%t), condition=%condition, body=%body
}
"""


def test_loops_fusions_and_slices_count_what_they_compute_and_move():
  operations = count(PRODUCTS)
  assert operations.by_kind == {"products": 3 * 2 * 4 * 6 * 8} and operations.flops == 3 * 2 * 4 * 6 * 8
  of_product = 4 * (4 * 6 + 6 * 8 + 4 * 8)  # One of the two matrices of the stack is read.
  of_update = 4 * (4 * 8 + 4 * 8)  # The stack is updated in place.
  of_condition = 4 + 1
  assert operations.num_bytes == 3 * (of_product + of_update + of_condition)


@pytest.mark.parametrize(
  ("shapes", "attributes", "products"),
  [
    (("f32[5,7]", "f32[7,3]", "f32[5,3]"), "dim_labels=bf_io->bf", 5 * 7 * 3),
    # XLA's heads of a projection: the window is larger than the input, and one position is inside.
    (("f32[5,7,1]", "f32[7,4,3]", "f32[5,4,3]"), "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_i0o->b0f", 5 * 7 * 4 * 3),
    # The sum over heads: every position is inside.
    (("f32[5,4,3]", "f32[4,3,7]", "f32[5,7,1]"), "window={size=4}, dim_labels=b0f_0io->bf0", 5 * 4 * 3 * 7),
    # A batch dimension as a window that is spread out.
    (("f32[6,5,7]", "f32[6,7,3]", "f32[6,5,3]"), "window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf", 6 * 5 * 7 * 3),
    # A window of 3 with padding: the two outer positions see two inputs each.
    (("f32[1,6,2]", "f32[3,2,4]", "f32[1,6,4]"), "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", (6 * 3 - 2) * 2 * 4),
  ],
)
def test_convolutions_count_the_positions_inside_their_input(shapes, attributes, products):
  left, right, out = shapes
  text = f"ENTRY %main (a: f32[]) -> f32[] {{\n  %l = {left} parameter(0)\n  %r = {right} parameter(1)\n"
  assert count(f"{text}  ROOT %y = {out} convolution(%l, %r), {attributes}\n}}").flops == 2 * products


def test_dots_have_batch_dimensions():
  text = """ENTRY %main (a: f32[]) -> f32[] {
  %l = f32[3,5,7]{2,1,0:T(8,128)} parameter(0)
  %r = f32[3,7,4]{2,1,0:T(8,128)S(1)} parameter(1)
  ROOT %y = f32[3,5,4]{2,1,0} dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}
}"""
  operations = count(text)
  assert operations.flops == 2 * 3 * 5 * 7 * 4
  # The right operand is in the cores' memory.
  assert operations.num_bytes == 4 * (3 * 5 * 7 + 3 * 5 * 4)


KERNEL = 'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/'


FLASH = ("bf16[2,4,384,16]", "bf16[2,2,384,16]", "bf16[2,2,384,16]")


@pytest.mark.parametrize(
  ("operands", "out", "name", "flops"),
  [
    (("s32[8]", "bf16[100,6]", "bf16[4,6,5]"), "bf16[100,5]", "ragged-dot-none", 2 * 40 * 6 * 5),
    (("s32[8]", "bf16[30,6]", "bf16[4,6,5]"), "bf16[30,5]", "ragged-dot-none", 2 * 30 * 6 * 5),
    (("s32[8]", "bf16[100,6]", "bf16[100,5]"), "bf16[4,6,5]", "jit(tgmm)/pallas_call", 2 * 40 * 6 * 5),
    (("s32[8]", "bf16[30,6]", "bf16[30,5]", "f32[4,6,5]"), "f32[4,6,5]", "jit(tgmm)/pallas_call", 2 * 10 * 6 * 5),
    (("s32[8]",), "s32[9]", "ragged-dot-metadata", 0),
    # Two rows of three blocks of 128 tokens: six pairs of blocks each.
    (("s32[9]", *FLASH), "bf16[2,4,384,16]", "flash_forward", 2 * 2 * 2 * 4 * 16 * 6 * 128**2),
    (("s32[9]", *FLASH), "bf16[2,4,384,16]", "flash_backward", 2 * 5 * 2 * 4 * 16 * 6 * 128**2),
    # The queries of the third of three devices: a third of the pairs, on average.
    (("s32[9]", "bf16[2,4,128,16]", *FLASH[1:]), "bf16[2,4,128,16]", "flash_forward", 2 * 2 * 2 * 4 * 16 * 2 * 128**2),
    (("s32[9]", "bf16[8,2,4,16]", "s8[8,2,16,32]", "s8[8,2,32,16]"), "f32[8]", "ragged_decode_attention", 2 * 2 * 8 * 2 * 4 * 16 * 32),
  ],
)  # fmt: skip
def test_kernels_count_by_their_shapes(operands, out, name, flops):
  """Of 100 rows, 40 are in groups. The text of a kernel's attributes has several lines."""
  lines = "".join(f"  %p{i} = {shape} parameter({i})\n" for i, shape in enumerate(operands))
  names = ", ".join(f"%p{i}" for i in range(len(operands)))
  call = f'  ROOT %k = {out} custom-call({names}), frontend_attributes={{kernel_metadata={{\n"a": 1\n}}}}, {KERNEL}{name}"}}\n'
  operations = count(f"ENTRY %main (a: f32[]) -> f32[] {{\n{lines}{call}}}", load=Load(grouped_rows=40))
  assert operations.flops == flops and operations.unknown == ()


@pytest.mark.parametrize(
  ("operands", "out", "name", "num_bytes"),
  [
    # Of 100 rows, 40 are read in each of two tiles of columns, and as many results written.
    (("bf16[100,256]", "bf16[4,256,256]"), "bf16[100,256]", "ragged-dot-none", 2 * (2 * 40 * 256 + 4 * 256 * 256 + 40 * 256)),
    # The matrices are in the cores' memory.
    (("bf16[100,256]", "bf16[4,256,256]{2,1,0:S(1)}"), "bf16[100,256]", "ragged-dot-none", 2 * (2 * 40 * 256 + 40 * 256)),
    # The matrices arrive in two parts, for each of 20 tiles of rows and once more for each group.
    (("bf16[100,512]", "bf16[4,512,128]"), "bf16[100,128]", "ragged-dot-none", 2 * (40 * 512 + 512 * 128 * (0.4 * 50 + 4) + 40 * 128)),
    # A tile of 1,024 columns of a sum: the other operand is read twice.
    (("bf16[100,2048]", "bf16[100,8]"), "bf16[4,2048,8]", "jit(tgmm)/pallas_call", 2 * (40 * 2048 + 2 * 40 * 8 + 4 * 2048 * 8)),
    (("bf16[512,128]", "bf16[512,8]"), "bf16[4,128,8]", "token_sums/jit(tgmm)/pallas_call", 2 * (40 * 128 + 40 * 8 + 4 * 128 * 8)),
  ],
)  # fmt: skip
def test_grouped_products_move_their_rows_once_for_each_tile_of_columns(operands, out, name, num_bytes):
  shapes = [shape if "{" in shape else f"{shape}{{{'2,1,0' if shape.count(',') == 2 else '1,0'}}}" for shape in operands]
  lines = "".join(f"  %p{i} = {shape} parameter({i})\n" for i, shape in enumerate(shapes))
  tiles = 'frontend_attributes={ragged_dot_tiling="2,256,128"}, '
  text = f"ENTRY %main (a: f32[]) -> f32[] {{\n{lines}  ROOT %k = {out}{{1,0}} custom-call(%p0, %p1), {tiles}{KERNEL}{name}\"}}\n}}"
  assert count(text, load=Load(grouped_rows=40)).num_bytes == num_bytes


def test_a_gather_reads_a_row_as_often_as_it_is_named():
  text = """
%fused (p: f32[4,8], q: s32[9]) -> f32[9,8] {
  %rows = f32[4,8]{1,0} parameter(0)
  %which = s32[9]{0} parameter(1)
  ROOT %y = f32[9,8]{1,0} gather(%rows, %which), offset_dims={1}
}
ENTRY %main (a: f32[4,8]) -> f32[9,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = s32[9]{0} parameter(1)
  ROOT %f = f32[9,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused
}
"""
  assert count(text).num_bytes == 4 * (9 * 8 + 9 + 9 * 8)


def test_an_unknown_kernel_is_named():
  text = f'ENTRY %main (a: f32[]) -> f32[] {{\n  ROOT %new_kernel.3 = f32[4] custom-call(%a), {KERNEL}mine"}}\n}}'
  assert count(text).unknown == ("new_kernel",) and count(text).flops == 0


BRANCHES = """
%few (p: f32[2,8]) -> f32[2,8] {
  %x = f32[2,8]{1,0} parameter(0)
  ROOT %y = f32[2,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, metadata={op_name="usual/dot"}
}
%full (p: f32[2,8]) -> f32[2,8] {
  %x.1 = f32[2,8]{1,0} parameter(0)
  %y.1 = f32[2,8]{1,0} dot(%x.1, %w), lhs_contracting_dims={1}, metadata={op_name="usual/dot"}
  ROOT %y.2 = f32[2,8]{1,0} dot(%y.1, %w), lhs_contracting_dims={1}, metadata={op_name="usual/dot"}
}
ENTRY %main (a: f32[2,8]) -> f32[2,8] {
  %a = f32[2,8]{1,0} parameter(0)
  ROOT %c = f32[2,8]{1,0} conditional(%b, %a, %a), true_computation=%few, false_computation=%full
}
"""


def test_a_conditional_counts_its_most_expensive_branch_except_for_an_overflow():
  assert hlo.CALLED.findall(BRANCHES)[0][0] == "few"
  text = BRANCHES.replace("%w)", "%x)").replace("%x.1, %x)", "%x.1, %x.1)").replace("%y.1, %x)", "%y.1, %x.1)")
  one = 2 * 2 * 8 * 8
  assert count(text).flops == 2 * one
  head, full = text.split("%full (p", 1)
  assert count(f"{head}%full (p{full.replace('usual', 'overflow', 2)}").flops == one
  assert count(text.replace("usual", "overflow")).flops == 2 * one
