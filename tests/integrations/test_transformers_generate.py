"""transformers' generate with a KV cache: every logit is one of a full forward, on any ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from support.bounds import EXACT, IN_FLOAT32
from support.tolerances import assert_close_to
from support.transformers_models import (
    CACHE,
    DENSE,
    FINITE,
    LENGTH,
    PATTERN,
    SMALL,
    on_group,
    prompt,
    ready,
)

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations import transformers_generate
from ring_dilated_attention.integrations.transformers import (
    DilatedCache,
    remove_attention,
    set_attention,
)
from ring_dilated_attention.plan import plan_cache

BLOCKED = DilatedPattern([8, 19, 30], [1, 2, 3], head_offsets="blocked")
PATTERNS = {"whole": PATTERN, "finite": FINITE, "blocked": BLOCKED, "dense": DENSE}
NEW = 20


@pytest.fixture(autouse=True)
def _one_thread():
    """Steps of one token are too small for several, which would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def padded_left(ids, *padding):
    """The ids with this number of padding columns on the left of each row, for generate."""
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@torch.no_grad()
def without_cache(model, ids, count=NEW):
    """Greedy tokens, and the logits that chose them: each by a forward of everything."""
    chosen = []
    for _ in range(count):
        chosen.append(model(ids).logits[:, -1])
        ids = torch.cat([ids, chosen[-1].argmax(-1, keepdim=True)], 1)
    return ids, torch.stack(chosen, 1)


def generated(model, count=NEW, **options):
    """What generate returns, and the logits in the dtype of the model."""
    chosen = []
    handle = model.register_forward_hook(lambda *call: chosen.append(call[-1].logits[:, -1]))
    options = {"max_new_tokens": count, "do_sample": False, **options}
    tokens = model.generate(**options)
    handle.remove()
    return tokens, torch.stack(chosen, 1)


# --- one process


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "Qwen3"])
def test_every_logit_is_that_of_a_full_forward(family, name):
    model, ids = ready(family, PATTERNS[name]), prompt()
    want, logits = without_cache(model, ids)
    got, found = generated(model, input_ids=ids)
    assert torch.equal(got, want)
    assert relative_error(found, logits) < EXACT


def test_dense_is_what_transformers_generates():
    model, ids = ready(pattern=DENSE), prompt()
    got, found = generated(model, input_ids=ids)
    remove_attention(model)
    want, logits = generated(model, input_ids=ids)
    assert type(model.generate(ids, max_new_tokens=1, return_dict_in_generate=True)[
        CACHE
    ]) is transformers.DynamicCache  # fmt: skip
    assert torch.equal(got, want)
    assert relative_error(found, logits) < IN_FLOAT32  # their norms and softmax are in float32


@pytest.mark.parametrize("pattern", [PATTERN, FINITE])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 30}])
def test_rows_padded_on_the_left_are_as_they_are_alone(pattern, options):
    model, ids, padding = ready(pattern=pattern), prompt(3), (0, 17, 5)
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    got = model.generate(**padded_left(ids, *padding), **options)
    for row, skip in enumerate(padding):
        alone = model.generate(ids[row : row + 1, skip:], **options)
        assert torch.equal(got[row, skip:], alone[0])


def test_logits_of_padded_rows():
    """On the left; then tokens one by one and several at once."""
    model, ids, padding = ready(), prompt(4, LENGTH + 9), (0, 13, 0, 6)
    mask = torch.arange(LENGTH) >= torch.tensor(padding)[:, None]
    with torch.no_grad():
        first = model(ids[:, :LENGTH], attention_mask=mask, use_cache=True)
        cache, after = first[CACHE], []
        for part in ids[:, LENGTH:].split([1, 5, 3], 1):
            mask = torch.nn.functional.pad(mask, (0, part.shape[1]), value=True)
            after.append(model(part, attention_mask=mask, **{CACHE: cache}).logits)
        assert cache.lengths == tuple(LENGTH + 9 - skip for skip in padding)
        got = torch.cat([first.logits, *after], 1)
        for row, skip in enumerate(padding):
            want = model(ids[row : row + 1, skip:]).logits[0]
            assert relative_error(got[row, skip:], want) < EXACT


def test_sampling_is_as_without_a_cache():
    model, ids, results = ready(pattern=FINITE), prompt(), []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2}
        results.append(model.generate(ids, max_new_tokens=NEW, use_cache=use_cache, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("padding", [(0, 0), (0, 11)])
def test_a_chat_goes_on(padding):
    model, ids = ready(), prompt(2, LENGTH)
    cache, given = DilatedCache(model), padded_left(ids, *padding)
    options = {"do_sample": False, "return_dict_in_generate": True}
    for turn, count in enumerate((7, 1, 12)):
        went_on = copy.deepcopy(cache)  # of its own rows: both go on from the same text
        out = model.generate(**given, max_new_tokens=count, **{CACHE: cache}, **options)
        again = model.generate(**given, max_new_tokens=count, **{CACHE: went_on}, **options)
        assert out[CACHE] is cache
        assert torch.equal(out.sequences, again.sequences)
        for row, skip in enumerate(padding):
            tokens = given["input_ids"][row : row + 1, skip:]
            want, _ = without_cache(model, tokens, count)
            assert torch.equal(out.sequences[row, skip:], want[0])
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        said = torch.cat([out.sequences, prompt(2, 9, seed=turn)], 1)
        given = padded_left(said, *padding)
    cache.reset()
    again = model.generate(prompt(1, 5), max_new_tokens=3, **{CACHE: cache}, do_sample=False)
    assert torch.equal(again, without_cache(model, prompt(1, 5), 3)[0])


def test_embeddings_instead_of_tokens():
    model, ids = ready(), prompt()
    want, _ = without_cache(model, ids)
    embeddings = model.get_input_embeddings()(ids).detach()
    got = model.generate(inputs_embeds=embeddings, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, want[:, LENGTH:])


def test_half_precision():
    """As far from float64 as a forward of everything in bfloat16 is, at most twice."""
    model, ids = ready().bfloat16(), prompt()
    got, found = generated(model, input_ids=ids)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        want, plain = (x(got[:, :-1]).logits[:, LENGTH - 1 :] for x in (exact, model))
    assert found.dtype == torch.bfloat16
    assert_close_to(found, want, plain=plain)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = generated(ready().float(), input_ids=ids, count=2)
    assert torch.equal(cast[:, :LENGTH], ids)


def test_compiled():
    model, ids = ready(num_hidden_layers=1), prompt()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        want = model(ids).logits
        first = compiled(ids[:, :30], use_cache=True)
        assert relative_error(first.logits, want[:, :30]) < EXACT
        for at in (30, 31):
            step = compiled(ids[:, at : at + 1], **{CACHE: first[CACHE]})
            assert relative_error(step.logits, want[:, at : at + 1]) < EXACT


# --- memory


def closed_form(model, pattern, batch, max_length):
    plan = plan_cache(pattern, SMALL["num_key_value_heads"], max_length)
    return len(model.model.layers) * plan.nbytes(batch, 8, 8)


def test_bytes_are_the_closed_form_and_do_not_grow():
    model, ids = ready(pattern=FINITE), prompt(1, 5)
    cache, sizes = DilatedCache(model), []
    with torch.no_grad():
        for _ in range(120):
            logits = model(ids, **{CACHE: cache}, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
            sizes.append(cache.nbytes)
    assert cache.lengths == (124,)
    assert sizes[-1] == closed_form(model, FINITE, 1, None)
    assert sizes[30:] == sizes[-1:] * 90
    out = ready().generate(prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    assert out[CACHE].nbytes == closed_form(model, PATTERN, 2, LENGTH + NEW - 1)


def test_a_document_longer_than_expected_makes_the_cache_grow():
    model, ids = ready(), prompt(2, 90)
    cache = DilatedCache(model, max_length=20)
    with torch.no_grad():
        want = model(ids).logits
        model(ids[:, :20], **{CACHE: cache})
        assert cache.nbytes == closed_form(model, PATTERN, 2, 20)
        for at in range(20, 90):
            got = model(ids[:, at : at + 1], **{CACHE: cache}).logits
            assert relative_error(got, want[:, at : at + 1]) < EXACT
    assert cache.nbytes <= closed_form(model, PATTERN, 2, 135)


def test_no_cache_is_made_unless_it_is_asked_for(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a cache was made")

    model, ids = ready(), prompt()
    assert model.config.use_cache
    want = model.generate(ids, max_new_tokens=3, do_sample=False)
    monkeypatch.setattr(transformers_generate, "DilatedKVCache", refused)
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "DynamicCache", refused)
    model.train()
    out = model(ids, labels=ids)
    out.loss.backward()
    assert getattr(out, CACHE) is None
    model.eval()
    got = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)
    assert torch.equal(got, want)


# --- many ranks

OPTIONS = {
    "greedy": {},
    "padded": padded_left(prompt(), 0, 29),
    "one token": {"input_ids": prompt(2, 1)},
}


def generate_on_a_rank(model, group, name, sharded):
    own = copy.deepcopy(model)
    set_attention(own, PATTERN, group=group)
    options = {"input_ids": prompt(), "max_new_tokens": 12, **OPTIONS[name]}
    if sharded is not None:
        options[CACHE] = DilatedCache(own, sharded=sharded)
    return generated(own, **options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("world", "sharded"), [(2, True), (3, False), (3, True)])
def test_any_ranks_generate_the_same(world, sharded, name):
    model = ready()
    want, logits = generate_on_a_rank(model, None, name, None)
    outcomes = run_loopback(world, lambda ends: generate_on_a_rank(model, ends, name, sharded))
    for tokens, found in outcomes:
        assert torch.equal(tokens, want)
        assert torch.equal(found, outcomes[0][1])  # to the bit
        assert relative_error(found, logits) < EXACT


@torch.no_grad()
def test_any_ranks_return_the_last_logits_of_a_prompt():
    model, given = ready(), padded_left(prompt(), 0, 8)
    want = model(**given, use_cache=True).logits[:, -1:]

    @torch.no_grad()
    def run(own, ends):
        return own(**given, use_cache=True, logits_to_keep=1).logits

    for got in on_group(model, 3, run):
        assert got.shape == want.shape
        assert relative_error(got, want) < EXACT


def processes(rank, world_size):
    """A chat that goes on, greedy and sampled, by processes that have a seed each."""
    torch.set_num_threads(1)
    model, ids = ready(), prompt()
    set_attention(model, PATTERN, group=dist.group.WORLD)
    cache = DilatedCache(model, sharded=True)
    got = model.generate(ids, max_new_tokens=6, do_sample=False, **{CACHE: cache})
    torch.manual_seed(11)
    said = torch.cat([got, prompt(2, 9, seed=1)], 1)
    chat = model.generate(said, max_new_tokens=9, do_sample=True, **{CACHE: cache})
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="different arguments on different ranks: input is"):
        model.generate(said, max_new_tokens=9, do_sample=True)
    return got, said, chat


def test_processes_generate_the_same():
    outcomes, model = run_ranks(processes, 3), ready()
    want, _ = without_cache(model, prompt(), 6)
    torch.manual_seed(11)
    sampled = model.generate(outcomes[0][1], max_new_tokens=9, do_sample=True)
    for got, _, chat in outcomes:
        assert torch.equal(got, want)
        assert torch.equal(chat, sampled)
