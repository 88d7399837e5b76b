"""What generation refuses: arguments, caches, tokens, logits."""

from typing import Any

import pytest
import torch
from support.generating import VOCABULARY, make_model

from ring_dilated_attention.exchange import Exchange, run_loopback
from ring_dilated_attention.nn import LongNet

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
    "allowed must be a tensor of bool": ({"allowed": [True] * 31}, TypeError),
    r"allowed must have shape \(31,\)": ({"allowed": torch.ones(3).bool()}, ValueError),
    "allowed must have a token": ({"allowed": torch.zeros(31).bool()}, ValueError),
    "tokens must be int64": ({"tokens": PROMPT.int()}, TypeError),
    "tokens must be a tensor": ({"tokens": [[1]]}, TypeError),
    "tokens must have shape": ({"tokens": PROMPT[0]}, ValueError),
    "the prompt must have a token": ({"tokens": PROMPT[:, :0]}, ValueError),
    "every row needs a token": ({"lengths": [5, 0]}, ValueError),
    "lengths must hold one number for each of 2 rows": ({"lengths": [5]}, ValueError),
    "documents must rise from 0": ({"documents": [0, 3]}, ValueError),
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
        (caches[:1], ValueError, "a cache for each of 2 blocks; got 1"),
        (None, TypeError, "caches must be those of make_caches"),
        (caches[:1] * 2, ValueError, "every block needs a cache of its own"),
        (make_model(head_offsets="blocked").make_caches(2, max_length=8), ValueError, "got one of"),
        (model.make_caches(3, max_length=8), ValueError, "are for 3 rows; got tokens for 2"),
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
    caches[0].reset()
    with pytest.raises(ValueError, match=r"same positions; the first holds \[0, 0\], another one"):
        model.step(PROMPT, caches)


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


class _ForbidsAll(LongNet):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden).masked_fill(torch.arange(VOCABULARY) > 1, -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_refuses_to_draw_where_all_tokens_are_forbidden(temperature: float) -> None:
    model, allowed = _ForbidsAll(make_model().config), torch.arange(VOCABULARY) > 1
    with pytest.raises(ValueError, match="logits are not finite, or -inf for all"):
        model.generate(torch.tensor([[1]]), 2, temperature=temperature, allowed=allowed)


@pytest.mark.parametrize("value", [-1, VOCABULARY, 10**9])
def test_tokens_without_an_embedding_are_refused_on_every_rank(value: int) -> None:
    model = make_model()
    prompt = PROMPT.clone()
    prompt[1, 3] = value
    message = f"tokens must be from 0 to {VOCABULARY - 1}.*; got {value}"
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, 3)
    caches = model.make_caches(2, max_length=20)
    model.prefill(PROMPT, caches)
    with pytest.raises(ValueError, match=message):
        model.step(prompt, caches)
    assert caches[0].known_lengths == (5, 5)

    def rank(ends: Exchange) -> str:
        with pytest.raises(ValueError, match=message) as refused:
            model.generate(prompt if ends.rank else PROMPT, 3, group=ends)
        return str(refused.value)

    assert all(run_loopback(2, rank))
