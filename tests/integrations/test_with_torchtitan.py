"""torchtitan's models with dilated attention: by a stand-in of its interface, and by itself."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import torchtitan_standin as standin
from support.bounds import EXACT

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.exchange import run_loopback

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_llama.py"
PATTERN = DilatedPattern([8, None], [1, 3])
LENGTH = 48
STARTS = [0, 20, 21]
BORDERS = [*STARTS, LENGTH]
POSITIONS = torch.cat([torch.arange(b - a) for a, b in pairwise(BORDERS)])


@pytest.fixture(scope="module")
def titan() -> Iterator[Any]:
    with standin.installed() as integration:
        yield integration


def spec_of(titan: Any, pattern: Any = PATTERN, **options: Any) -> Any:
    attention = standin.GQAttention.Config(
        n_heads=4, n_kv_heads=2, head_dim=8, inner_attention=None
    )
    layers = [standin.Layer(attention=attention) for _ in range(2)]
    model = standin.Decoder.Config(layers=layers)
    spec = standin.ModelSpec(model, standin.parallelize)
    return titan.with_dilated_attention(spec, pattern, **options)


def parallelized(
    spec: Any, model: Any, dims: Any, balancer: str | None = "headtail", *, graphs: bool = False
) -> Any:
    return spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=SimpleNamespace(disable_cuda_graphs=not graphs),
        parallelism=SimpleNamespace(context_parallel_load_balancer=balancer),
    )


@pytest.fixture
def model(titan: Any) -> Any:
    torch.manual_seed(0)
    return spec_of(titan).model.build().double()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(1))


def gradients(model: Any, out: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """Of a loss that weighs every position of the whole sequence in another way."""
    weights = torch.linspace(-1, 1, LENGTH, dtype=out.dtype)[positions, None]
    return list(torch.autograd.grad((out * out * weights).sum(), list(model.parameters())))


def test_documents_are_those_of_the_positions(titan: Any, model: Any, tokens: Any) -> None:
    """A decoder on one process against the definition, written out."""
    model = parallelized(spec_of(titan), model, standin.ParallelDims())
    h = model.embedding(tokens)
    for layer in model.layers:
        q, k, v = (w(h).view(1, LENGTH, -1, 8) for w in (layer.wq, layer.wk, layer.wv))
        out, _ = reference_attention(q, k, v, PATTERN, is_causal=True, documents=BORDERS)
        h = h + out[0].flatten(1)
    assert relative_error(model(tokens, POSITIONS), h) < EXACT
    assert relative_error(model(tokens, positions=POSITIONS), h) < EXACT
    whole = model(tokens, torch.arange(LENGTH))
    assert relative_error(whole, h) > 1e-3  # the documents do matter


def test_torchtitan_of_pypi_is_refused(titan: Any, monkeypatch: Any) -> None:
    """Its tokens have a batch dimension."""
    monkeypatch.setattr(titan, "TrainingConfig", type("TrainingConfig", (), {"seq_len": 2048}))
    with pytest.raises(ImportError, match="main of 2026-08-21 or newer"):
        spec_of(titan)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("balancer", ["headtail", None])
@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_context_parallel_ranks_are_as_one_process(
    titan: Any, model: Any, tokens: Any, ranks: int, balancer: str | None, exchange: str
) -> None:
    """Keys and values stay sharded: out and gradients against one process, in float64."""
    alone = parallelized(spec_of(titan), copy.deepcopy(model), standin.ParallelDims())
    want = alone(tokens, POSITIONS)
    expected = gradients(alone, want, torch.arange(LENGTH))
    kind = SequenceLayout.zigzag if balancer else SequenceLayout.contiguous
    layout = kind(LENGTH, ranks)
    state = model.state_dict()

    def rank(ends: Any) -> Any:
        spec = spec_of(titan, exchange=exchange)
        own = spec.model.build().double()
        own.load_state_dict(state)
        own = parallelized(spec, own, standin.ParallelDims(cp=ranks, group=ends), balancer)
        shard = [layout.shard(x, ends.rank, dim=0) for x in (tokens, POSITIONS)]
        out = own(*shard)
        at = layout.positions(ends.rank)
        return relative_error(out, want[at]), gradients(own, out, at)

    found = run_loopback(ranks, rank)
    assert max(error for error, _ in found) < EXACT
    for index, gradient in enumerate(expected):
        assert relative_error(sum(own[index] for _, own in found), gradient) < EXACT


def test_tensor_parallel_ranks_compute_their_heads(titan: Any) -> None:
    """Rates that do not divide the local heads: local head numbers would give other keys."""
    q, k, v = torch.randn(3, LENGTH, 4, 8, dtype=torch.float64).unbind(0)
    pattern = DilatedPattern([8, None], [1, 4])
    inner = titan.DilatedInnerAttention
    config = inner.Config(pattern=pattern, num_kv_heads=4)
    packed = titan.PackedTokens(documents=torch.tensor(BORDERS), layout=None)
    want, _ = reference_attention(
        q[None], k[None], v[None], pattern, is_causal=True, documents=BORDERS
    )
    for rank in range(2):
        own = config.build()
        own.parallelize(standin.ParallelDims(tp=2, tp_rank=rank))
        heads = slice(2 * rank, 2 * rank + 2)
        out = own(q[:, heads], k[:, heads], v[:, heads], attention_masks=packed)
        assert relative_error(out, want[0, :, heads]) < EXACT


def test_another_layout_than_the_load_balancers_is_refused(
    titan: Any, model: Any, tokens: Any
) -> None:
    layout = SequenceLayout.contiguous(LENGTH, 2)  # and not head and tail
    state = model.state_dict()

    def rank(ends: Any) -> str:
        spec = spec_of(titan)
        own = spec.model.build().double()
        own.load_state_dict(state)
        own = parallelized(spec, own, standin.ParallelDims(cp=2, group=ends))
        with pytest.raises(ValueError, match="positions") as error:
            own(*(layout.shard(x, ends.rank, dim=0) for x in (tokens, POSITIONS)))
        return str(error.value)

    for text in run_loopback(2, rank):
        assert "positions must count up from 0 in every document" in text


def test_what_is_not_supported_is_refused(
    titan: Any, model: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, dims = spec_of(titan), standin.ParallelDims
    for given, balancer, message in (
        (dims(cp=2), "ptrr", "load_balancer 'headtail' or None; got 'ptrr'"),
        (dims(pp=2), None, "pipeline_parallel_degree 1; got 2"),
        (dims(tp=2, spmd_backend="partial_dtensor"), None, "'spmd_types'; got 'partial_dtensor'"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelized(spec, model, given, balancer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="needs disable_cuda_graphs True; got False"):
        parallelized(spec, model, dims(), graphs=True)
    with pytest.raises(TypeError, match="pattern must be a DilatedPattern"):
        spec_of(titan, pattern="longnet")
    with pytest.raises(ValueError, match="backend must be one of"):
        spec_of(titan, backend="flex")
    spec.model.layers[1].attention = object()
    with pytest.raises(ValueError, match=r"layers\[1\].attention must be a GQAttention.Config"):
        titan.with_dilated_attention(spec, PATTERN)
    bare = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"with_dilated_attention passes on; got .* NoneType"):
        bare(tokens, POSITIONS)
    model = parallelized(spec_of(titan), model, standin.ParallelDims())
    with pytest.raises(ValueError, match="takes tokens and positions"):
        model(tokens)
    with pytest.raises(ValueError, match="attention_masks must be left out"):
        model(tokens, POSITIONS, attention_masks=object())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan")
def test_torchtitans_llama_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
