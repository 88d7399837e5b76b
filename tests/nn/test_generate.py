"""Generation: logits of every step are those of the full forward; loops, ranks, refusals."""

from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from support.generating import VOCABULARY, WORLD_SIZES, generations, greedy, make_model, model_of
from support.tolerances import assert_close_to

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.exchange import Exchange, ExchangeError, run_loopback
from ring_dilated_attention.nn import LongNet

pytestmark = pytest.mark.usefixtures("one_thread")


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
    options = {name: case[name] for name in ("lengths", "layout")}
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
            length = case["lengths"][row] if case["lengths"] else case["prompt"]
            text = torch.cat([tokens[row, :length], tokens[row, case["prompt"] :]])
            want = model(text[None])[0, length - 1 :]
            assert relative_error(got[row], want) < 1e-10


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
        rough = model(prompt)[:, 19:]
        assert model.generate(prompt, 5).shape == (2, 5)
    with torch.no_grad():
        exact = deepcopy(model).double()(prompt)[:, 19:]
    assert_close_to(torch.cat(logits, 1), exact, plain=rough, factor=4.0)
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


@pytest.mark.parametrize("sharded", [False, True])
def test_windows_beside_dilated_branches(sharded: bool) -> None:
    """Caches stop growing, and no `max_length` is needed."""
    model = make_model(segment_lengths=[(12, 0), 40], dilation_rates=[1, 2])
    prompt = torch.randint(VOCABULARY, (2, 8))  # shorter than the window
    caches = model.make_caches(2)
    assert caches[0].plan.rows == 2 * (13 + 20)
    want = greedy(model, prompt, 50)
    assert torch.equal(model.generate(prompt, 50), want)
    layout = SequenceLayout.zigzag(8, 2)

    def rank(ends: Exchange) -> torch.Tensor:
        shard = layout.shard(prompt, ends.rank, 1)
        return model.generate(shard, 50, layout=layout, group=ends, sharded=sharded)

    assert all(torch.equal(tokens, want) for tokens in run_loopback(2, rank))


@pytest.mark.parametrize("sharded", [False, True])
def test_caches_follow_the_patterns_of_their_blocks(sharded: bool) -> None:
    patterns = [DilatedPattern.window(5), DilatedPattern([8, None], [1, 3])]
    model = make_model(segment_lengths=(), dilation_rates=(), patterns=patterns)
    assert [x.plan.pattern for x in model.make_caches(2, max_length=60)] == patterns
    prompt = torch.randint(VOCABULARY, (2, 20))
    want = greedy(model, prompt, 30)

    layout = SequenceLayout.zigzag(20, 2)

    def rank(ends: Exchange) -> torch.Tensor:
        shard = layout.shard(prompt, ends.rank, 1)
        return model.generate(shard, 30, layout=layout, group=ends, sharded=sharded)

    for tokens in (model.generate(prompt, 30), *run_loopback(2, rank)):
        assert torch.equal(tokens, want)


# --- models that change, and fail


def test_a_model_that_has_changed_generates_as_it_is_now() -> None:
    """Steps call its blocks: hooks and other parts take part; caches of another pattern do not."""
    model, prompt = make_model(), torch.randint(VOCABULARY, (2, 29))
    before, plain = model.make_caches(2, max_length=60), model.generate(prompt, 20)
    model.prefill(prompt, before)
    first, second = (x.attention for x in model.blocks)
    second.pattern = DilatedPattern([8, 30], [1, 3])  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="anew when its patterns have changed"):
        model.step(prompt[:, :1], before)
    combine: Any = first.combine  # type: ignore[union-attr]
    vars(first)["combine"] = lambda out: 2 * combine(out).roll(1, -1)
    for name in ("blocks.1", "blocks.0.attention.k_proj"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, __, output: output + output.roll(1, -1))
    tokens = model.generate(prompt, 20)
    assert not torch.equal(tokens, plain)
    assert torch.equal(tokens, greedy(model, prompt, 20))


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# --- refusals


PROMPT = torch.zeros(2, 5, dtype=torch.int64)
REFUSED: dict[str, tuple[Any, type[Exception]]] = {
    "max_new_tokens must be": ({"max_new_tokens": 0}, ValueError),
    "max_new_tokens must be an int": ({"max_new_tokens": 1.5}, TypeError),
    "temperature must be finite and >= 0; got -1": ({"temperature": -1}, ValueError),
    "temperature must be a number": ({"temperature": "hot"}, TypeError),
    "top_k must be at most 31; got 32": ({"top_k": 32}, ValueError),
    "top_p must be above 0 and at most 1; got 1.5": ({"top_p": 1.5}, ValueError),
    "seed must be from 0": ({"seed": -1}, ValueError),
    "stop_token must be from 0 to 30; got 31": ({"stop_token": 31}, ValueError),
    "tokens must be int64": ({"tokens": PROMPT.int()}, TypeError),
    "tokens must be a tensor": ({"tokens": [[1]]}, TypeError),
    "tokens must have shape": ({"tokens": PROMPT[0]}, ValueError),
    "the prompt must have a token": ({"tokens": PROMPT[:, :0]}, ValueError),
    r"lengths must lie in \[1, 5\]; got 0": ({"lengths": [5, 0]}, ValueError),
    "lengths must hold one number for each of 2 rows": ({"lengths": [5]}, ValueError),
    "layout must be a SequenceLayout": ({"layout": "zigzag"}, TypeError),
    "sharded must be a bool": ({"sharded": 1}, TypeError),
    "unexpected keyword argument 'beams'": ({"beams": 2}, TypeError),
    "capture must be a bool": ({"capture": 1}, TypeError),
    "capture=True needs a CUDA device": ({"capture": True}, ValueError),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_refused(message: str) -> None:
    options, kind = REFUSED[message]
    with pytest.raises(kind, match=message):
        make_model().generate(**{"tokens": PROMPT, "max_new_tokens": 3, **options})


def test_caches_that_do_not_fit_are_refused() -> None:
    model = make_model()
    caches = model.make_caches(2, max_length=8)
    wrongs: list[tuple[Any, type[Exception], str]] = [
        (caches[:1], ValueError, "each of 2 blocks needs a cache of its own; got 1"),
        (None, TypeError, "caches must be those of make_caches"),
        (caches[:1] * 2, ValueError, "got 2 caches, 1 of them different"),
        (make_model(head_offsets="blocked").make_caches(2, max_length=8), ValueError, "got one of"),
        (model.make_caches(3, max_length=8), ValueError, r"\b3\b.*got .*\b2\b"),
    ]
    for wrong, kind, message in wrongs:
        for call in (model.prefill, model.step):
            with pytest.raises(kind, match=message):
                call(PROMPT, wrong)
    model.prefill(PROMPT, caches)
    with pytest.raises(ValueError, match="has room for max_length=8"):
        model.step(PROMPT, caches)
    with pytest.raises(TypeError, match="tokens must be int64"):
        model.step(PROMPT.float(), caches)
    with pytest.raises(ValueError, match=r"one token at least; got tokens of shape \(2, 0\)"):
        model.step(PROMPT[:, :0], caches)
    hook = model.blocks[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.step(PROMPT[:, :1], caches)
    hook.remove()
    with pytest.raises(ValueError, match=r"same positions; got \[5, 5\] and \[6, 6\]: rewind"):
        model.step(PROMPT[:, :1], caches)
    with torch.no_grad():  # a prompt begins anew
        assert relative_error(model.prefill(PROMPT, caches), model(PROMPT)[:, -1]) < 1e-10


@pytest.mark.parametrize("batch", [1, 2])
def test_logits_that_are_not_finite_in_one_step_are_refused(batch: int) -> None:
    """Where a segment ends, what follows does not see it any more."""
    model, steps = make_model(segment_lengths=[4], dilation_rates=[1]), []

    def spoil(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        steps.append(output)
        return output.log() if len(steps) == 3 else output  # NaN where it is negative

    model.norm.register_forward_hook(spoil)
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate(PROMPT[:batch], 40)
    assert len(steps) < 40


def test_a_token_without_an_embedding_is_an_error_on_every_rank() -> None:
    model = make_model()
    prompt = PROMPT.clone()
    prompt[1, 3] = VOCABULARY

    def rank(ends: Exchange) -> None:
        with pytest.raises((IndexError, ValueError), match="index out of range"):
            model.generate(prompt if ends.rank else PROMPT, 3, group=ends)

    run_loopback(2, rank)


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
