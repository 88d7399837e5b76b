"""The same comparisons on CUDA devices; skipped where there are none."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.cut_rings import rings_cut
from support.plans import forget_plans
from support.tolerances import FLOAT32, TOLERANCE, rounding_bound

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import (
    Case,
    ViewKind,
    combine,
    make_layout,
    reference_attention,
    relative_error,
    run_case,
    sweep,
)
from ring_dilated_attention.engine import Accumulator, TileCall, compute
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.pattern import Window
from ring_dilated_attention.tiles import (
    TileGradients,
    TileInputs,
    backend_named,
    fa4,
    select_backend,
)

EAGER = backend_named("eager")

pytestmark = [
    pytest.mark.gpu,
    # Asking for NaN in uninitialised memory asks for determinism, which some kernels do not have;
    # and the compilers of the kernels warn of themselves.
    pytest.mark.filterwarnings("default"),
]

LARGE = pytest.mark.xdist_group("large")
"""Takes tens of GB: not two at a time."""

BOTH = (False, True)
KERNELS = [
    *((name, torch.bfloat16) for name in ("auto", "fa4", "cudnn", "flash", "efficient", "eager")),
    *((name, torch.float16) for name in ("fa4", "cudnn", "triton")),
    *((name, torch.float32) for name in ("auto", "efficient", "triton")),
    ("triton", torch.bfloat16),
    ("eager", torch.float64),
]


ROUNDED = torch.finfo(torch.bfloat16).eps / 2
"""How far a result may be from the exact one that is rounded to bfloat16 once, at the end."""


def case_of(length, layout="contiguous", world_size=1, **options):
    """A case in bfloat16 with heads of 64, where `options` do not say otherwise."""
    usual = {
        "pattern": DilatedPattern([16, None], [1, 3]),
        "head_dim": 64,
        "dtype": torch.bfloat16,
        "device": "cuda",
    }
    return Case(layout=make_layout(layout, length, world_size), **{**usual, **options})


def skip_if_refused(backend, dtype, head_dim):
    try:
        select_backend(backend, torch.device("cuda", 0), dtype, head_dim)
    except ValueError as error:
        pytest.skip(str(error))


def kernel_cases(world_size, backend, dtype):
    pattern = DilatedPattern([48, 100, None], [1, 3, 4])
    sizes = [(257, 64), (331, 48), (64, 128), (7, 8)]
    # cuDNN works out a plan for every new shape, so the cases are few.
    layouts = ("zigzag", "uneven", "contiguous", "uneven")
    for number, ((length, head_dim), layout) in enumerate(zip(sizes, layouts, strict=True)):
        yield case_of(
            length,
            layout,
            world_size,
            pattern=pattern,
            num_heads=6,
            num_kv_heads=(6, 3)[number % 2],
            head_dim=head_dim,
            batch=1 + number % 2,
            is_causal=number < 2,
            dtype=dtype,
            backend=backend,
            seed=number,
        )


def failures(cases, outcomes):
    return [
        (case, {name: outcome.error(name) for name in outcome.squares}, outcome.valid)
        for case, outcome in zip(cases, outcomes, strict=True)
        if not outcome.passes(case.dtype)
    ]


def out_and_gradients(pattern, query, key, value, dout, **options):
    query, key, value = leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = dilated_attention(query, key, value, pattern, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def run_here(world_size, cases):
    """Every rank on one GPU, in this process."""
    return combine(run_loopback(world_size, lambda ends: [run_case(case, ends) for case in cases]))


def view_cases(world_size, backend, dtype):
    """Strides of 0, rows that overlap, head_dim that is not contiguous, addresses that are odd."""
    for number, (kind, is_causal) in enumerate(product(ViewKind.named().values(), BOTH)):
        yield case_of(
            40,
            "zigzag",
            world_size,
            num_kv_heads=2,
            batch=2,
            is_causal=is_causal,
            dtype=dtype,
            backend=backend,
            seed=number,
            views=(kind,) * 4,
        )


@pytest.mark.parametrize(("backend", "dtype"), KERNELS)
def test_every_kernel_on_one_gpu(backend, dtype):
    """All of a kernel in one process, which compiles its programs once."""
    skip_if_refused(backend, dtype, 64)
    scaled = [
        case_of(150, is_causal=is_causal, dtype=dtype, backend=backend, seed=number, scale=scale)
        for number, (scale, is_causal) in enumerate(product((1e-18, 1e-3), BOTH))
    ]
    assert not failures(scaled, run_here(1, scaled))
    for world_size in (1, 3):
        cases = [*kernel_cases(world_size, backend, dtype), *view_cases(world_size, backend, dtype)]
        assert not failures(cases, run_here(world_size, cases))


@pytest.mark.parametrize(
    ("backend", "head_dim"),
    [("auto", 48), ("auto", 128), ("fa4", 128), ("flash", 48), ("efficient", 128), ("triton", 48)],
)
def test_the_same_bits_each_time_where_deterministic_algorithms_are_on(backend, head_dim):
    skip_if_refused(backend, torch.bfloat16, head_dim)
    torch.manual_seed(0)
    tensors = torch.randn(4, 1, 6000, 4, head_dim, device="cuda", dtype=torch.bfloat16)
    pattern = DilatedPattern([1000, None], [1, 3])

    def compute(backend):
        return out_and_gradients(pattern, *tensors, is_causal=True, backend=backend)

    torch.use_deterministic_algorithms(True)  # the fixture of all tests takes it back
    first = compute(backend)
    for _ in range(3):
        assert all(map(torch.equal, first, compute(backend)))
    with pytest.raises(ValueError, match="cudnn: its gradients may differ from run to run"):
        compute("cudnn")
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain = compute(backend)
    for got, want in zip(plain, first, strict=True):
        assert relative_error(got.double(), want.double()) < TOLERANCE[torch.bfloat16]


def somebody_elses_call(q, k, v, dout, is_causal):
    """What scaled_dot_product_attention and its backward do where they take cuDNN's kernels."""
    aten = torch.ops.aten
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0,
        is_causal,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["fa4", "cudnn", "flash", "efficient"])
def test_tiles_in_any_layout_one_after_another(backend):
    """Kernels that are kept, of cuDNN by torch, must be right for the next layout too."""
    skip_if_refused(backend, torch.bfloat16, 64)
    tile = select_backend(backend, torch.device("cuda", 0), torch.bfloat16, 64).backend
    assert tile is not None
    layouts = {
        "heads within rows": lambda x: x,
        "rows within heads": lambda x: x.contiguous(),
        "every other head": lambda x: x.new_zeros(2, 50, 8, 64).transpose(1, 2)[:, ::2].copy_(x),
        "part of more rows": lambda x: (
            x.new_zeros(2, 99, 4, 64).transpose(1, 2)[:, :, :50].copy_(x)
        ),
    }
    tensors = torch.randn(6, 2, 50, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout, out, other = tensors.transpose(2, 3).unbind()
    for is_causal in (False, True):
        if backend == "cudnn":
            somebody_elses_call(q, k, v, other.contiguous(), is_causal)
        for scale in (0.125, 0.5):
            inputs = TileInputs(q, k, v, is_causal, scale)
            _, lse = EAGER.forward(inputs)
            want = EAGER.backward(inputs, TileGradients(dout, out, lse))
            for (q_name, q_lies), (name, lies) in product(layouts.items(), repeat=2):
                dout_given, out_given = tile.ordered(lies(dout), lies(out))
                q_given, k_given, v_given = tile.ordered(q_lies(q), k, v)
                got = tile.backward(
                    TileInputs(q_given, k_given, v_given, is_causal, scale),
                    TileGradients(dout_given, out_given, lse),
                )
                for a, b in zip(got, want, strict=True):
                    what = q_name, name, scale, is_causal
                    assert relative_error(a, b) < rounding_bound(q.dtype), what


def scored_cases(backend, dtype):
    """Softcap, windows, sinks, and all at once; with ranks, tiles of halos: Lq is not Lk."""
    windows = [DilatedPattern([Window(70, 0)], [1]), DilatedPattern([Window(33, 20), None], [2, 3])]
    patterns = (DilatedPattern.dense(), DilatedPattern([48, None], [1, 3]), *windows)
    sizes = [(257, 64, 1), (331, 128, 3), (61, 48, 2)]
    numbered = enumerate(product(sizes, patterns, (None, 0.6, 30.0)))
    for number, ((length, head_dim, ranks), pattern, softcap) in numbered:
        yield case_of(
            length,
            world_size=ranks,
            pattern=pattern,
            num_kv_heads=(4, 2)[number % 2],
            head_dim=head_dim,
            batch=1 + number % 2,
            is_causal=number % 3 > 0,
            dtype=dtype,
            backend=backend,
            seed=number,
            softcap=softcap,
            has_sink=number % 4 > 0,
            loss_of=(("out",), ("out", "lse"))[number % 5 == 0],
        )


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("fa4", torch.bfloat16), ("fa4", torch.float16), ("auto", torch.float32)],
)
def test_softcap_windows_and_sinks_on_one_gpu(backend, dtype):
    skip_if_refused(backend, dtype, 64)
    cases = [*scored_cases(backend, dtype)]
    outcomes = [run_here(case.layout.world_size, [case])[0] for case in cases]
    assert not failures(cases, outcomes)


@pytest.mark.parametrize("softcap", [None, 0.6, 30.0])
@pytest.mark.parametrize(
    ("queries", "keys", "is_causal", "band"),
    [
        (157, 157, True, None),
        (77, 201, False, None),
        (157, 157, False, (-40, 7)),
        (77, 201, False, (0, 124)),  # halos: on the left of the queries,
        (201, 77, False, (-124, 0)),  # and on their right
        (70, 70, False, (0, 69)),
    ],
)
def test_tiles_of_flash_attention_4(queries, keys, is_causal, band, softcap):
    """With bands and softcaps, of lengths that divide nothing, against float64."""
    skip_if_refused("fa4", torch.bfloat16, 64)
    tile = backend_named("fa4")
    q, dout = torch.randn(2, 2, queries, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, keys, 4, 64, device="cuda", dtype=torch.bfloat16)
    options = {"band": band, "softcap": softcap}
    exact_q, exact_k, exact_v, exact_dout = (x.transpose(1, 2).double() for x in (q, k, v, dout))
    exact = TileInputs(exact_q, exact_k, exact_v, is_causal, 0.3, **options)
    out, lse = EAGER.forward(exact)
    want = EAGER.backward(exact, TileGradients(exact_dout, out, lse))
    inputs = TileInputs(q, k, v, is_causal, 0.3, **options)
    merged = TileGradients(dout, out.bfloat16().transpose(1, 2).contiguous(), lse.float())
    found = *tile.forward(inputs), *tile.backward(inputs, merged)
    for a, b in zip(found, (out, lse, *want), strict=True):
        assert relative_error(a, b) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("backend", ["fa4", "flash"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_halos_on_one_gpu(backend, is_causal):
    """Of ranks with few rows and many: of more queries than keys, and the reverse."""
    skip_if_refused(backend, torch.bfloat16, 64)
    layout = SequenceLayout([[(0, 30), (95, 100)], [(30, 33)], [(33, 90)], [(90, 95)]])
    options = {"is_causal": is_causal, "backend": backend, "num_heads": 4, "num_kv_heads": 2}
    for pattern in (DilatedPattern.window(7), DilatedPattern([Window(40, 9), None], [3, 5])):
        cases = [replace(case_of(100, pattern=pattern, **options), layout=layout)]
        assert not failures(cases, run_here(4, cases))


# Both sides of each block size of the kernels, the sizes that models have, and 112, which
# flash-attn-4 pads as it does 48 and 80.
@pytest.mark.parametrize("head_dim", [16, 24, 40, 48, 64, 80, 96, 112, 128, 136, 192, 256])
def test_every_head_dim(head_dim):
    cases = []
    for backend in ("auto", "fa4", "cudnn", "flash", "triton"):
        try:
            select_backend(backend, torch.device("cuda", 0), torch.bfloat16, head_dim)
        except ValueError:
            assert backend not in ("auto", "triton")
            continue
        sizes = {"num_heads": 3, "num_kv_heads": 3, "head_dim": head_dim}
        pattern, is_causal = DilatedPattern([48, None], [1, 3]), head_dim % 16 == 0
        cases.append(case_of(203, pattern=pattern, is_causal=is_causal, backend=backend, **sizes))
    assert not failures(cases, run_here(1, cases))


@pytest.mark.parametrize(("head_dim", "is_causal"), [(48, True), (128, False), (256, True)])
def test_flash_attn_4_is_called_again_with_other_tensors(head_dim, is_causal):
    """Without its Python, from the second call of a kind on: on views, and on tensors of NaN.

    With grouped queries its backward pass needs sums that torch zeroes: it is not called again.
    """
    skip_if_refused("fa4", torch.bfloat16, head_dim)
    pattern, sizes = DilatedPattern([300, None], [2, 1]), {"num_heads": 4, "num_kv_heads": 4}
    usual = {"pattern": pattern, "head_dim": head_dim, "backend": "fa4", **sizes}
    cases = [
        case_of(777, is_causal=is_causal, seed=seed, views=views, **usual)
        for views in ((), (ViewKind.named()["part of qkv"],) * 4)
        for seed in range(3)
    ]
    replays = fa4.FORWARDS, fa4.BACKWARDS
    for replay in replays:
        replay.kept.clear()  # of other tests: not all of their calls can be called again
    assert not failures(cases, run_here(1, cases))
    for replay in replays:
        assert replay.kept
        assert all(again is not None for again in replay.kept.values())


@pytest.mark.parametrize("backend", ["auto", "fa4", "cudnn", "triton"])
def test_tensors_need_not_be_on_the_current_device(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    skip_if_refused(backend, torch.bfloat16, 64)
    torch.cuda.set_device(0)
    cases = list(kernel_cases(1, backend, torch.bfloat16))
    cases = [replace(case, device="cuda:1") for case in cases]
    assert not failures(cases, run_here(1, cases))


def relative_errors(pattern, length, heads, head_dim, dtype, is_causal, backend="auto"):
    """Of out, dquery, dkey, dvalue."""
    torch.manual_seed(length)
    shape = 1, length, heads, head_dim
    tensors = [torch.randn(shape, device="cuda").to(dtype) for _ in range(4)]
    found = out_and_gradients(pattern, *tensors, is_causal=is_causal, backend=backend)
    *inputs, dout = (x.double() for x in tensors)
    query, key, value = wide = [x.requires_grad_() for x in inputs]
    expected, _ = reference_attention(query, key, value, pattern, is_causal=is_causal)
    wanted = expected.detach(), *torch.autograd.grad(expected, wide, dout)
    return [relative_error(got, want) for got, want in zip(found, wanted, strict=True)]


@LARGE
@pytest.mark.parametrize(
    ("length", "head_dim", "is_causal"),  # tiles of all sizes: one launch, and one each
    [(1031, 64, True), (1031, 128, False), (6151, 64, False), (6151, 128, True)],
)
def test_accuracy_of_the_longnet_pattern(length, head_dim, is_causal):
    scale = 6151 // length
    lengths = [w // scale for w in (1024, 2048, 4096, 4096, 6151)]
    pattern = DilatedPattern(lengths, [1, 2, 4, 6, 12])
    out, *gradients = relative_errors(pattern, length, 12, head_dim, torch.bfloat16, is_causal)
    assert out <= ROUNDED
    assert max(gradients) <= ROUNDED
    assert max(relative_errors(pattern, length, 12, head_dim, torch.float32, is_causal)) <= FLOAT32


@LARGE
@pytest.mark.parametrize(
    ("backend", "head_dim"), [("auto", 48), ("auto", 128), ("fa4", 128), ("cudnn", 48)]
)
def test_small_slices_on_both_streams(backend, head_dim, monkeypatch):
    """What large inputs do: many slices, additions behind the compute."""
    skip_if_refused(backend, torch.bfloat16, head_dim)
    monkeypatch.setattr(compute, "LONG_FLOPS", 0)
    monkeypatch.setattr(TileCall, "most_rows", lambda *_: 1 << 12)
    forget_plans()  # which keep their slices
    for pattern in (DilatedPattern([256, 1024, 4096], [1, 2, 3]), DilatedPattern.dense()):
        out, *gradients = relative_errors(
            pattern, 4099, 8, head_dim, torch.bfloat16, True, backend=backend
        )
        assert out <= ROUNDED
        assert max(gradients) <= ROUNDED


@LARGE
@pytest.mark.parametrize("backend", ["auto", "cudnn", "triton"])
def test_more_than_two_to_the_31_elements(backend):
    """The last segments, beyond 2^31 elements, are what they are on their own."""
    length, heads, head_dim, tail = 2**21 + 5, 8, 128, 2**15 + 5
    pattern = DilatedPattern([2**13, 2**15], [1, 4])
    assert length * heads * head_dim > 2**31
    shape = 1, length, heads, head_dim
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    found = out_and_gradients(pattern, *tensors, backend=backend)
    whole = [x[:, -tail:].clone() for x in found]
    del found
    last = [x[:, -tail:].contiguous() for x in tensors]
    alone = out_and_gradients(pattern, *last, backend=backend)
    for got, want in zip(whole, alone, strict=True):
        assert relative_error(got, want) < 2 * ROUNDED


@LARGE
@pytest.mark.parametrize(("head_dim", "is_causal"), [(128, False), (64, True)])
def test_peak_memory(head_dim, is_causal):
    """At most 1.3 times one tensor in forward, its out included; 4.6 with the gradients."""
    pattern = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    query, key, value, dout = (
        torch.randn(1, 262_144, 12, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def peak(backward, workspace=None):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(backward):
            out = dilated_attention(
                query, key, value, pattern, is_causal=is_causal, workspace=workspace
            )
            if backward:
                torch.autograd.grad(out, leaves, dout)
        return (torch.cuda.max_memory_allocated() - before) / query.nbytes

    assert peak(backward=False) <= 1.3
    assert peak(backward=True) <= 4.6
    assert peak(backward=False, workspace=0.05) <= 1.1
    assert peak(backward=True, workspace=0.2) <= 4.3


@pytest.mark.parametrize("round_pairs", [None, 1])
def test_the_sweep_on_one_gpu(round_pairs):
    cases = [replace(case, device="cuda") for case in sweep(4)]
    with rings_cut(round_pairs):
        assert not failures(cases, run_here(4, cases))


def test_the_compute_waits_for_what_others_send():
    """It waits for the stream that adds gradients, and that for the transfer."""
    device = torch.device("cuda", 0)

    def add_late():
        torch.cuda._sleep(20_000_000)  # 10 ms at 2 GHz
        total.add_(1)

    total = torch.zeros(4, device=device)
    add_late()  # the first time, loading its kernels waits for the device
    total.zero_()
    torch.cuda.synchronize(device)
    sums = Accumulator(device)
    sums.start(add_late, into=(total,))
    sums.finish()
    assert torch.equal(total, torch.ones_like(total))
