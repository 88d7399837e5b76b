"""Generation steps compute what the model is now: hooks, weights, patterns, layers of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.generating import VOCABULARY, greedy, make_model
from torch import nn

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.nn import LongNet, MultiheadDilatedAttention, RotaryEmbedding, Rotation

pytestmark = pytest.mark.usefixtures("one_thread")


class WithoutWeight(nn.Module):
    """A layer in place of a linear one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(rows)
        return result.roll(1, -1)


class _Stretched(RotaryEmbedding):
    def forward(self, positions: torch.Tensor) -> Rotation:
        return super().forward(positions // 2)


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


def other_base(model: LongNet) -> None:
    model.rope.theta = 30.0


def other_rotation(model: LongNet) -> None:
    model.rope = _Stretched(model.rope.head_dim)


def hooked_rotation(model: LongNet) -> None:
    model.rope.register_forward_hook(lambda *call: Rotation(call[-1].cos, -call[-1].sin))


def other_pattern(model: LongNet) -> None:
    attention: Any = model.blocks[1].attention
    attention.pattern = DilatedPattern([8, 30], [1, 3])


def other_combination(model: LongNet) -> None:
    attention: Any = model.blocks[0].attention
    combine = attention.combine
    attention.combine = lambda out: 2 * combine(out).roll(1, -1)


CHANGES: dict[str, Callable[[LongNet], None]] = {
    **{f"hook of {name}": hooked(name) for name in ("blocks.1", "blocks.0.attention.k_proj")},
    **{
        f"another {name}": replaced(f"blocks.0.{name}")
        for name in ("contract", "mlp_norm", *(f"attention.{x}_proj" for x in ("q", "v", "out")))
    },
    "base of the rotation": other_base,
    "another rotation": other_rotation,
    "hook of the rotation": hooked_rotation,
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


def test_generate_calls_hooks_in_every_step() -> None:
    model, called = make_model(), []
    model.blocks[1].register_forward_hook(lambda *_: called.append(1))
    model.generate(torch.randint(VOCABULARY, (1, 29)), 12)
    assert len(called) == 12  # the prompt, and a step for each token but the last


def test_step_refuses_caches_of_a_pattern_that_has_changed() -> None:
    model, prompt = make_model(), torch.randint(VOCABULARY, (1, 20))
    before = model.make_caches(1, max_length=60)
    model.prefill(prompt, before)
    other_pattern(model)
    with pytest.raises(ValueError, match="anew when its patterns have changed"):
        model.step(prompt[:, :1], before)


def test_a_step_has_the_weights_that_the_model_has() -> None:
    model, text = make_model(), torch.randint(VOCABULARY, (1, 30))
    caches = model.make_caches(1, max_length=40)
    model.prefill(text[:, :20], caches)
    first = model.step(text[:, 20:21], caches)
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.mul_(2)
        weight: Any = model.get_parameter("blocks.0.attention.q_proj.weight")
        weight.data = weight.data * 2
    model.prefill(text[:, :20], caches)
    got = model.step(text[:, 20:21], caches)
    with torch.no_grad():
        want = model(text[:, :21])[:, -1:]
    assert relative_error(got, want) < 1e-10
    assert relative_error(first, want) > 1e-3


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("count", "max_rewind"), [(1, 0), (3, 2)])
@pytest.mark.parametrize("name", ["norm", "blocks.1.contract", "blocks.0.attention.q_proj"])
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


def test_modules_without_a_weight_make_all_heads() -> None:
    model = make_model()
    attention: Any = model.get_submodule("blocks.0.attention")
    for name, columns in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
        setattr(attention, name, WithoutWeight(nn.Linear(32, columns).double()))
    with pytest.raises(
        ValueError, match=r"2 query and 1 KV heads on this rank, .* do not say which"
    ):
        model(torch.randint(VOCABULARY, (1, 29)))


@pytest.mark.parametrize("batch", [1, 3])
def test_streamed_tokens_may_be_changed(batch: int) -> None:
    """They are the caller's own: later tokens follow what was drawn."""
    model, prompt = make_model(), torch.randint(VOCABULARY, (batch, 29))
    want, got = model.generate(prompt, 12), []
    for tokens in model.stream(prompt, 12):
        got.append(tokens.clone())
        tokens.fill_(0)
    assert torch.equal(torch.stack(got, 1), want)
