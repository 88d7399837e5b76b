"""The Triton kernels against dense references: in the interpreter (TRITON_INTERPRET=1), or CUDA."""

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tolerances import FLOAT32, rounding_bound

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import (
    Case,
    ViewKind,
    reference_attention,
    relative_error,
    run_case,
)
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import Rows, Tile, plan_attention

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from ring_dilated_attention.kernels import (  # noqa: E402
    BackwardConfig,
    LaunchConfig,
    build_cells,
    default_config,
    tiles_backward,
    tiles_forward,
)
from ring_dilated_attention.kernels.forward import rows_of_program  # noqa: E402

# The interpreter runs in numpy, which warns of inf and NaN in padding, and (below numpy 2.4, where
# it stops working) of how the interpreter reads scalars.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning",
    "ignore::DeprecationWarning",
    "ignore:Attempting to run cuBLAS",  # the first backward of a process says so
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL = 3 * (LaunchConfig(16, 16, 4, 1),)


@pytest.fixture(autouse=True)
def _bfloat16_in_the_interpreter(monkeypatch):
    """Triton 3.6 interprets bfloat16 as uint16 and multiplies that."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def dot(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def random_inputs(
    batch, queries, heads, kv_heads, head_dim, dtype=torch.float32, keys=None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and dout."""
    torch.manual_seed(queries * head_dim + heads)
    q, dout = torch.randn(2, batch, queries, heads, head_dim, device=DEVICE).to(dtype)
    k, v = torch.randn(2, batch, keys or queries, kv_heads, head_dim, device=DEVICE).to(dtype)
    return q, k, v, dout


def launches(pattern, length, is_causal, heads, kv_heads, documents=None):
    """Tiles of a whole sequence by what one launch may take."""
    plan = plan_attention(
        pattern,
        SequenceLayout.contiguous(length, 1),
        is_causal=is_causal,
        num_heads=heads,
        num_kv_heads=kv_heads,
        documents=documents,
    )
    groups: dict[Any, list[Tile]] = {}
    for tile in plan.rank(0).local:
        groups.setdefault((tile.branch, tile.is_causal), []).append(tile)
    return list(groups.values())


def run(groups, tensors, scales, *, configs=SMALL, store=False, heads_per_kv=1, gradients=None):
    """Forward, then backward from the merged result; what nothing is written to is NaN.

    One after the other of `scales` on the same cells, as of a plan that is kept.
    """
    (q, k, v, dout), (forward, *both) = tensors, configs
    of_backward = BackwardConfig(*both)

    def cells_of(block_m, block_n):
        return [
            build_cells(
                tiles, batch=q.shape[0], heads_per_kv=heads_per_kv, block_m=block_m,
                block_n=block_n, device=DEVICE,
            )
            for tiles in groups
        ]  # fmt: skip

    cells = cells_of(forward.block_m, forward.block_n)
    cells_of_backward = cells_of(of_backward.dq.block_m, of_backward.dkdv.block_n)
    start = torch.nan if store else 0.0
    for scale in scales:
        out = torch.full(q.shape, torch.nan, device=DEVICE)
        lse = torch.full((q.shape[0], q.shape[1], q.shape[2]), -torch.inf, device=DEVICE).mT
        if store:
            lse.fill_(torch.nan)
        dq, dk, dv = (torch.full(x.shape, start, device=DEVICE) for x in (q, k, v))
        dk, dv = gradients or (dk, dv)
        for one in cells:
            tiles_forward(
                q, k, v, out, lse, one,
                is_causal=one.is_causal, scale=scale, store=store, config=forward,
            )  # fmt: skip
        delta = (dout.float() * out).sum(-1).transpose(1, 2).contiguous()
        for one in cells_of_backward:
            tiles_backward(
                dout, q, k, v, lse, delta, dq, dk, dv, one,
                is_causal=one.is_causal, scale=scale, store=store, store_keys=store,
                config=of_backward,
            )  # fmt: skip
        yield out, lse, dq, dk, dv


def expected(pattern, tensors, is_causal, scale, documents=None, dtype=torch.float64):
    *inputs, dout = tensors
    q, k, v = leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out, lse = reference_attention(
        q, k, v, pattern, is_causal=is_causal, scale=scale, documents=documents
    )
    grads = torch.autograd.grad(out, leaves, dout.to(dtype))
    return out.detach(), lse.detach(), *grads


def errors(got, want):
    """Relative errors where a branch covers the row; elsewhere `got` must be untouched."""
    out, lse, *grads = got
    covered = want[1] > -torch.inf
    assert torch.equal(covered, lse > -torch.inf)
    rows = covered.transpose(1, 2)
    assert out[~rows].isnan().all()
    pairs = [(out[rows], want[0][rows]), (lse[covered], want[1][covered])]
    return [relative_error(a, b) for a, b in [*pairs, *zip(grads, want[2:], strict=True)]]


TAIL = [replace(each, tail=True) for each in SMALL]
CASES: dict[str, Any] = {
    # pattern, n, heads, KV heads, batch, head_dim, and how to launch
    "rate does not divide": (DilatedPattern([11, None], [3, 4]), 39, 3, 3, 1, 16, SMALL),
    "blocked, grouped": (
        DilatedPattern([7, 20], [2, 3], head_offsets="blocked"), 37, 4, 2, 2, 8, SMALL,
    ),
    "split": (DilatedPattern([9, None], [1, 3], head_branches="split"), 33, 4, 4, 1, 24, SMALL),
    "one row": (DilatedPattern([1, 6], [1, 2]), 10, 2, 2, 2, 16, SMALL),
    "dense": (DilatedPattern.dense(), 40, 2, 1, 2, 48, SMALL),
    "two parts": (DilatedPattern([16, None], [1, 2]), 40, 2, 2, 1, 40, TAIL),
    "whole blocks": (DilatedPattern.dense(), 32, 1, 1, 1, 64, SMALL),
    "80": (DilatedPattern([None, 17], [1, 1]), 35, 2, 2, 1, 80, SMALL),
    "256": (DilatedPattern([13], [1]), 30, 1, 1, 1, 256, SMALL),
}  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_branches_merge_into_the_reference(case, is_causal):
    pattern, n, heads, kv_heads, batch, head_dim, configs = CASES[case]
    tensors = random_inputs(batch, n, heads, kv_heads, head_dim)
    groups = launches(pattern, n, is_causal, heads, kv_heads)
    scales = (0.4, 0.7, 1e-6) if case == "whole blocks" else (0.2,)
    found = run(groups, tensors, scales, configs=configs, heads_per_kv=heads // kv_heads)
    for scale, got in zip(scales, found, strict=True):
        want = expected(pattern, tensors, is_causal, scale)
        assert max(errors(got, want)[: None if scale else 2]) <= FLOAT32
        assert not any(x.isnan().any() for x in got[2:])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (64, 16), (16, 64)])
def test_block_sizes_that_differ(blocks, is_causal):
    """40 and 70 rows: blocks before, on and after the diagonal, and ragged last ones."""
    documents = [0, 40, 110]
    pattern, tensors = DilatedPattern.dense(), random_inputs(1, 110, 2, 1, 16)
    groups = launches(pattern, 110, is_causal, 2, 1, documents)
    configs = 3 * (LaunchConfig(blocks[0], blocks[1], 4, 1),)
    (got,) = run(groups, tensors, (0.3,), configs=configs, store=True, heads_per_kv=2)
    assert max(errors(got, expected(pattern, tensors, is_causal, 0.3, documents))) <= FLOAT32


@pytest.mark.parametrize("kind", ViewKind.named())
def test_strides_of_the_inputs_do_not_matter(kind):
    """Nothing is copied but where head_dim is not contiguous."""
    case = Case(
        pattern=DilatedPattern([4, None], [1, 3]),
        layout=SequenceLayout.contiguous(11, 1),
        num_kv_heads=2,
        batch=2,
        is_causal=True,
        dtype=torch.float32,
        backend="triton",
        device=DEVICE.type,
        views=(ViewKind.named()[kind],) * 4,
    )
    (outcome,) = run_loopback(1, lambda ends: run_case(case, ends))
    assert outcome.passes(case.dtype), outcome


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_plain_computation(dtype, is_causal):
    pattern, tensors = DilatedPattern([16, None], [1, 2]), random_inputs(1, 40, 2, 2, 32, dtype)
    (got,) = run(launches(pattern, 40, is_causal, 2, 2), tensors, (0.2,))
    want = expected(pattern, tensors, is_causal, 0.2)
    # On the CPU: compute-sanitizer takes what cuBLAS writes for uninitialised.
    plain = expected(pattern, [x.cpu() for x in tensors], is_causal, 0.2, dtype=dtype)
    for error, a, b in zip(errors(got, want), plain, want, strict=True):
        assert error <= 2 * relative_error(a, b.cpu())


def test_far_apart_results_merge_without_nan():
    """Scores around +-200: weights of 0 and 1, exp beyond float32."""
    q, k, v, dout = random_inputs(1, 16, 1, 1, 16)
    tensors, pattern = (q, 50 * k, v, dout), DilatedPattern([4, None], [1, 1])
    (got,) = run(launches(pattern, 16, True, 1, 1), tensors, (1.0,))
    assert max(errors(got, expected(pattern, tensors, True, 1.0))[:2]) <= FLOAT32
    assert not any(x.isnan().any() for x in got)


def dense(q, k, v, dout, scale, seen):
    """Out and gradients in float64, where `seen` (heads, n, m); out 0 of rows that see nothing."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    rows = seen.any(-1, keepdim=True)
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1])
    p = scores.masked_fill(~seen & rows, -torch.inf).softmax(-1) * rows
    out = torch.einsum("bhqk,bkhd->bqhd", p, leaves[2])
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


def test_keys_in_slots_of_a_message():
    """Head stride 0 for keys and their gradients, two launches that share slots, odd strides."""
    n, slots, head_dim = 24, 40, 16
    q, _, _, dout = (x[..., :head_dim] for x in random_inputs(2, n, 2, 1, 17))
    message = torch.randn(4, 2, slots, 17, device=DEVICE)[..., :head_dim]
    message[2:] = 0
    k, v, dk, dv = (x.unsqueeze(2).expand(-1, -1, 2, -1) for x in message)
    tiles = [
        Tile(0, range(2), 1, False, Rows(0, 8, 3, 1), Rows(0, 20, 1, 20)),
        Tile(0, range(2), 1, False, Rows(1, 7, 3, 1), Rows(0, 17, 1, 20)),
    ]
    seen = torch.zeros(2, n, slots, dtype=torch.bool, device=DEVICE)
    for tile, head in itertools.product(tiles, range(2)):
        first, keys = tile.queries.start + head, tile.keys
        queries = slice(first, first + 3 * tile.queries.length, 3)
        seen[head, queries, 20 * head : 20 * head + keys.length] = True
    (got,) = run([[tile] for tile in tiles], (q, k, v, dout), (0.3,), gradients=(dk, dv))
    rows = seen.any(-1).T
    assert got[0][:, ~rows].isnan().all()
    want = dense(q, k, v, dout, 0.3, seen)
    assert relative_error(got[0][:, rows], want[0][:, rows]) <= FLOAT32
    assert relative_error(got[2], want[1]) <= FLOAT32
    for found, exact in zip(message[2:], want[2:], strict=True):
        assert relative_error(found, exact.sum(2)) <= FLOAT32


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((head_dim, torch.bfloat16) for head_dim in (64, 128, 256)),
        *((head_dim, torch.float32) for head_dim in (64, 128)),
    ],
)
def test_kernels_with_every_block_size(head_dim, dtype):
    """Blocks of 16, 32, 64 and 128 rows shrink to the longest tile: each is another program."""
    segments, heads, scale, wrong = 16, 4, head_dim**-0.5, []
    bound = rounding_bound(dtype) if dtype == torch.bfloat16 else FLOAT32
    for queries, keys, is_causal in (
        (13, 200, False), (30, 60, False), (60, 30, False), (200, 13, False), (200, 200, False),
        (30, 30, True), (200, 200, True),
    ):  # fmt: skip
        tensors = random_inputs(
            1, segments * queries, heads, heads, head_dim, dtype, segments * keys
        )
        of_queries, of_keys = (Rows(0, length, 1, 0, length) for length in (queries, keys))
        tile = Tile(0, range(heads), segments, is_causal, of_queries, of_keys)
        kernels: list[Any] = ["forward", "dq", "dkdv"]
        configs = [
            default_config(each, head_dim, dtype, queries=queries, keys=keys) for each in kernels
        ]
        repeats = list(run([[tile]], tensors, 6 * (scale,), configs=configs))
        seen = torch.ones(heads, queries, keys, dtype=torch.bool, device=DEVICE)
        q, k, v, dout = (x.unflatten(1, (segments, -1))[0] for x in tensors)
        want = dense(q, k, v, dout, scale, seen.tril() if is_causal else seen)
        for number, exact in zip((0, 2, 3, 4), want, strict=True):
            got = repeats[0][number]
            error = relative_error(got, exact.flatten(0, 1)[None])
            same = all(torch.equal(got, each[number]) for each in repeats)
            if error > bound or not same:
                wrong.append((queries, keys, is_causal, number, f"{error:.1e}", same))
    assert not wrong


@triton.jit
def _find_rows(program, ranges, order, found, block: tl.constexpr):
    _, first, _, count = rows_of_program(program, ranges, order, tl.program_id(0), block)
    tl.store(found, first)
    tl.store(found + 1, count)


@pytest.mark.parametrize("block", [0, 16_382, 16_383])
def test_rows_of_long_sequences_are_counted_in_32_bits(block):
    """2^20 - 1 rows in blocks of 64: rows times blocks are 2^34."""
    high = 2**20 - 1
    ranges = torch.tensor([0, high, 0, high, 1, 1, 0, 0], dtype=torch.int32, device=DEVICE)
    program = torch.tensor([0, 0, high, 0, block], dtype=torch.int32, device=DEVICE)
    order, found = torch.zeros(2, 1 + 1, dtype=torch.int32, device=DEVICE)
    _find_rows[(1,)](program, ranges, order, found, block=64)
    assert found.tolist() == [64 * block, 64 - (block == 16_383)]
