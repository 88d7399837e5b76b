"""How tokens are drawn from logits."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ring_dilated_attention.nn import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")


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
    banned = many.masked_fill(torch.tensor([False, False, True, True, False]), -torch.inf)
    assert (Sampler(5)(banned) == 0).all()
    assert set(Sampler(5, temperature=9.0)(banned).tolist()) == {0, 1, 4}
    # Tokens as likely as the last of the k stay.
    equal = Sampler(4, temperature=1.0, top_k=1).probabilities(torch.tensor([[1.0, 2.0, 2.0, 0]]))
    assert equal.tolist() == [[0, 0.5, 0.5, 0]]


@pytest.mark.parametrize("temperature", [1.0, 5e-324, 1e-300, 1e300, 1e308])
@pytest.mark.parametrize("logit", [0.0, 3e38, -3e38])
def test_equal_logits_are_equally_likely(temperature: float, logit: float) -> None:
    logits = torch.tensor([logit, logit, -torch.inf]).expand(4000, 3)
    drawn = Sampler(3, temperature=temperature)(logits)
    assert (drawn == 0).double().mean().sub(0.5).abs() < 0.05
    assert (drawn < 2).all()


def test_any_random_number_draws_a_token_that_is_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also 0, the least that a generator gives: once in 2**53 numbers."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda x, **_: x.zero_())
    logits = torch.tensor([-torch.inf, -torch.inf, 0]).expand(2, 3)
    assert Sampler(3, temperature=1.0)(logits).tolist() == [2, 2]
