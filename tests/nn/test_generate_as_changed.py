"""Generation steps compute what the model is now: hooks, weights, patterns, layers of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.generating import VOCABULARY, greedy, make_model
from torch import nn

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.nn import LongNet, MultiheadDilatedAttention

pytestmark = pytest.mark.usefixtures("one_thread")


class WithoutWeight(nn.Module):
    """A layer in place of a linear one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(rows)
        return result.roll(1, -1)


def hooked(name: str) -> Callable[[LongNet], None]:
    def change(model: LongNet) -> None:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output + output.roll(1, -1)

        model.get_submodule(name).register_forward_hook(hook)

    return change


def replaced(name: str) -> Callable[[LongNet], None]:
    def change(model: LongNet) -> None:
        model.set_submodule(name, WithoutWeight(model.get_submodule(name)))

    return change


def other_pattern(model: LongNet) -> None:
    attention: Any = model.blocks[1].attention
    attention.pattern = DilatedPattern([8, 30], [1, 3])


def other_combination(model: LongNet) -> None:
    attention: Any = model.blocks[0].attention
    combine = attention.combine
    attention.combine = lambda out: 2 * combine(out).roll(1, -1)


CHANGES: dict[str, Callable[[LongNet], None]] = {
    "hook of a block": hooked("blocks.1"),
    "hook of a projection": hooked("blocks.0.attention.k_proj"),
    "another part of the MLP": replaced("blocks.0.contract"),
    "another projection": replaced("blocks.0.attention.v_proj"),
    "another pattern": other_pattern,
    "combine": other_combination,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_generate_computes_what_the_model_is(change: Callable[[LongNet], None]) -> None:
    model, prompt = make_model(), torch.randint(VOCABULARY, (2, 29))
    plain = model.generate(prompt, 20)
    change(model)
    tokens = model.generate(prompt, 20)
    assert not torch.equal(tokens, plain)
    assert torch.equal(tokens, greedy(model, prompt, 20))


def test_step_refuses_caches_of_a_pattern_that_has_changed() -> None:
    model, prompt = make_model(), torch.randint(VOCABULARY, (1, 20))
    before = model.make_caches(1, max_length=60)
    model.prefill(prompt, before)
    other_pattern(model)
    with pytest.raises(ValueError, match="anew when its patterns have changed"):
        model.step(prompt[:, :1], before)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("count", "max_rewind"), [(1, 0), (3, 2)])
@pytest.mark.parametrize("name", ["norm", "blocks.1.contract"])
def test_a_step_that_fails_can_be_tried_again(name: str, count: int, max_rewind: int) -> None:
    model, text = make_model(), torch.randint(VOCABULARY, (2, 60))
    caches = model.make_caches(2, max_length=60, max_rewind=max_rewind)
    model.prefill(text[:, :18], caches)
    logits = []
    for first in range(18, 60, count):
        handle = model.get_submodule(name).register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.step(text[:, first : first + count], caches)
        handle.remove()
        assert {cache.known_lengths for cache in caches} == {(first, first)}
        assert all(cache.lengths.tolist() == [first, first] for cache in caches)
        logits.append(model.step(text[:, first : first + count], caches))
    with torch.no_grad():
        assert relative_error(torch.cat(logits, 1), model(text)[:, 18:]) < 1e-10


def test_what_a_failed_step_overwrote_cannot_be_taken_back() -> None:
    model, text = make_model(segment_lengths=[8], dilation_rates=[1]), torch.randint(31, (1, 40))
    caches = model.make_caches(1, max_rewind=3)
    model.prefill(text[:, :16], caches)
    hook = model.norm.register_forward_hook(_interrupt)
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


def test_caches_are_empty_behind_a_prefill_that_failed() -> None:
    model, text = make_model(), torch.randint(VOCABULARY, (2, 10))
    caches = model.make_caches(1, max_length=20)
    model.prefill(text[:1], caches)
    hook = model.blocks[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.prefill(text[1:], caches)
    hook.remove()
    assert {cache.known_lengths for cache in caches} == {(0,)}
    assert [cache.lengths.item() for cache in caches] == [0] * len(caches)
    with torch.no_grad():
        assert relative_error(model.step(text[1:], caches), model(text[1:])) < 1e-10


class _TwiceTheQuery(MultiheadDilatedAttention):
    def attend(self, q_bnhd: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        return super().attend(2 * q_bnhd, *others, **options)


def test_generate_refuses_an_attend_of_its_own() -> None:
    model = make_model()
    attention: Any = model.blocks[0].attention
    attention.__class__ = _TwiceTheQuery
    with pytest.raises(ValueError, match="_TwiceTheQuery has an attend of its own"):
        model.generate(torch.randint(VOCABULARY, (1, 20)), 20)


@pytest.mark.parametrize("batch", [1, 3])
def test_streamed_tokens_may_be_changed(batch: int) -> None:
    """They are the caller's own: later tokens follow what was drawn."""
    model, prompt = make_model(), torch.randint(VOCABULARY, (batch, 29))
    want, got = model.generate(prompt, 12), []
    for tokens in model.stream(prompt, 12):
        got.append(tokens.clone())
        tokens.fill_(0)
    assert torch.equal(torch.stack(got, 1), want)
