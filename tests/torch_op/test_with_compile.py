"""torch.compile of models on ranks, of documents in tensors, and behind graph breaks."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.small_models import SHAPE
from support.tolerances import FLOAT32, FLOAT64
from torch._dynamo.testing import CompileCounterWithBackend

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.nn import (
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    SlideEncoder,
    SlideEncoderConfig,
)

pytestmark = [
    pytest.mark.xdist_group("with_compile"),  # its fixture is made once
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # the compiler's own
]

PATTERN = DilatedPattern([8, 24, None], [1, 2, 4])
BRANCHES = {"segment_lengths": (6, None), "dilation_rates": (1, 3)}
ONE_LAYER: dict[str, Any] = {**SHAPE, **BRANCHES, "num_layers": 1}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def outcome(model, loss):
    """The loss and all gradients, one after another."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([x.flatten() for x in (loss.detach(), *gradients)])


# --- models on ranks


def language_model(checkpoint):
    torch.manual_seed(0)
    return LongNet(LongNetConfig(**ONE_LAYER), checkpoint=checkpoint).double()


def _language_model(rank, world_size, group, checkpoint):
    """Compiled in one graph on ranks whose group has made no call, against one process."""
    model, errors = language_model(checkpoint), []
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.loss, backend=counter, fullgraph=True)
    for length in (37, 40) if checkpoint == "keep_attention" else (37,):
        layout = SequenceLayout.zigzag(length, world_size)
        tokens = torch.arange(2 * length).view(2, length) % 256
        labels = tokens.roll(-1, 1)
        shards = [layout.shard(x, rank, 1) for x in (tokens, labels)]
        documents = torch.tensor([0, length // 3, length])
        options = {"group": group, "layout": layout, "documents": documents}
        got = outcome(model, compiled(*shards, **options))
        dist.all_reduce(got)
        want = outcome(model, model.loss(tokens, labels, documents=documents))
        errors.append(relative_error(got, want))
    return errors, counter.frame_count


def slides():
    torch.manual_seed(0)
    config = SlideEncoderConfig(in_dim=8, **ONE_LAYER)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 36, 8, generator=generator, dtype=torch.float64)
    where = torch.rand(2, 36, 2, generator=generator, dtype=torch.float64) * 1000
    return SlideEncoder(config).double(), features, where


def _slide_encoder(rank, world_size, group, lengths):
    model, features, where = slides()
    layout = SequenceLayout.zigzag(37, world_size)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    own = layout.positions(rank)
    tiles = own[own > 0] - 1
    given = {"group": group, "layout": layout, "lengths": lengths}
    out = compiled(features[:, tiles], where[:, tiles], **given)
    got = outcome(model, out.cls.sin().sum() + out.tiles.sin().sum())
    dist.all_reduce(got)
    whole = model(features, where, lengths=lengths)
    want = outcome(model, whole.cls.sin().sum() + whole.tiles.sin().sum())
    apart = relative_error(out.tiles.detach(), whole.tiles[:, tiles].detach())
    return relative_error(got, want), apart


def _packed(rank, world_size, group):
    """Slides of 5, 0 and 31 tiles, whose class tokens are positions 0, 6 and 7."""
    model, features, where = slides()
    documents, layout = [0, 5, 5, 36], SequenceLayout.zigzag(39, world_size)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    held = layout.positions(rank).tolist()
    tiles = [p - 1 if p < 6 else p - 3 for p in held if p not in (0, 6, 7)]
    whole = model(features[:1], where[:1], documents=documents)
    given = {"documents": documents, "group": group, "layout": layout}
    out = compiled(features[:1, tiles], where[:1, tiles], **given)
    got = outcome(model, out.cls.sin().sum() + out.tiles.sin().sum())
    dist.all_reduce(got)
    want = outcome(model, whole.cls.sin().sum() + whole.tiles.sin().sum())
    apart = relative_error(out.tiles.detach(), whole.tiles[:, tiles].detach())
    return relative_error(got, want), apart


def _refused(rank, world_size, group):
    model = language_model("none")
    compiled = torch.compile(model.loss, backend="aot_eager")
    tokens = torch.arange(2 * 20).view(2, 20)
    labels = tokens if rank == 0 else tokens[:, :3]
    try:
        compiled(tokens, labels, group=group)
    except ValueError as error:
        return str(error)
    return ""


CHECKPOINTS = ["keep_attention", "none", "full"]
LENGTHS = {"whole": None, "lengths": torch.tensor([36, 11])}


def _on_ranks(rank, world_size):
    """What each finds; in one process for all, whose compiler takes seconds to import."""
    calls: dict[str, Any] = {
        **{name: partial(_language_model, checkpoint=name) for name in CHECKPOINTS},
        **{name: partial(_slide_encoder, lengths=lengths) for name, lengths in LENGTHS.items()},
        "packed": _packed,
        "refused": _refused,
    }
    found = {}
    for name, call in calls.items():
        torch._dynamo.reset()
        found[name] = call(rank, world_size, dist.new_group())
    return found


@pytest.fixture(scope="module")
def on_ranks():
    return run_ranks(_on_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_language_model_compiles_on_ranks(checkpoint, on_ranks):
    """compile(LongNet) on a fresh group, ``fullgraph=True``, with documents in a tensor."""
    for rank in on_ranks:
        errors, graphs = rank[checkpoint]
        assert max(errors) < FLOAT64
        assert graphs == len(errors)  # one for the first length, and one for any


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [*LENGTHS, "packed"])
def test_a_slide_encoder_compiles_on_ranks(lengths, on_ranks):
    """One rank has the class token, the others none; lengths of slides in a tensor; a pack."""
    for rank in on_ranks:
        assert max(rank[lengths]) < FLOAT64


@pytest.mark.slow
def test_packs_compile_once():
    """With borders and tile sizes in tensors, whatever they are and however many."""
    model, features, where = slides()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for documents in ([0, 5, 5, 36], [0, 7, 20], [0, 1, 2, 3, 30]):
        given = features[:1, : documents[-1]], where[:1, : documents[-1]]
        sizes = torch.linspace(100, 300, len(documents) - 1)
        out = compiled(*given, documents=torch.tensor(documents), tile_size=sizes)
        want = model(*given, documents=documents, tile_size=sizes.tolist())
        assert relative_error(out.tiles, want.tiles) < FLOAT64
        both = [outcome(model, x.cls.sin().sum()) for x in (out, want)]
        assert relative_error(*both) < FLOAT64
    assert counter.frame_count == 2


def test_packs_compile_as_they_are_made():
    """Their borders and tile sizes are tuples of numbers."""
    model, features, where = slides()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for documents in ((0, 5, 14, 36), (0, 7, 20)):
        given = features[:1, : documents[-1]], where[:1, : documents[-1]]
        numbers = {"documents": documents, "tile_size": (256.0,) * (len(documents) - 1)}
        found, want = (x(*given, **numbers).cls for x in (compiled, model))
        assert relative_error(found.detach(), want.detach()) < FLOAT64


@pytest.mark.slow
def test_what_one_rank_refuses_is_an_error_on_every_rank(on_ranks):
    """A compiled rank waits in its graph for one that does not get that far."""
    first, second = (rank["refused"] for rank in on_ranks)
    assert "was refused on other ranks: rank 1: ValueError: labels must have the shape" in first
    assert second.startswith("labels must have the shape of tokens")


# --- documents and lengths in tensors


def attend(query, mask=None, *, documents=None, lengths=None):
    """As in a model: each layer is given the same."""
    for _ in range(2):
        query = dilated_attention(
            query, query, query, PATTERN, is_causal=True,
            documents=documents, lengths=lengths, key_padding_mask=mask,
        ).sin()  # fmt: skip
    return query


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"documents": [0, 7, 40]}, {"documents": [0, 3, 11, 39, 40]}),
        ({"lengths": [3, 40]}, {"lengths": [40, 0]}),
        ({"lengths": [3, 40], "documents": [0, 11, 40]}, {"lengths": [7, 8], "documents": [0, 9]}),
    ],
)
@pytest.mark.parametrize("as_tensors", [True, False])
def test_numbers_compile(first, second, as_tensors):
    """The numbers of tensors are not known when it traces; one graph serves all of them."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    query = torch.randn(2, 40, 4, 8, requires_grad=True)
    for options in (first, second):
        given = options
        if as_tensors:
            given = {name: torch.tensor(numbers) for name, numbers in options.items()}
            for tensor in given.values():
                torch._dynamo.mark_dynamic(tensor, 0)
        out, want = compiled(query, **given), attend(query, **options)
        assert torch.equal(out, want)
        both = [torch.autograd.grad(x.square().sum(), query)[0] for x in (out, want)]
        assert torch.equal(*both)
    assert counter.frame_count == 1 or not as_tensors


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"documents": torch.tensor([0, 41])}, ValueError, "documents must rise from 0"),
        ({"lengths": torch.tensor([41, 3])}, ValueError, "lengths must lie in .0, 40."),
        ({"documents": torch.ones(2)}, None, "documents must be int32 or int64"),
        ({"lengths": torch.tensor([[3, 40]])}, None, "lengths must be 1-D"),
        ({"documents": torch.empty(0, dtype=torch.int64)}, None, "documents must not be empty"),
    ],
)
def test_wrong_tensors_are_refused(options, kind, message):
    """Wrong numbers when the graph runs, wrong shapes and dtypes when it is traced."""
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with pytest.raises(kind or torch._dynamo.exc.Unsupported, match=message):
        compiled(torch.randn(2, 40, 4, 8), **options)


def test_documents_in_a_tensor_are_exported():
    class Attention(torch.nn.Module):
        def forward(self, query, documents):
            return attend(query, documents=documents)

    query = torch.randn(1, 40, 4, 8)
    count = {0: torch.export.Dim("count", min=2, max=100)}
    program = torch.export.export(
        Attention(), (query, torch.tensor([0, 9, 40])), dynamic_shapes=(None, count)
    )
    got = program.module()(query, torch.tensor([0, 5, 17, 40]))
    assert torch.equal(got, attend(query, documents=[0, 5, 17, 40]))


# --- graph breaks


class Layers(torch.nn.Module):
    """As torchscale's encoders: with a mask, whose numbers decide something."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            MultiheadDilatedAttention(32, 4, segment_lengths=[8, None], dilation_rates=[1, 2])
            for _ in range(2)
        )

    def forward(self, x, mask):
        for layer in self.layers:
            if mask[:, 0].any():  # dynamo leaves the graph, and its frame
                x = x * 2
            x = x + layer(x, x, x, key_padding_mask=mask)[0]
        return x


def _alone(x, mask, model):
    """A frame that torch.compile leaves alone, and what it calls not."""
    return model(x, mask)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("leaves_frame", [False, True])
def test_behind_a_graph_break_no_operator_is_traced(leaves_frame):
    """Compile torchscale's encoder with replaced modules: the model itself breaks the graph."""
    seen: list[str] = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.manual_seed(0)
    model = Layers()
    call = torch._dynamo.disable(_alone, recursive=False) if leaves_frame else _alone
    compiled = torch.compile(lambda x, mask: call(x, mask, model), backend=backend)
    x, mask = torch.randn(2, 20, 32), torch.arange(20) >= torch.tensor([[20], [7]])
    outcomes = []
    for function in (compiled, lambda x, mask: model(x, mask)):
        out = function(x, mask)
        outcomes.append(outcome(model, out.square().sum()))
    assert relative_error(*outcomes) < FLOAT32
    inside = ("logsumexp", "softmax", "scaled_dot_product", "baddbmm", "index_add", "empty")
    assert not [name for name in seen if any(word in name for word in inside)], seen
