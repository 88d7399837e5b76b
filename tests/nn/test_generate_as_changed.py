"""Generation steps compute what the model is now: hooks, weights, patterns, layers of its own."""

from typing import Any

import pytest
import torch
from support.generating import VOCABULARY, greedy, make_model
from torch import nn

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.nn import MultiheadDilatedAttention, RotaryEmbedding, Rotation

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["blocks.1", "blocks.0.attention.k_proj", "blocks.0.mlp_norm"])
def test_hooks_run_in_every_step_and_may_change_it(name: str) -> None:
    model, prompt = make_model(), torch.randint(VOCABULARY, (1, 29))
    plain, called = model.generate(prompt, 12), []

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        called.append(name)
        return output + output.roll(1, -1)

    model.get_submodule(name).register_forward_hook(hook)
    tokens = model.generate(prompt, 12)
    assert len(called) == 12  # the prompt, and a step for each token but the last
    assert not torch.equal(tokens, plain)
    assert torch.equal(tokens, greedy(model, prompt, 12))


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


@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_may_have_different_patterns(batch: int) -> None:
    model, prompt = make_model(), torch.randint(VOCABULARY, (batch, 20))
    before = model.make_caches(batch, max_length=60)
    model.prefill(prompt, before)
    attention: Any = model.blocks[1].attention
    attention.pattern = DilatedPattern([8, 30], [1, 3])
    assert torch.equal(model.generate(prompt, 40), greedy(model, prompt, 40))
    with pytest.raises(ValueError, match="anew when its patterns have changed"):
        model.step(prompt[:, :1], before)


class _Stretched(RotaryEmbedding):
    def forward(self, positions: torch.Tensor) -> Rotation:
        return super().forward(positions // 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_has_the_rotation_that_the_model_has(batch: int) -> None:
    """Its base may change, and a subclass or a hook may return another one."""
    model, prompt = make_model(), torch.randint(VOCABULARY, (batch, 20))
    plain = model.generate(prompt, 40)
    for change in ("theta", "subclass", "hook"):
        if change == "theta":
            model.rope.theta = 30.0
        elif change == "subclass":
            model.rope = _Stretched(model.rope.head_dim)
        else:
            model.rope = RotaryEmbedding(model.rope.head_dim)
            model.rope.register_forward_hook(lambda *call: Rotation(call[-1].cos, -call[-1].sin))
        tokens = model.generate(prompt, 40)
        assert torch.equal(tokens, greedy(model, prompt, 40))
        assert not torch.equal(tokens, plain)


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


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


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


@pytest.mark.parametrize("name", ["expand", "contract", "attention.out_proj"])
def test_a_layer_may_be_any_module(name: str) -> None:
    model, prompt = make_model(), torch.randint(VOCABULARY, (1, 20))
    layer = model.blocks[0].get_submodule(name)
    model.blocks[0].set_submodule(name, torch.nn.Sequential(layer, torch.nn.Tanh()))
    assert torch.equal(model.generate(prompt, 20), greedy(model, prompt, 20))


class _TwiceTheQuery(MultiheadDilatedAttention):
    def attend(self, q_bnhd: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        return super().attend(2 * q_bnhd, *others, **options)


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_of_its_own_is_called_or_refused(batch: int) -> None:
    model, prompt = make_model(), torch.randint(VOCABULARY, (batch, 20))
    attention: Any = model.blocks[0].attention
    combine = attention.combine
    attention.combine = lambda out: 2 * combine(out)
    assert torch.equal(model.generate(prompt, 20), greedy(model, prompt, 20))
    attention.__class__ = _TwiceTheQuery
    with pytest.raises(ValueError, match="_TwiceTheQuery has an attend of its own"):
        model.generate(prompt, 20)


class WithoutWeight(nn.Module):
    """A layer in place of a linear one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(rows)
        return result.roll(1, -1)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_projections_may_be_modules_without_a_weight(name: str) -> None:
    model, prompt = make_model(), torch.randint(VOCABULARY, (1, 29))
    plain = model(prompt)
    attention: Any = model.get_submodule("blocks.0.attention")
    setattr(attention, name, WithoutWeight(getattr(attention, name)))
    assert relative_error(model(prompt), plain) > 1e-2
    assert torch.equal(model.generate(prompt, 12), greedy(model, prompt, 12))


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
