"""Steps of one row on a CPU, in memory that stays: logits are those of the full forward."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.generating import VOCABULARY, generations, make_model, model_of
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.decode import DilatedKVCache
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn import LongNet, RotaryEmbedding
from ring_dilated_attention.nn.row_step import RowStep

pytestmark = pytest.mark.usefixtures("one_thread")


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


def selected(caches: list[DilatedKVCache]) -> list[DilatedKVCache]:
    for cache in caches:
        cache.select([0, 0])
        cache.select([1])
    return caches


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda caches: pickle.loads(pickle.dumps(caches)), selected]
)
def test_a_row_goes_on_in_caches_that_were_copied(
    change: Callable[[list[DilatedKVCache]], list[DilatedKVCache]],
) -> None:
    """Keys and values of some of them are no longer one behind the other in memory."""
    model, text = make_model(), torch.randint(VOCABULARY, (1, 60))
    caches = model.make_caches(1, max_length=60)
    model.prefill(text[:, :9], caches)
    take = row_step(model, caches)
    with torch.inference_mode():
        got = [take(text[:, at : at + 1]) for at in range(9, 30)]
        take = row_step(model, change(caches))
        got += [take(text[:, at : at + 1]) for at in range(30, 60)]
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
