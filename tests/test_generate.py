"""Generation: logits of every step are those of the full forward, and how tokens are drawn."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from generating import VOCABULARY, greedy, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import patterns
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.decode import DilatedKVCache
from ring_dilated_attention.exchange import Exchange, ExchangeError, run_loopback
from ring_dilated_attention.nn import (
    LongNet,
    RotaryEmbedding,
    Sampler,
)
from ring_dilated_attention.nn.row_step import RowStep
from ring_dilated_attention.plan import plan_cache

WORLD_SIZES = (1, 2, 3, 5)

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def generations(draw: st.DrawFn) -> dict[str, Any]:
    prompt, kv_heads, batch = (
        draw(st.integers(1, 80)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    world_size = draw(st.sampled_from(WORLD_SIZES))
    kind = draw(st.sampled_from(["contiguous", "zigzag"]))
    lengths = draw(st.none() | st.lists(st.integers(1, prompt), min_size=batch, max_size=batch))
    end = draw(st.integers(max(lengths), prompt)) if lengths else prompt
    inner = draw(st.sets(st.integers(1, prompt), max_size=3))
    return {
        "pattern": draw(patterns()),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 2)),
        "batch": batch,
        "prompt": prompt,
        "new": draw(st.lists(st.just(1) | st.integers(1, 60), min_size=1, max_size=8)),
        "world_size": world_size,
        "layout": SequenceLayout.named(kind, prompt, world_size, is_causal=True),
        "sharded": draw(st.booleans()),
        "lengths": lengths,
        "documents": draw(st.just(None) | st.just([0, *sorted(n for n in inner if n < end), end])),
        "chunk_rows": draw(st.none() | st.integers(1, 50)),
        "seed": draw(st.integers(0, 1000)),
    }


def model_of(case: dict[str, Any]) -> LongNet:
    pattern = case["pattern"]
    model = make_model(
        case["seed"],
        num_heads=case["heads"],
        num_kv_heads=case["kv_heads"],
        embed_dim=4 * case["heads"],
        segment_lengths=pattern.segment_lengths,
        dilation_rates=pattern.dilation_rates,
        head_offsets=pattern.head_offsets,
        head_branches=pattern.head_branches,
    )
    model.chunk_rows = case["chunk_rows"]
    return model


def last_document(case: dict[str, Any], row: int) -> range:
    """Positions of the document of a row of the batch that goes on."""
    length = case["lengths"][row] if case["lengths"] else case["prompt"]
    return range(max(n for n in case["documents"] or [0] if n < length), length)


def run_generation(
    case: dict[str, Any], model: LongNet, tokens: torch.Tensor, ends: Exchange
) -> list[torch.Tensor]:
    """Logits of the prompt's last position, and of each step."""
    caches = model.make_caches(
        case["batch"],
        max_length=case["prompt"] + sum(case["new"]),
        group=ends,
        sharded=case["sharded"],
    )
    for cache in caches:  # what nobody wrote is not to be read
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    shard = case["layout"].shard(tokens[:, : case["prompt"]], ends.rank, 1)
    options = {name: case[name] for name in ("lengths", "documents", "layout")}
    logits = [model.prefill(shard, caches, **options)[:, None]]
    starts = [case["prompt"]]
    for count in case["new"]:
        starts.append(starts[-1] + count)
    for first, stop in pairwise(starts):
        logits.append(model.step(tokens[:, first:stop], caches))
    assert not any(x.requires_grad for x in logits)
    return logits


@settings(max_examples=50, deadline=None)
@given(generations())
def test_logits_of_any_generation_are_those_of_the_full_forward(case: dict[str, Any]) -> None:
    model = model_of(case)
    tokens = torch.randint(VOCABULARY, (case["batch"], case["prompt"] + sum(case["new"])))
    by_rank = run_loopback(case["world_size"], partial(run_generation, case, model, tokens))
    for results in by_rank[1:]:
        assert all(map(torch.equal, results, by_rank[0]))
    got = torch.cat(by_rank[0], 1)
    with torch.no_grad():
        for row in range(case["batch"]):
            document = last_document(case, row)
            text = torch.cat(
                [tokens[row, document.start : document.stop], tokens[row, case["prompt"] :]]
            )
            want = model(text[None])[0, len(document) - 1 :]
            assert relative_error(got[row], want) < 1e-10


def test_three_hundred_positions_behind_a_prompt_of_prime_length() -> None:
    case: dict[str, Any] = {
        "batch": 2, "prompt": 211, "new": [1] * 150 + [37, 113], "sharded": True, "world_size": 3,
        "layout": SequenceLayout.zigzag(211, 3), "lengths": [211, 64], "documents": None,
    }  # fmt: skip
    model = make_model(head_offsets="blocked")
    tokens = torch.randint(VOCABULARY, (2, 511))
    got = torch.cat(run_loopback(3, partial(run_generation, case, model, tokens))[0], 1)
    with torch.no_grad():
        for row, length in enumerate(case["lengths"]):
            text = torch.cat([tokens[row, :length], tokens[row, 211:]])
            assert relative_error(got[row], model(text[None])[0, length - 1 :]) < 1e-10


def shift_vectors(model: LongNet) -> None:
    """Biases are 0 in a new model, and weights of norms are 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 3)


def row_step(model: LongNet, caches: list[DilatedKVCache]) -> RowStep:
    assert RowStep.fits(model, caches)
    return RowStep(model, caches, partial(model.step, caches=caches))


@settings(max_examples=100, deadline=None)
@given(generations())
def test_logits_of_a_row_token_by_token_are_those_of_the_full_forward(case: dict[str, Any]) -> None:
    model, prompt, count = model_of(case), case["prompt"], sum(case["new"])
    shift_vectors(model)
    tokens = torch.randint(VOCABULARY, (1, prompt + count))
    caches = model.make_caches(1, max_length=prompt + count)
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    got = [model.prefill(tokens[:, :prompt], caches)[:, None]]
    take = row_step(model, caches)
    with torch.inference_mode():
        got += [take(tokens[:, at : at + 1]) for at in range(prompt, prompt + count)]
        before = [cache.keys.clone() for cache in caches]
        with pytest.raises(ValueError, match="max_length"):
            take(tokens[:, :1])
        want = model(tokens)[:, prompt - 1 :]
    assert relative_error(torch.cat(got, 1), want) < 1e-10
    for cache, keys in zip(caches, before, strict=True):
        assert torch.equal(cache.keys.nan_to_num(), keys.nan_to_num())
        assert cache.known_lengths == (prompt + count,)
        assert cache.lengths.tolist() == [prompt + count]


def test_a_row_goes_on_behind_other_steps_and_under_autocast() -> None:
    """It holds no state of its own: caches may be written to in between."""
    model, text = make_model(), torch.randint(VOCABULARY, (1, 90))
    model.blocks[1].attention.scale = 0.3  # type: ignore[union-attr]
    caches = model.make_caches(1, max_length=90)
    model.prefill(text[:, :9], caches)
    take, got = row_step(model, caches), []
    with torch.inference_mode():
        for at in range(9, 90, 9):
            got += [take(text[:, at : at + 1]), model.step(text[:, at + 1 : at + 9], caches)]
        assert relative_error(torch.cat(got, 1), model(text)[:, 9:]) < 1e-10
    called = torch.zeros(1, 1, VOCABULARY)
    under = RowStep(model, caches, lambda tokens: called)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert under(text[:, :1]) is called


def test_a_row_goes_on_in_caches_that_were_taken_back_and_reserved() -> None:
    """The steps of positions to come are worked out ahead, and no longer hold."""
    model, text = make_model(), torch.randint(VOCABULARY, (1, 90))
    caches = model.make_caches(1, max_length=40, max_rewind=5)
    model.prefill(text[:, :9], caches)
    take = row_step(model, caches)
    with torch.inference_mode():
        got = [take(text[:, at : at + 1]) for at in range(9, 30)]
        for cache in caches:
            cache.rewind(5)
        for at in range(25, 30):
            assert relative_error(take(text[:, at : at + 1]), got[at - 9]) < 1e-10
        for cache in caches:
            cache.reserve(90)
        got += [take(text[:, at : at + 1]) for at in range(30, 90)]
        assert relative_error(torch.cat(got, 1), model(text)[:, 9:]) < 1e-10


def test_a_row_keeps_what_can_be_taken_back_when_it_begins() -> None:
    """Rows of the segment before are shown again to positions that are taken back."""
    model, text = make_model(segment_lengths=[8], dilation_rates=[1]), torch.randint(31, (1, 30))
    caches = model.make_caches(1, max_length=30, max_rewind=5)
    model.prefill(text[:, :16], caches)
    take = row_step(model, caches)
    with torch.inference_mode():
        take(text[:, 16:17])
        for cache in caches:
            cache.rewind(5)
        got = [take(text[:, at : at + 1]) for at in range(12, 30)]
        assert relative_error(torch.cat(got, 1), model(text)[:, 12:]) < 1e-10


def test_a_row_begins_behind_positions_that_were_taken_back() -> None:
    """A prompt does not write rows that only positions before those were shown."""
    model = make_model(segment_lengths=[5], dilation_rates=[2])
    text = torch.randint(VOCABULARY, (1, 30))
    caches = model.make_caches(1, max_length=30, max_rewind=1)
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    model.prefill(text[:, :16], caches)
    for cache in caches:
        cache.rewind(1)
    take = row_step(model, caches)
    with torch.inference_mode():
        got = [take(text[:, at : at + 1]) for at in range(15, 30)]
        assert relative_error(torch.cat(got, 1), model(text)[:, 15:]) < 1e-10


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_a_failed_step_overwrote_cannot_be_taken_back() -> None:
    model, text = make_model(segment_lengths=[8], dilation_rates=[1]), torch.randint(31, (1, 40))
    caches = model.make_caches(1, max_rewind=3)
    model.prefill(text[:, :16], caches)
    hook = model.norm.register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.step(text[:, 30:33], caches)
    hook.remove()
    with pytest.raises(ValueError, match="at most 1 positions of row 0 can be taken back"):
        caches[0].rewind(2)
    for cache in caches:
        cache.rewind(1)
    got = model.step(text[:, 15:40], caches)
    with torch.no_grad():
        assert relative_error(got, model(text)[:, 15:]) < 1e-10


def test_caches_are_empty_behind_a_prompt_that_failed() -> None:
    model, text = make_model(), torch.randint(VOCABULARY, (2, 10))
    caches = model.make_caches(1, max_length=20)
    model.prefill(text[:1], caches)
    hook = model.blocks[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.prefill(text[1:], caches)
    hook.remove()
    assert {cache.known_lengths for cache in caches} == {(0,)}
    assert [cache.lengths.item() for cache in caches] == [0] * len(caches)
    with torch.no_grad():
        assert relative_error(model.step(text[1:], caches), model(text[1:])) < 1e-10


class _ForbidsAll(LongNet):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden).masked_fill(torch.arange(VOCABULARY) > 1, -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_drawn_where_all_are_forbidden(temperature: float) -> None:
    model, allowed = _ForbidsAll(make_model().config), torch.arange(VOCABULARY) > 1
    with pytest.raises(ValueError, match="logits are not finite, or -inf for all"):
        model.generate(torch.tensor([[1]]), 2, temperature=temperature, allowed=allowed)


class _Allocated(TorchDispatchMode):
    """The most elements of a tensor that an operation returns, but for views."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view:
            self.most = max(self.most, found.numel())
        return found


def test_a_large_embedding_is_not_copied() -> None:
    model = make_model(vocab_size=20_000)
    text = torch.randint(20_000, (1, 12))
    caches = model.make_caches(1, max_length=12)
    model.prefill(text[:, :1], caches)
    with torch.inference_mode(), _Allocated() as seen:
        take = row_step(model, caches)
        got = [take(text[:, at : at + 1]) for at in range(1, 12)]
    assert seen.most <= 20_000
    with torch.no_grad():
        assert relative_error(torch.cat(got, 1), model(text)[:, 1:]) < 1e-10


def test_one_token_needs_no_copy_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = make_model(), torch.tensor([[1, 2, 3]])
    want = model.generate(prompt, 2)[:, :1]
    for name in ("row_step._layer_of", "step_block._joint"):
        monkeypatch.setattr(f"ring_dilated_attention.nn.{name}", interrupted)
    assert torch.equal(model.generate(prompt, 1), want)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, 2)


class _Multiplied(TorchDispatchMode):
    """The most elements of an input of a batched product."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm_):
            self.most = max(self.most, *[x.numel() for x in args])
        return func(*args, **(kwargs or {}))


def test_behind_a_long_segment_a_row_does_not_read_its_rows() -> None:
    """Also where one plan of steps ahead reaches over its end."""
    model = make_model(segment_lengths=[256], dilation_rates=[1])
    caches = model.make_caches(1)
    model.prefill(torch.randint(VOCABULARY, (1, 250)), caches)
    take, most = row_step(model, caches), []
    for at in range(250, 270):
        with torch.inference_mode(), _Multiplied() as seen:
            take(torch.tensor([[at % VOCABULARY]]))
        most.append(seen.most)
    width = caches[0].plan.num_kv_heads * caches[0].keys.shape[2]
    assert max(most[:6]) == 256 * width
    assert max(most[6:]) <= 64 * width


class _OwnLogits(LongNet):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden).tanh()


def test_which_models_are_taken_row_by_row() -> None:
    def fits(model: LongNet, batch: int = 1, **options: Any) -> bool:
        return RowStep.fits(model, model.make_caches(batch, max_length=10, **options))

    assert fits(make_model())
    assert fits(make_model().float())
    assert not fits(make_model(), batch=2)
    assert not fits(make_model().bfloat16())
    assert not fits(make_model(embed_dim=1024))
    assert not fits(_OwnLogits(make_model().config))
    pruned = make_model()
    for block in pruned.blocks:
        block.expand = torch.nn.Linear(pruned.config.embed_dim, 3).double()
        block.contract = torch.nn.Linear(3, pruned.config.embed_dim).double()
    assert not fits(pruned)
    half = make_model()
    half.blocks[1].float()
    assert not fits(half)
    tiles = make_model()
    tiles.blocks[1].attention.backend = "sdpa"  # type: ignore[union-attr]
    assert not fits(tiles)
    for name in ("embedding", "norm", "blocks.0", "blocks.1.expand", "blocks.1.attention.v_proj"):
        hooked = make_model()
        hooked.get_submodule(name).register_forward_hook(lambda *_: None)
        assert not fits(hooked)
    without = make_model()
    without.blocks[0].contract.bias = None  # type: ignore[union-attr]
    assert not fits(without)
    assert not any(run_loopback(2, lambda ends: fits(make_model(), group=ends, sharded=True)))


# --- loops


def test_generate_is_greedy_by_default_and_streams_the_same() -> None:
    model = make_model()
    assert model.training
    prompt = torch.randint(VOCABULARY, (3, 29))
    tokens = model.generate(prompt, 40)
    assert torch.equal(tokens, greedy(model, prompt, 40))
    assert len(tokens.unique()) > 3
    assert torch.equal(torch.stack([*model.stream(prompt, 40)], 1), tokens)
    assert model.training
    model.loss(tokens, tokens).backward()  # they may be trained on
    lengths = [29, 1, 13]
    for row, length in enumerate(lengths):
        alone = model.generate(prompt[row : row + 1, :length], 40)
        assert torch.equal(model.generate(prompt, 40, lengths=lengths)[row], alone[0])


@pytest.mark.parametrize("sharded", [False, True])
def test_tokens_are_the_same_on_any_number_of_ranks(sharded: bool) -> None:
    model = make_model()
    prompt = torch.randint(VOCABULARY, (2, 47))
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "lengths": [47, 30]}
    for chosen in ({"lengths": [47, 30]}, options):
        want = model.generate(prompt, 70, **chosen)
        for world_size in WORLD_SIZES[1:]:
            layout = SequenceLayout.zigzag(47, world_size)

            def rank(ends: Exchange, layout: Any = layout, chosen: Any = chosen) -> torch.Tensor:
                return model.generate(
                    layout.shard(prompt, ends.rank, 1), 70, layout=layout, group=ends,
                    sharded=sharded, **chosen,
                )  # fmt: skip

            for tokens in run_loopback(world_size, rank):
                assert torch.equal(tokens, want)


def test_a_row_that_has_stopped_gives_its_stop_token_and_all_of_them_end_it() -> None:
    model = make_model()
    prompt = torch.randint(VOCABULARY, (2, 20))
    free = model.generate(prompt, 50, temperature=3.0)
    stop = next(int(token) for token in free[0, 3:] if token in free[1])
    ends = [(row == stop).nonzero() for row in free]
    length = max(int(found[0]) for found in ends) + 1
    tokens = model.generate(prompt, 50, temperature=3.0, stop_token=stop)
    assert tokens.shape[1] <= 50
    first = int(ends[0][0])
    assert torch.equal(tokens[0, : first + 1], free[0, : first + 1])
    assert (tokens[0, first:] == stop).all()
    assert length <= tokens.shape[1]
    assert (tokens[:, -1] == stop).all()
    assert not (tokens[:, :-1] == stop).all(0).any()


@pytest.mark.parametrize("device_dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_caches_have_its_dtype(device_dtype: torch.dtype) -> None:
    model = make_model().float()
    prompt = torch.randint(VOCABULARY, (2, 33))
    with torch.autocast("cpu", dtype=device_dtype), torch.no_grad():
        caches = model.make_caches(2, max_length=100)
        logits = [
            model.prefill(prompt[:, :20], caches)[:, None],
            model.step(prompt[:, 20:], caches),
        ]
        assert caches[0].keys.dtype == device_dtype
        want = model(prompt)[:, 19:]
        assert relative_error(torch.cat(logits, 1).float(), want.float()) < 0.05
        assert model.generate(prompt, 5).shape == (2, 5)
    assert model.bfloat16().generate(prompt, 5).shape == (2, 5)


def test_rejected_tokens_are_taken_back() -> None:
    """As speculative decoding does: some of several tokens of a step stay."""
    model = make_model()
    text = torch.randint(VOCABULARY, (1, 80))
    caches = model.make_caches(1, max_length=200, max_rewind=6)
    model.prefill(text[:, :31], caches)
    at = 31
    for kept in (2, 1, 6, 4, 3):
        wrong = (text[:, at + kept : at + 6] + 1) % VOCABULARY
        model.step(torch.cat([text[:, at : at + kept], wrong], 1), caches)
        for cache in caches:
            cache.rewind(6 - kept)
        at += kept
    with torch.no_grad():
        want = model(text)[:, at:]
    assert relative_error(model.step(text[:, at:], caches), want) < 1e-10


def test_ten_thousand_tokens_take_the_memory_of_the_closed_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(
        num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, ffn_dim=8,
        segment_lengths=[16, 64], dilation_rates=[1, 4],
    ).float()  # fmt: skip
    made: list[Any] = []

    def make(self: LongNet, batch: int, most: int, *rest: Any) -> list[Any]:
        made.extend(self.make_caches(batch, max_length=most))
        return made

    monkeypatch.setattr("ring_dilated_attention.nn.generation.make_caches", make)
    for _ in model.stream(torch.zeros(1, 3, dtype=torch.int64), 10_000):
        (cache,) = made
        assert cache.nbytes == plan_cache(cache.plan.pattern, 1, None).nbytes(1, 4, 4)
        assert cache.nbytes == 2 * (16 + 64 // 4) * 4 * 4
    assert made[0].known_lengths == (3 + 10_000 - 1,)


# --- processes


def generate_on_gloo(rank: int, world_size: int) -> list[Any]:
    model = make_model()
    prompt = torch.arange(36).view(1, 36) % VOCABULARY
    shard = prompt[:, rank * 18 : rank * 18 + 18]
    tokens = model.generate(shard, 45, group=dist.group.WORLD, sharded=True)
    heard = []
    differing: list[dict[str, Any]] = [
        {"temperature": float(rank)},
        {"max_new_tokens": 4 + rank},
        {"seed": rank},
        {"lengths": [36 - rank]},
        {"sharded": bool(rank)},
    ]
    for options in differing:
        with pytest.raises(ValueError, match="on different ranks") as caught:
            model.generate(shard, **{"max_new_tokens": 4, "group": dist.group.WORLD, **options})
        heard.append(str(caught.value))
    with torch.no_grad():  # ranks of different weights
        model.embedding.weight[:, 0] += rank * torch.arange(VOCABULARY)
    with pytest.raises((ValueError, ExchangeError)) as differs:
        model.generate(shard, 45, group=dist.group.WORLD)
    return [tokens, heard, str(differs.value)]


def test_processes_generate_together_and_hear_of_what_differs() -> None:
    results = run_ranks(generate_on_gloo, 2)
    prompt = torch.arange(36).view(1, 36) % VOCABULARY
    want = make_model().generate(prompt, 45)
    for tokens, heard, differs in results:
        assert torch.equal(tokens, want)
        for name, message in zip(
            ("temperature", "max_new", "seed", "lengths", "sharded"), heard, strict=True
        ):
            assert name in message
        assert "the last tokens drawn" in differs


# --- drawing


def plain_shares(
    logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """Probabilities of one row, token by token."""
    shares = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(shares)), key=lambda i: (-float(shares[i]), i))
    kept = order[:top_k]
    total, nucleus = sum(float(shares[i]) for i in kept), []
    for token in kept:
        nucleus.append(token)
        if top_p is not None and sum(float(shares[i]) for i in nucleus) / total >= top_p:
            break
    wanted = torch.zeros_like(shares)
    wanted[nucleus] = shares[nucleus]
    return wanted / wanted.sum()


@given(
    st.integers(1, 40),
    st.floats(0.05, 5),
    st.none() | st.integers(1, 40),
    st.none() | st.floats(0.01, 1),
    st.integers(0, 1000),
)
def test_probabilities_are_those_of_a_plain_computation(
    size: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = 3 * torch.randn(2, size)
    top_k = top_k and min(top_k, size)
    sampler = Sampler(size, temperature=temperature, top_k=top_k, top_p=top_p)
    for row, shares in zip(logits, sampler.probabilities(logits), strict=True):
        torch.testing.assert_close(shares, plain_shares(row, temperature, top_k, top_p))


def test_draws_have_those_probabilities_and_a_seed() -> None:
    logits = torch.tensor([[1.0, 0.0, 3.0, 2.0, -1.0]])
    many = logits.expand(40_000, 5)
    options: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9}
    drawn = Sampler(5, seed=3, **options)(many)
    shares = plain_shares(logits[0], 1.3, None, 0.9)
    counted = drawn.bincount(minlength=5) / len(drawn)
    assert (counted - shares).abs().max() < 0.01
    assert (counted[shares == 0] == 0).all()
    assert torch.equal(drawn, Sampler(5, seed=3, **options)(many))
    assert not torch.equal(drawn, Sampler(5, seed=4, **options)(many))
    assert (Sampler(5)(many) == 2).all()
    assert (Sampler(5, temperature=1e-300)(many) == 2).all()
    allowed = torch.tensor([True, True, False, False, True])
    assert (Sampler(5, allowed=allowed)(many) == 0).all()
    assert set(Sampler(5, temperature=9.0, allowed=allowed)(many).tolist()) == {0, 1, 4}
    # Tokens as likely as the last of the k stay.
    equal = Sampler(4, temperature=1.0, top_k=1).probabilities(torch.tensor([[1.0, 2.0, 2.0, 0]]))
    assert equal.tolist() == [[0, 0.5, 0.5, 0]]


def test_draws_one_after_the_other_have_those_probabilities() -> None:
    """Random numbers are made for many draws at once."""
    logits, sampler = torch.tensor([[1.0, 0.0, 3.0, 2.0, -1.0]]), Sampler(5, temperature=1.3)
    drawn = torch.cat([sampler(logits) for _ in range(20_000)])
    shares = plain_shares(logits[0], 1.3, None, None)
    assert (drawn.bincount(minlength=5) / len(drawn) - shares).abs().max() < 0.015
    pairs = drawn[:-1] * 5 + drawn[1:]  # a draw says nothing of the next one
    expected = torch.outer(shares, shares).flatten()
    assert (pairs.bincount(minlength=25) / len(pairs) - expected).abs().max() < 0.015
    rows = sampler(torch.zeros(50, 5))  # with numbers of its own for each row
    assert not (rows == rows[0]).all()


def test_a_temperature_may_be_changed_between_draws() -> None:
    logits, sampler = torch.tensor([[0.0, 1.0]]), Sampler(2, temperature=100.0)
    assert {int(sampler(logits)) for _ in range(50)} == {0, 1}
    sampler.temperature = 0.01
    assert {int(sampler(logits)) for _ in range(50)} == {1}


@pytest.mark.parametrize("temperature", [1.0, 5e-324, 1e-300, 1e300, 1e308])
@pytest.mark.parametrize("logit", [0.0, 3e38, -3e38])
def test_equal_logits_are_equally_likely(temperature: float, logit: float) -> None:
    logits = torch.tensor([logit, logit, -torch.inf]).expand(4000, 3)
    drawn = Sampler(3, temperature=temperature)(logits)
    assert (drawn == 0).double().mean().sub(0.5).abs() < 0.05
    assert (drawn < 2).all()


def test_any_random_number_draws_a_token_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also 0, the least that a generator gives: once in 2**53 numbers."""
    lowest = torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, low=0, *_, **__: lowest(x, low))
    allowed = torch.tensor([False, False, True])
    assert Sampler(3, temperature=1.0, allowed=allowed)(torch.zeros(2, 3)).tolist() == [2, 2]


@pytest.mark.parametrize("batch", [1, 3])
def test_wide_rotations_are_the_same_rotations(batch: int) -> None:
    rope = RotaryEmbedding(16)
    positions = torch.randint(1 << 40, (batch, 7))
    x = torch.randn(3, 7, 2, 16, dtype=torch.float64)
    for turned in (rope(positions)(x), rope.wide(positions)(x)):
        for row in range(3):
            alone = rope(positions[row % batch])(x[row : row + 1])
            torch.testing.assert_close(turned[row : row + 1], alone, rtol=1e-7, atol=1e-7)
    with pytest.raises(ValueError, match="this rotation needs shape"):
        rope.wide(positions)(x[..., :8])
    with pytest.raises(ValueError, match="this rotation needs shape"):
        rope(torch.zeros(2, 7, dtype=torch.int64))(x)
