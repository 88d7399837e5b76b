"""Generation on a GPU: half precision, CUDA graphs, long caches; skipped where there is none."""

import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.tolerances import TOLERANCE

import ring_dilated_attention
from ring_dilated_attention import DilatedKVCache, DilatedPattern, replicated_query_attention
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.decode import CapturedStep
from ring_dilated_attention.nn import LongNet, LongNetConfig

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
attend: Any = ring_dilated_attention.cached_attention
LONGNET = DilatedPattern([64, 128, 256], [1, 2, 6])


def inputs(length, *, heads=8, kv_heads=2, head_dim=64, batch=2, dtype=torch.bfloat16):
    torch.manual_seed(0)
    query = torch.randn(batch, length, heads, head_dim, device="cuda", dtype=dtype)
    key, value = torch.randn(
        2, batch, length, kv_heads, head_dim, device="cuda", dtype=dtype
    ).unbind(0)
    return query, key, value


def filled(pattern, tensors, prompt, **options):
    _, key, value = tensors
    batch, length, kv_heads, head_dim = key.shape
    options = {"max_length": length, **options}
    cache = DilatedKVCache(
        pattern, batch, kv_heads, head_dim, dtype=key.dtype, device="cuda", **options
    )
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    cache.prefill(key[:, :prompt], value[:, :prompt])
    return cache


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((head_dim, torch.bfloat16) for head_dim in (24, 48, 64, 96, 128, 256)),
        *((head_dim, dtype) for head_dim in (64, 128) for dtype in (torch.float16, torch.float32)),
    ],
)
def test_steps_are_rows_of_the_full_forward(head_dim, dtype):
    tensors = inputs(900, head_dim=head_dim, dtype=dtype)
    plain: Any = reference_attention
    for pattern in (DilatedPattern.dense(), LONGNET):
        want, _ = plain(*(x.double() for x in tensors), pattern, is_causal=True)
        for count in (1, 5, 64):
            cache = filled(pattern, tensors, 700)
            for first in range(700, 701 + 2 * count, count):
                rows = slice(first, first + count)
                out = attend(*(x[:, rows] for x in tensors), cache)
                assert out.dtype == dtype
                hidden = (want[:, rows] == 0).all(-1)
                assert (out[hidden] == 0).all()
                assert relative_error(out.double(), want[:, rows]) < TOLERANCE[dtype], (
                    pattern,
                    count,
                )


@pytest.mark.parametrize("count", [1, 3])
def test_a_captured_step_goes_on_while_the_cache_grows(count):
    pattern = DilatedPattern([64, 128, None], [1, 2, 4])
    tensors = inputs(1200)
    cache = filled(pattern, tensors, 500, max_rewind=count - 1)
    twin = deepcopy(cache)
    new = [x[:, 500 : 500 + count].clone() for x in tensors]

    def step(query):
        return attend(query, new[1], new[2], cache)

    captured = CapturedStep(step, new[0], [cache])
    assert cache.known_lengths == (500, 500)
    for first in range(500, 500 + 200 * count, count):
        rows = [x[:, first : first + count] for x in tensors]
        new[1].copy_(rows[1])
        new[2].copy_(rows[2])
        got = captured(rows[0])
        assert torch.equal(got, attend(*rows, twin))
    assert cache.lengths.tolist() == list(cache.known_lengths) == [500 + 200 * count] * 2
    if count > 1:
        cache.rewind(count - 1)
        twin.rewind(count - 1)
        first = cache.known_lengths[0]
        rows = [x[:, first : first + count] for x in tensors]
        new[1].copy_(rows[1])
        new[2].copy_(rows[2])
        assert torch.equal(captured(rows[0]), attend(*rows, twin))


def test_a_captured_step_is_refused_where_it_could_be_wrong():
    tensors = inputs(100)
    cache = filled(LONGNET, tensors, 50, max_length=52)
    new = [x[:, 50:51] for x in tensors]
    three = [x[:, 50:53] for x in tensors]

    def step(query):
        return attend(query, new[1], new[2], cache)

    with pytest.raises(ValueError, match="max_rewind=1 at least; got 0"):
        CapturedStep(
            lambda q: attend(q, three[1][:, :2], three[2][:, :2], cache), three[0][:, :2], [cache]
        )
    with pytest.raises(ValueError, match="to every cache once"):
        CapturedStep(lambda query: query, new[0], [cache])
    captured = CapturedStep(step, new[0], [cache])
    captured(new[0])
    captured(new[0])
    with pytest.raises(ValueError, match="has room for max_length=52"):
        captured(new[0])
    with pytest.raises(ValueError, match=r"captured for torch\.bfloat16"):
        captured(three[0])
    cache.reserve(1000)
    with pytest.raises(ValueError, match="capture the step again"):
        captured(new[0])


@pytest.mark.parametrize(("dtype", "backend"), [(torch.float64, "auto"), (torch.bfloat16, "sdpa")])
def test_a_step_by_tiles_is_not_captured(dtype, backend):
    """They read positions on the host: a replay would repeat one."""
    tensors = inputs(100, dtype=dtype)
    cache = filled(LONGNET, tensors, 50)
    new = [x[:, 50:51] for x in tensors]

    def step(query):
        return attend(query, *new[1:], cache, backend=backend)

    with pytest.raises(RuntimeError, match="a CUDA graph would repeat these"):
        CapturedStep(step, new[0], [cache])
    assert cache.known_lengths == (50, 50)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="a CUDA graph would repeat these"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        step(new[0])


def test_a_model_in_float64_generates_without_a_graph():
    model = model_of(torch.float64)
    tokens = torch.randint(256, (1, 90), device="cuda")
    new = model.generate(tokens, 40)
    assert torch.equal(new, model.generate(tokens, 40, capture=False))
    with pytest.raises(ValueError, match="needs the decoding kernels"):
        model.generate(tokens, 40, capture=True)


def test_a_step_captured_under_autocast_outlives_it():
    model = model_of(torch.float32)
    tokens = torch.randint(256, (1, 300), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        caches = model.make_caches(1, max_length=400)
        model.prefill(tokens, caches)
        twins = deepcopy(caches)
        captured = CapturedStep(lambda new: model.step(new, caches), tokens[:, :1], caches)
    other = [torch.full((128, 512), torch.nan, device="cuda") for _ in range(50)]
    for position in range(50):
        token = tokens[:, position : position + 1]
        with torch.autocast("cuda", torch.bfloat16):
            want = model.step(token, twins)
        assert torch.equal(captured(token), want)
    del other


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_step_is_captured_on_a_device_that_is_not_the_current_one():
    tokens = torch.randint(256, (1, 90), device="cuda:0")
    model_of().generate(tokens, 40)  # captured on another device
    model = model_of().to("cuda:1")
    found = [model.generate(tokens.to("cuda:1"), 40, capture=capture) for capture in (True, False)]
    assert torch.equal(*found)


def test_a_graph_of_a_replicated_query_keeps_its_tables():
    """However many calls at other positions come after it."""
    query, key, value = inputs(3000, batch=1)
    pattern = DilatedPattern([64, 256, 1024, None], [1, 2, 4, 8])

    def call(position):
        rows = slice(position, position + 1)
        return replicated_query_attention(query[:, rows], key, value, pattern, position)

    want = call(1500)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call(1500)
    for position in range(3000):
        call(position)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = LongNetConfig(
        num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=2, ffn_dim=256,
        segment_lengths=[64, 128, None], dilation_rates=[1, 2, 4],
    )  # fmt: skip
    return LongNet(config).to("cuda", dtype)


def test_a_model_generates_what_its_forward_says():
    model = model_of(torch.float32)
    tokens = torch.randint(256, (2, 300), device="cuda")
    new = model.generate(tokens, 200)
    with torch.no_grad():
        logits = model(torch.cat([tokens, new], 1))[:, 299:-1]
    best = logits.gather(2, new.unsqueeze(2)).squeeze(2)
    assert (logits.amax(2) - best < 1e-3).all()


def test_generation_in_a_graph_draws_the_same_tokens():
    model = model_of()
    tokens = torch.randint(256, (2, 300), device="cuda")
    options: dict[str, Any] = {"lengths": [300, 170], "temperature": 0.9, "top_p": 0.95}
    found = [
        model.generate(tokens, 150, capture=capture, **options) for capture in (None, True, False)
    ]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def test_hooks_are_called_for_each_token():
    """So there is no graph: it would call them once."""
    model, called = model_of(), []
    model.blocks[0].register_forward_hook(lambda *_: called.append(1))
    tokens = torch.randint(256, (1, 30), device="cuda")
    model.generate(tokens, 40)
    assert len(called) == 40  # the prompt, and all tokens but the last
    with pytest.raises(ValueError, match="needs modules without hooks"):
        model.generate(tokens, 40, capture=True)


WAITS = """
import torch
from ring_dilated_attention.nn import LongNet, LongNetConfig
config = LongNetConfig(num_layers=1, embed_dim=64, num_heads=2, ffn_dim=64, segment_lengths=[64],
                       dilation_rates=[1])
class Waiting(torch.nn.LayerNorm):
    def forward(self, x):
        torch.cuda.synchronize()
        return super().forward(x)
model = LongNet(config)
model.blocks[0].mlp_norm = Waiting(64)
model = model.to("cuda", torch.bfloat16)
tokens = torch.zeros(1, 30, dtype=torch.int64, device="cuda")
assert model.generate(tokens, 40, capture=False).shape == (1, 40)
try:
    model.generate(tokens, 40)
except RuntimeError as error:
    assert "give capture=False" in str(error), error
else:
    raise AssertionError("was captured")
"""


def test_a_module_that_waits_for_the_device_cannot_be_captured():
    """In a process of its own: torch's generators stay as they are in a capture that fails."""
    subprocess.run([sys.executable, "-c", WAITS], check=True, timeout=300)


def test_nothing_is_compiled_after_the_first_steps():
    from ring_dilated_attention.kernels import decode
    from ring_dilated_attention.kernels.launch import Launcher

    tensors = inputs(1)
    cache = DilatedKVCache(LONGNET, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    launchers = [x for x in vars(decode).values() if isinstance(x, Launcher)]
    assert len(launchers) == 3
    for _ in range(50):
        attend(*tensors, cache)
    forms = [len(launcher.forms) for launcher in launchers]
    allocated = torch.cuda.memory_allocated()
    for _ in range(10_000):
        attend(*tensors, cache)
    assert forms == [len(launcher.forms) for launcher in launchers]
    assert torch.cuda.memory_allocated() <= allocated
    assert cache.nbytes == cache.plan.nbytes(2, 64, 2)
