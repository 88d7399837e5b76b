"""The operators under torch.compile and in CUDA graphs: no graph break, same numbers."""

import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.tolerances import BITS_MAY_DIFFER, FLOAT32, assert_same, rounding_bound
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.library import opcheck

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.exchange import (
    ExchangeError,
    agree,
    group_name,
    refuse_capture,
    run_loopback,
)
from ring_dilated_attention.resolve import FlatOptions
from ring_dilated_attention.torch_op import FORWARD, LENGTHS, operator

pytestmark = [  # the compiler's own
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
]

PATTERN = DilatedPattern([8, 24, None], [1, 2, 4])
DENSE = FlatOptions(
    [0], [1], "interleaved", "all", False, False, None, [], "", "auto", "auto", None, True
)
GPU_MARKS = (
    pytest.mark.gpu,
    # Asking for NaN in uninitialised memory asks for determinism, which some kernels do not have.
    pytest.mark.filterwarnings("ignore:.*determinis.*"),
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves(length, *, kv_heads=4, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, length, heads, 16, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]


def results(function, tensors, **options):
    """Out, lse and gradients of both: a graph passes zeros for one that is not used, eager none."""
    out, lse = function(*tensors, **options)
    loss = out.square().sum() + lse.clamp(min=-9).sum()  # -inf has no gradient
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors)]


def attention(query, key, value, *, pattern=PATTERN, **options):
    return dilated_attention(query, key, value, pattern, is_causal=True, return_lse=True, **options)


def check_same(function, plain, tensors, **options):
    """Compare `results` of a function with those of another, bit for bit; see `assert_same`."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    assert_same(
        results(function, tensors, **options),
        results(plain, tensors, **options),
        lambda: results(plain, exact, **options),
    )


# --- the operators


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch 2.15 looks at it itself
@pytest.mark.parametrize(
    ("options", "kv_heads", "dtype"),
    [
        (DENSE, 4, torch.float32),
        (
            DENSE._replace(
                segment_lengths=[6, 0], dilation_rates=[2, 3], head_offsets="blocked",
                zero_keys=True, scale=0.3, exchange="ring", workspace=0.1,
            ),
            2,
            torch.float64,
        ),
        (
            DENSE._replace(
                segment_lengths=[5, 9], dilation_rates=[7, 1], head_branches="split",
                is_causal=True, layout=[2, 9, 21, 0, 9], backend="eager",
            ),
            2,
            torch.bfloat16,
        ),
    ],
)  # fmt: skip
def test_the_operators_are_what_torch_expects(options, kv_heads, dtype):
    options = options._replace(num_kv_heads=kv_heads)
    tensors = leaves(21, kv_heads=kv_heads, dtype=dtype)
    measured = torch.tensor([21, 8]) if options.zero_keys else None
    borders = torch.tensor([0, 5, 21]) if options.zero_keys else None
    sink = torch.ones(4, requires_grad=True) if options.zero_keys else None
    opcheck(FORWARD, (*tensors, sink, measured, borders, *options))
    inputs = [x.detach() for x in tensors]
    sink = None if sink is None else sink.detach()
    out, lse, identity, _ = FORWARD(*inputs, sink, measured, borders, *options)
    for dlse in (None, torch.ones_like(lse)):
        given = torch.ones_like(out), dlse, *inputs, out, lse, identity, sink, measured, borders
        opcheck(operator.BACKWARD, (*given, *options))
    inputs[0] = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)  # results are contiguous
    opcheck(FORWARD, (*inputs, sink, measured, borders, *options))


def test_the_operator_of_masks_is_what_torch_expects():
    mask = torch.arange(9) >= torch.tensor([9, 0, 4])[:, None]
    for layout in ([], list(SequenceLayout.zigzag(9, 1).flat)):
        opcheck(LENGTHS, (mask, layout, ""))
        assert LENGTHS(mask, layout, "").tolist() == [9, 0, 4]


def test_an_exchange_that_only_autograd_keeps():
    class Other:
        def __init__(self, ends):
            self.rank, self.world_size, self.sent_bytes = ends.rank, ends.world_size, 0
            self.start, self.begin = ends.start, ends.begin
            self.share, self.calls = ends.share, ends.calls

    def rank(ends):
        def briefly(*tensors):
            return attention(*tensors, group=Other(ends))

        check_same(briefly, partial(attention, group=ends), leaves(10))

    run_loopback(2, rank)


# --- torch.compile


def compiled(function, backend="aot_eager", **options):
    """The compiled function, and a counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def test_one_graph_for_all_lengths():
    function, counter = compiled(attention)
    for length in (40, 41, 77, 9, 300):
        check_same(function, attention, leaves(length))
        # The first length is taken for a constant, the second shows that it is not.
        assert counter.frame_count == min(2, 1 + (length != 40))


def test_layouts_of_all_lengths_share_graphs():
    function, counter = compiled(attention)
    for length in (40, 46, 52, 58, 70):
        layout = SequenceLayout([[(length // 2, length), (0, length // 2)]])
        check_same(function, attention, leaves(length), layout=layout)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 2},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"pattern": DilatedPattern([9, 17], [2, 5], head_branches="split")},
        {"pattern": DilatedPattern([30], [4], head_offsets="blocked"), "scale": 0.2},
        {"exchange": "gather", "backend": "eager"},
        {"branch_gradients": "detached"},
    ],
)
def test_options_compile(changes):
    function, _ = compiled(attention, dynamic=True)
    shape = {name: changes.pop(name) for name in ("kv_heads", "dtype") if name in changes}
    check_same(function, attention, leaves(31, **shape), **changes)


def test_autocast_casts_in_graphs_too():
    function, _ = compiled(attention)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(*leaves(20))[0].dtype == torch.bfloat16
        check_same(function, attention, leaves(20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": SequenceLayout.contiguous(7, 1)}, "gives rank 0 a shard of 7 positions"),
        ({"backend": "flash"}, "backend='flash' cannot compute this attention"),
    ],
)
def test_what_the_operator_refuses_is_refused_in_graphs(changes, message):
    function, _ = compiled(attention)
    with pytest.raises(ValueError, match=message):
        function(*leaves(20), **changes)


def test_what_the_function_refuses_does_not_compile():
    function, _ = compiled(partial(attention, exchange="mail"))
    said = "exchange must be one of|Observed exception"  # torch 2.8 does not say why
    with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        function(*leaves(20))


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    def function(x, weight):
        query, key, value = (x @ weight).unflatten(-1, (3, 4, 16)).unbind(2)
        return dilated_attention(query.sin(), key, value.relu(), PATTERN).flatten(2) * x[..., :64]

    compiled_function = torch.compile(function, fullgraph=True, dynamic=True)
    weight = torch.randn(64, 192, requires_grad=True)
    for length in (40, 53):
        x = torch.randn(2, length, 64)
        outcomes = []
        for call in (function, compiled_function):
            out = call(x, weight)
            outcomes.append([out, *torch.autograd.grad(out.square().sum(), weight)])
        for a, b in zip(*outcomes, strict=True):
            assert relative_error(b.detach(), a.detach()) < FLOAT32


def masked(query, mask, *, layers=3, **options):
    """As in a model: each layer is given the same mask."""
    for _ in range(layers):
        query = dilated_attention(query, query, query, PATTERN, key_padding_mask=mask, **options)
        query = torch.nn.functional.gelu(query)
    return query


def mask_of(lengths, total):
    return torch.arange(total) >= torch.tensor(lengths)[:, None]


def test_masks_compile():
    """In one graph, which asks once what is in the mask; other masks need no other graph."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    function = torch.compile(
        masked,
        backend=aot_autograd(
            fw_compiler=backend,
            bw_compiler=backend,
            partition_fn=min_cut_rematerialization_partition,  # inductor's
        ),
        fullgraph=True,
    )
    query, _, _ = leaves(40)

    def results_of(call, query, mask):
        out = call(query, mask)
        return [out, *torch.autograd.grad(out.square().sum(), query)]

    for lengths in ([40, 40], [13, 40], [0, 7]):
        mask = mask_of(lengths, 40)
        got, want = (results_of(call, query, mask) for call in (function, masked))
        exact = query.detach().double().requires_grad_()
        assert_same(got, want, partial(results_of, masked, exact, mask))
    forward, backward = graphs
    asks = "ring_dilated_attention.lengths_of_mask.default"
    assert [forward.count(asks), backward.count(asks)] == [1, 0]
    with pytest.raises(ValueError, match="must be a right padding"):
        function(query, ~mask_of([3, 9], 40))


def _masks(rank, world_size):
    errors, layout = [], SequenceLayout.zigzag(37, world_size)
    (query, _, _), (function, _) = leaves(37), compiled(masked)
    for lengths in ([37, 20], [3, 0]):
        mask = mask_of(lengths, 37)
        shard = layout.shard(query.detach(), rank, 1).requires_grad_()
        options = {"group": dist.group.WORLD, "layout": layout}
        found = []
        for call in (masked, function):
            out = call(shard, layout.shard(mask, rank, 1), **options)
            found.append([out, *torch.autograd.grad(out.square().sum(), shard)])
        whole = masked(query, mask)
        (gradient,) = torch.autograd.grad(whole.square().sum(), query)
        found.append([layout.shard(x, rank, 1) for x in (whole, gradient)])
        *tried, want = found
        errors += [relative_error(a, b) for x in tried for a, b in zip(x, want, strict=True)]
    # One rank makes another call than the others.
    mask = layout.shard(mask_of([37, 20], 37), rank, 1)
    try:
        if rank:
            function(shard, mask, **options)
        else:
            attention(shard, shard, shard, **options)
        text = ""
    except ExchangeError as error:
        text = str(error)
    return errors, text


def test_masks_compile_on_ranks():
    for errors, text in run_ranks(_masks, 3):
        assert max(errors) < FLOAT32
        assert "ranks are in different calls" in text
        assert "key_padding_mask" in text


def _groups(rank, world_size):
    """Process groups and meshes are names in the graph; the ranks agree when it runs."""
    errors = []
    layout = SequenceLayout.zigzag(26 * world_size, world_size)
    calls = [(20, {}), (21, {}), (40, {}), (26, {"layout": layout})]
    ways = (
        (dist.group.WORLD, "auto", 4),
        (dist.group.WORLD, "heads", 4),
        (init_device_mesh("cpu", (world_size,)), "auto", 2),
    )
    for group, exchange, count in ways:
        torch._dynamo.reset()
        grouped = partial(attention, group=group, exchange=exchange)
        function, counter = compiled(grouped)
        for length, options in calls[:count]:
            got = results(function, leaves(length), **options)
            want = results(grouped, leaves(length), **options)
            errors += [relative_error(a, b) for a, b in zip(got, want, strict=True)]
        assert counter.frame_count == min(3, count)
        with pytest.raises(ValueError, match="on different ranks"):
            function(*leaves(20 + rank))
    return errors


def test_process_groups_compile():
    for errors in run_ranks(_groups, 2):
        assert max(errors) < FLOAT32
        # Of the first length, which is no symbol: by heads, as eager.
        assert BITS_MAY_DIFFER or not any(errors[:5])
        assert any(errors[5:10])  # of a symbol: ring or gather, which add up in another order


# --- on CUDA devices


def gpu_case(length):
    return leaves(length, kv_heads=2, dtype=torch.bfloat16, device="cuda")


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a.detach(), b.detach()) < rounding_bound(torch.bfloat16)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "efficient", "eager"])
def test_cuda_graph(backend, backward):
    """Captured once, replayed on fresh data that is copied into the captured inputs."""
    static = gpu_case(1000)

    def step(tensors):
        if backward:
            return results(attention, tensors, backend=backend)
        with torch.no_grad():
            return attention(*tensors, backend=backend)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = [torch.randn_like(x).requires_grad_() for x in static]
        with torch.no_grad():
            for x, y in zip(static, fresh, strict=True):
                x.copy_(y)
        graph.replay()
        assert_close(captured, step(fresh))


def test_several_ranks_cannot_be_captured(monkeypatch):
    """Neither what they agree on first, nor backward by itself; on GPUs: test_gpu_ranks."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda, tensor = torch.device("cuda"), torch.zeros(1)
    monkeypatch.setattr(
        operator, "refuse_capture", lambda name, ends, device: refuse_capture(name, ends, cuda)
    )
    refused = "on 2 ranks cannot be captured in a CUDA graph"

    def rank(ends):
        with pytest.raises(RuntimeError, match=f"LongNet {refused}"):
            agree("LongNet", ends, {}, None, cuda)
        agree("LongNet", ends, {}, None, torch.device("cpu"))
        options = DENSE._replace(group=group_name(ends))
        with pytest.raises(RuntimeError, match=f"dilated_attention {refused}"):
            operator.BACKWARD(tensor, None, *[tensor] * 6, None, None, None, *options)

    run_loopback(2, rank)
    run_loopback(1, lambda ends: agree("LongNet", ends, {}, None, cuda))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # inductor warms up with one
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_on_cuda(mode):
    """With ``reduce-overhead``, inductor captures CUDA graphs by itself."""
    counters.clear()
    function = torch.compile(attention, fullgraph=True, mode=mode)
    for length in (256, 256, 256, 300, 300):
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(results(function, gpu_case(length)), results(attention, gpu_case(length)))
    assert not counters["inductor"]["cudagraph_skips"]


for _test in (test_cuda_graph, test_inductor_on_cuda):
    for _mark in GPU_MARKS:
        _mark(_test)
