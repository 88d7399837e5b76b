"""The Triton kernels against dense references: in the interpreter (TRITON_INTERPRET=1), or CUDA."""

import itertools
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tolerances import FLOAT32

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

from ring_dilated_attention.kernels import (  # noqa: E402
    BackwardConfig,
    LaunchConfig,
    build_cells,
    default_config,
    tiles_backward,
    tiles_forward,
)

# The interpreter runs in numpy, which warns of inf and NaN in padding, and (below numpy 2.4, where
# it stops working) of how the interpreter reads scalars.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning",
    "ignore::DeprecationWarning",
    "ignore:Attempting to run cuBLAS",  # the first backward of a process says so
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL = LaunchConfig(16, 16, 4, 1)
SMALL_BACKWARD = BackwardConfig(SMALL, SMALL)


def launches(plan):
    """The tiles of rank 0 by what one launch may take."""
    groups: dict[Any, list[Tile]] = {}
    for tile in plan.rank(0).local:
        groups.setdefault((tile.branch, tile.is_causal), []).append(tile)
    return list(groups.values())


@pytest.fixture(autouse=True)
def _bfloat16_in_the_interpreter(monkeypatch):
    """Triton 3.6 interprets bfloat16 as uint16 and multiplies that."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def dot(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def run(
    groups,
    q,
    k,
    v,
    dout,
    scale,
    *,
    heads_per_kv,
    config=SMALL,
    backward=SMALL_BACKWARD,
    store=False,
):
    """Forward, then backward from the merged result. What nothing is written to is NaN."""
    sums = torch.float32
    out = torch.full_like(q, torch.nan, dtype=sums)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=DEVICE)
    if store:
        lse.fill_(torch.nan)
    start = torch.nan if store else 0.0
    dq, dk, dv = (torch.full(x.shape, start, dtype=sums, device=DEVICE) for x in (q, k, v))
    options = {"batch": q.shape[0], "heads_per_kv": heads_per_kv, "device": DEVICE}
    for tiles in groups:
        cells = build_cells(tiles, block_m=config.block_m, block_n=16, **options)
        tiles_forward(
            q, k, v, out, lse, cells,
            is_causal=tiles[0].is_causal, scale=scale, store=store, config=config,
        )  # fmt: skip
    delta = (dout.float() * out).sum(-1).transpose(1, 2).contiguous()
    for tiles in groups:
        blocks = {"block_m": backward.dq.block_m, "block_n": backward.dkdv.block_n}
        cells = build_cells(tiles, **blocks, **options)
        tiles_backward(
            dout, q, k, v, lse, delta, dq, dk, dv, cells,
            is_causal=tiles[0].is_causal, scale=scale, store=store, store_keys=store,
            config=backward,
        )  # fmt: skip
    return out, lse, dq, dk, dv


def random_inputs(
    batch, n, heads, kv_heads, head_dim, dtype=torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and dout."""
    torch.manual_seed(n * head_dim + heads)
    q, dout = torch.randn(2, batch, n, heads, head_dim, device=DEVICE).to(dtype)
    k, v = torch.randn(2, batch, n, kv_heads, head_dim, device=DEVICE).to(dtype)
    return q, k, v, dout


def expected(pattern, q, k, v, dout, is_causal, scale, documents=None, dtype=torch.float64):
    q, k, v = leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
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


CASES = {
    # pattern, n, heads, KV heads, batch, head_dim
    "rate does not divide": (DilatedPattern([11, None], [3, 4]), 39, 3, 3, 1, 16),
    "blocked, grouped": (DilatedPattern([7, 20], [2, 3], head_offsets="blocked"), 37, 4, 2, 2, 8),
    "split": (DilatedPattern([9, None], [1, 3], head_branches="split"), 33, 4, 4, 1, 24),
    "one row": (DilatedPattern([1, 6], [1, 2]), 10, 2, 2, 2, 16),
    "dense": (DilatedPattern.dense(), 40, 2, 1, 2, 48),
    "dense, whole blocks": (DilatedPattern.dense(), 32, 1, 1, 1, 64),
    "80": (DilatedPattern([None, 17], [1, 1]), 35, 2, 2, 1, 80),
    "128": (DilatedPattern([None], [2]), 40, 2, 2, 1, 128),
    "256": (DilatedPattern([13], [1]), 30, 1, 1, 1, 256),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_branches_merge_into_the_reference(case, is_causal):
    pattern, n, heads, kv_heads, batch, head_dim = CASES[case]
    inputs = random_inputs(batch, n, heads, kv_heads, head_dim)
    layout = SequenceLayout.contiguous(n, 1)
    plan = plan_attention(
        pattern, layout, is_causal=is_causal, num_heads=heads, num_kv_heads=kv_heads
    )
    scale = head_dim**-0.5
    got = run(launches(plan), *inputs, scale, heads_per_kv=heads // kv_heads)
    assert max(errors(got, expected(pattern, *inputs, is_causal, scale))) <= FLOAT32


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (64, 16), (16, 64)])
def test_block_sizes_that_differ(blocks, is_causal):
    """40 and 70 rows: blocks before, on and after the diagonal, and ragged last ones."""
    documents = [0, 40, 110]
    pattern, inputs = DilatedPattern.dense(), random_inputs(1, 110, 2, 1, 16)
    plan = plan_attention(
        pattern,
        SequenceLayout.contiguous(110, 1),
        is_causal=is_causal,
        num_heads=2,
        num_kv_heads=1,
        documents=documents,
    )
    config = LaunchConfig(blocks[0], blocks[1], 4, 1)
    got = run(
        launches(plan), *inputs, 0.3, heads_per_kv=2, config=config,
        backward=BackwardConfig(config, config), store=True,
    )  # fmt: skip
    want = expected(pattern, *inputs, is_causal, 0.3, documents)
    assert max(errors(got, want)) <= FLOAT32


def test_any_scale(monkeypatch):
    """One after the other on the same cells, as of a plan that is kept."""
    inputs = random_inputs(1, 21, 1, 1, 16)
    plan = plan_attention(DilatedPattern.dense(), SequenceLayout.contiguous(21, 1), is_causal=True)
    groups, build = launches(plan), build_cells
    kept: dict[Any, Any] = {}

    def built_once(tiles, **options):
        key = id(tiles), options["block_m"], options["block_n"]
        return kept.get(key) or kept.setdefault(key, build(tiles, **options))

    monkeypatch.setattr(sys.modules[__name__], "build_cells", built_once)
    for scale in (0.4, -0.7, 0.0):
        got = run(groups, *inputs, scale, heads_per_kv=1)
        want = expected(DilatedPattern.dense(), *inputs, True, scale)
        assert max(errors(got, want)[: None if scale else 2]) <= FLOAT32
        assert not any(x.isnan().any() for x in got)


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


@pytest.mark.parametrize("head_slice", [(0, 3, 8), (5, 8, 8)])
@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern([8, None], [2, 3]),
        DilatedPattern([8, None], [2, 3], head_offsets="blocked", zero_keys=True),
        DilatedPattern([8, 9, None], [1, 2, 3], head_branches="split"),
    ],
    ids=["interleaved", "blocked", "split"],
)
def test_some_heads_of_a_layer(pattern, head_slice):
    case = Case(
        pattern=pattern.of_heads(head_slice, 3),
        layout=SequenceLayout.contiguous(17, 1),
        num_heads=6,
        num_kv_heads=3,
        dtype=torch.float32,
        backend="triton",
        device=DEVICE.type,
    )
    (outcome,) = run_loopback(1, lambda ends: run_case(case, ends))
    assert outcome.passes(case.dtype), outcome


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_plain_computation(dtype, is_causal):
    pattern = DilatedPattern([16, None], [1, 2])
    inputs = random_inputs(1, 40, 2, 2, 32, dtype)
    plan = plan_attention(
        pattern, SequenceLayout.contiguous(40, 1), is_causal=is_causal, num_heads=2
    )
    got = run(launches(plan), *inputs, 0.2, heads_per_kv=1)
    want = expected(pattern, *inputs, is_causal, 0.2)
    # On the CPU: compute-sanitizer takes what cuBLAS writes for uninitialised.
    q, k, v, dout = (x.cpu() for x in inputs)
    plain = expected(pattern, q, k, v, dout, is_causal, 0.2, dtype=dtype)
    for error, a, b in zip(errors(got, want), plain, want, strict=True):
        assert error <= 2 * relative_error(a, b.cpu())


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_head_dim_of_two_parts(is_causal):
    pattern = DilatedPattern([16, None], [1, 2])
    inputs = random_inputs(1, 40, 2, 2, 40, torch.float32)
    plan = plan_attention(
        pattern, SequenceLayout.contiguous(40, 1), is_causal=is_causal, num_heads=2
    )
    with_tail = replace(SMALL, tail=True)
    backward = BackwardConfig(*(replace(each, tail=True) for each in SMALL_BACKWARD))
    options: Any = {"config": with_tail, "backward": backward}
    got = run(launches(plan), *inputs, 0.2, heads_per_kv=1, **options)
    for error in errors(got, expected(pattern, *inputs, is_causal, 0.2)):
        assert error < FLOAT32


def test_keys_in_slots_of_a_message():
    """Head stride 0 for keys and their gradients, two launches that share slots, odd strides."""
    n, slots, head_dim = 24, 40, 16
    q, _, _, dout = (x[..., :head_dim] for x in random_inputs(2, n, 2, 1, 17))
    k, v, dk, dv = torch.randn(4, 2, slots, 17, device=DEVICE)[..., :head_dim]
    dk.zero_(), dv.zero_()
    k_slots, v_slots, dk_slots, dv_slots = (
        x.as_strided((2, slots, 1, head_dim), (slots * 17, 17, 0, 1)) for x in (k, v, dk, dv)
    )
    tiles = [
        Tile(0, range(2), 1, False, Rows(0, 8, 3, 1), Rows(0, 20, 1, 20)),
        Tile(0, range(2), 1, False, Rows(1, 7, 3, 1), Rows(0, 17, 1, 20)),
    ]
    out = torch.full_like(q, torch.nan)
    lse = torch.full((2, n, 2), -torch.inf, device=DEVICE).mT  # rows are 2 elements apart
    dq = torch.zeros_like(q)
    seen = torch.zeros(2, n, slots, dtype=torch.bool, device=DEVICE)
    options: dict[str, Any] = {"is_causal": False, "scale": 0.3, "store": False}
    cells = [
        build_cells([tile], batch=2, heads_per_kv=1, block_m=16, block_n=16, device=DEVICE)
        for tile in tiles
    ]
    for one in cells:
        tiles_forward(q, k_slots, v_slots, out, lse, one, config=SMALL, **options)
    for tile, head in itertools.product(tiles, range(2)):
        first = tile.queries.start + head
        queries = slice(first, first + 3 * tile.queries.length, 3)
        seen[head, queries, 20 * head : 20 * head + tile.keys.length] = True
    rows = seen.any(-1)
    delta = (out * dout).sum(-1).mT.contiguous()
    for one in cells:
        tiles_backward(
            dout, q, k_slots, v_slots, lse, delta, dq, dk_slots, dv_slots, one,
            config=SMALL_BACKWARD, store_keys=False, **options,
        )  # fmt: skip
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = 0.3 * torch.einsum("bqhd,bkd->bhqk", leaves[0], leaves[1])
    scores = scores.masked_fill(~seen & rows[..., None], -torch.inf)
    p = scores.softmax(-1) * rows[..., None]
    want = torch.einsum("bhqk,bkd->bqhd", p, leaves[2])
    grads = torch.autograd.grad(want, leaves, dout.double())
    assert out[:, ~rows.T].isnan().all()
    assert relative_error(out[:, rows.T], want[:, rows.T].detach()) <= FLOAT32
    for a, b in zip((dq, dk, dv), grads, strict=True):
        assert relative_error(a, b) <= FLOAT32


def test_far_apart_results_merge_without_nan():
    """Scores around +-200: weights of 0 and 1, exp beyond float32."""
    q, k, v, dout = random_inputs(1, 16, 1, 1, 16)
    k = 50 * k
    pattern = DilatedPattern([4, None], [1, 1])
    plan = plan_attention(pattern, SequenceLayout.contiguous(16, 1), is_causal=True)
    got = run(launches(plan), q, k, v, dout, 1.0, heads_per_kv=1)
    want = expected(pattern, q, k, v, dout, True, 1.0)
    assert max(errors(got, want)[:2]) <= FLOAT32
    assert not any(x.isnan().any() for x in got)


def test_default_configurations_and_no_tiles():
    inputs = random_inputs(1, 20, 1, 1, 8)
    plan = plan_attention(DilatedPattern.dense(), SequenceLayout.contiguous(20, 1), is_causal=True)
    forward = default_config("forward", 8, torch.float32, queries=20, keys=20)
    dkdv = default_config("dkdv", 8, torch.float32, queries=20, keys=20)
    assert max(forward.block_m, dkdv.block_n) <= 32
    groups = launches(plan)
    out = torch.empty_like(inputs[0])
    lse = torch.empty(1, 1, 20, device=DEVICE)
    sizes: dict[str, Any] = {"block_m": forward.block_m, "block_n": dkdv.block_n}
    cells = build_cells(groups[0], batch=1, heads_per_kv=1, device=DEVICE, **sizes)
    tiles_forward(*inputs[:3], out, lse, cells, is_causal=True, scale=0.3, store=True)
    want = expected(DilatedPattern.dense(), *inputs, True, 0.3)
    assert relative_error(out, want[0]) <= FLOAT32
    nothing = build_cells([], batch=1, heads_per_kv=1, block_m=16, block_n=16, device=DEVICE)
    tiles_forward(
        *inputs[:3], out, lse, nothing, is_causal=False, scale=0.3, store=True, config=SMALL
    )
    assert relative_error(out, want[0]) <= FLOAT32


def test_cells_list_every_row_once_and_the_longest_first():
    tiles = [
        Tile(0, range(0, 4, 2), 3, True, Rows(5, 37, 2, 1, 80), Rows(5, 37, 2, 1, 80)),
        Tile(0, range(1, 2), 1, True, Rows(0, 3, 1, 0), Rows(0, 3, 1, 0)),
    ]
    cells = build_cells(tiles, batch=2, heads_per_kv=3, block_m=16, block_n=32, device="cpu")
    want = {
        (b, h, t.queries.start + s * t.queries.segment_stride + j * t.queries.head_stride)
        for t in tiles
        for b in range(2)
        for s in range(t.segments)
        for j, h in enumerate(t.heads)
    }
    assert set(map(tuple, cells.table[:, :3].tolist())) == want
    assert len(cells.table) == len(want) == 14
    assert (
        len(cells.query_programs)
        == len(set(map(tuple, cells.query_programs.tolist())))
        == (12 * 3 * 3 + 2 * 3)
    )
    assert len(cells.key_programs) == 12 * 2 + 2
    assert cells.query_programs[:, 2].tolist() == sorted(cells.query_programs[:, 2], reverse=True)
    assert cells.table[cells.query_programs[-1, 0], 4] == 3
