"""Modules, the reference model, the shared-key fold, and decoding against the training forward pass."""

import dataclasses

import pytest
import torch
from carried_cases import CarriedConfig, dense, grads_of, inputs, run
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.carried import SharedKeyCarry, TileLayout, carried_decode, decode_cost, shared_key_attention, state
from tilewise.carried.llama import CarriedLlama, KeyValueCache, LlamaOptions
from tilewise.carried.nn import Angles, CarriedAttention, CarriedBlock
from tilewise.mask import Mask

VARIANTS = {
    "carried": {},
    "plain": {"carried": {"layers": 1}},
    "mean": {"carried": {"scaling": "mean"}},
    "gain": {"carried": {"scaling": "gain"}},
    "sink and softcap": {"carried": {"sink": True, "softcap": 5.0}},
    "sliding window and gate": {"carried": {"windows": (9, 9, 9, None)}, "gated": True},
    "one window": {"carried": {"windows": 6}, "qk_norm": True},
    "keys from the hidden state": {"keys": "hidden"},
    "keys from the hidden state, no carry": {"keys": "hidden", "group": 4, "carried": {"layers": 1}},
    "keys from the hidden state of two blocks": {"keys": "hidden", "group": 4, "carried": {"layers": 2}},
    "keys from hidden states of half a block": {"keys": "hidden", "group": 2},
    "shared keys": {"keys": "shared"},
    "shared keys, gain and window": {"keys": "shared", "carried": {"scaling": "gain", "windows": 6}},
    "detached": {"carried": {"detach": True}},
}


def model_of(name, dtype=torch.float64, **change):
    variant = dict(VARIANTS[name])
    carried = CarriedConfig(**{"tile": 16, "impl": "blocked"} | variant.pop("carried", {}) | change.pop("carried", {}))
    sizes = {"vocabulary": 61, "width": 32, "layers": 6, "hidden": 48, "carried": carried}
    return CarriedLlama(LlamaOptions(**sizes | variant), **change).to(dtype)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_model_equals_itself_on_the_dense_reference(name):
    tokens = torch.randint(61, (2, 38))
    results = []
    for impl in ("blocked", "reference"):
        torch.manual_seed(3)
        model = model_of(name, carried={"impl": impl})
        loss = model.loss(tokens)
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunk", [None, 17, 3])
def test_generation_equals_the_forward_pass(name, chunk):
    """Prefill at once and in chunks, then decoding with a carried row: the logits of one forward over all tokens."""
    model, tokens = model_of(name), torch.randint(61, (2, 40))
    with torch.no_grad():
        whole, cache = model(tokens), KeyValueCache(40)
        parts = [model(part, cache=cache) for part in tokens[:, :34].split(chunk or 34, 1)]
        parts += [model(token, cache=cache) for token in tokens[:, 34:].split([1, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-10)


def test_generate_is_greedy_and_needs_no_extra_cache():
    model, prompt = model_of("carried"), torch.randint(61, (2, 11))
    new = model.generate(prompt, 4, chunk=5)
    for i in range(4):
        logits = model(torch.cat((prompt, new[:, :i]), 1))
        assert torch.equal(logits[:, -1].argmax(-1), new[:, i])
    cache = KeyValueCache(16)
    model(prompt, cache=cache)
    assert cache.nbytes == 6 * 2 * (2 * 2 * 16 * 8) * 8  # layers · (K, V) · B · Hk · capacity · d · fp64


@pytest.mark.parametrize("plan", ["stored", "mixed", "recompute"])
def test_checkpointed_blocks_give_the_same_gradients(plan):
    tokens, results = torch.randint(61, (2, 38)), []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        model = model_of("gain", checkpointed=checkpointed, carried={"plan": plan})
        model.loss(tokens).backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_checkpointed_block_runs_again_under_the_plan_that_it_ran_under(monkeypatch):
    """Whatever memory is free by then: saved tensors of another plan would be other ones."""
    free, tokens, plans = iter([1 << 30, 1 << 30, 0, 0, 0, 0]), torch.randint(61, (2, 38)), []
    monkeypatch.setattr("tilewise.carried.policy.free_memory", lambda device: next(free))
    model = model_of("carried", checkpointed=True, carried={"plan": "auto"})
    choose = state.choose_plan
    monkeypatch.setattr(state, "choose_plan", lambda *x, **y: plans.append(choose(*x, **y)) or plans[-1])
    model.loss(tokens).backward()
    assert [plan.plan for plan in plans] == ["stored"] * len(model.blocks)


def test_packed_documents_train_as_separate_ones():
    model, lengths = model_of("carried"), [1, 2, 20, 15]
    documents = [torch.randint(61, (1, n)) for n in lengths]
    mask = Mask.packed(torch.tensor([0, *lengths]).cumsum(0))
    positions = torch.cat([torch.arange(n) for n in lengths])
    layout = TileLayout(model.options.carried, 38, 38, mask)
    packed = model(torch.cat(documents, 1), mask=mask, layout=layout, positions=positions)
    torch.testing.assert_close(packed, torch.cat([model(d) for d in documents], 1), rtol=1e-9, atol=1e-10)


def test_a_block_trains_and_learns():
    """Next-token loss on a periodic text falls far below the uniform one."""
    model = model_of("sliding window and gate", dtype=torch.float32)
    tokens = torch.arange(5).repeat(9)[None, :41]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 < torch.tensor(61.0).log()


class Cosines(TorchDispatchMode):
    """How often cosines were taken, and the dtypes of what they were taken of."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname == "cos":
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["carried", "shared keys", "keys from the hidden state"])
def test_a_model_makes_its_angles_once(name):
    """In training, in a prefill and in a step of decoding; in fp32."""
    model, tokens, cache = model_of(name, dtype=torch.bfloat16), torch.randint(61, (2, 20)), KeyValueCache(20)
    with torch.no_grad():
        for part, kwargs in ((tokens, {}), (tokens[:, :19], {"cache": cache}), (tokens[:, 19:], {"cache": cache})):
            with Cosines() as mode:
                model(part, **kwargs)
            assert mode.dtypes == [torch.float32]


def test_angles_of_other_heads_are_refused():
    attention = CarriedAttention(32, 4)
    with pytest.raises(ValueError, match=r"angles of \(d, base\) = \(16, 10000.0\); expected \(8, 10000.0\)"):
        attention(torch.randn(1, 5, 32), None, Angles(torch.arange(5), 16))


def test_block_checks_its_layers():
    config = CarriedConfig(layers=2)
    layers = [CarriedAttention(32, 4, config=config, layer=min(i, 1)) for i in range(3)]
    with pytest.raises(ValueError, match="the block has 3 layers; expected 1 to"):
        CarriedBlock(layers, config)
    with pytest.raises(ValueError, match="kv_heads is 3; expected a divisor of heads = 4"):
        CarriedAttention(32, 4, 3)
    with pytest.raises(ValueError, match="keys is 'none'"):
        LlamaOptions(keys="none")
    with pytest.raises(ValueError, match="group is 4 but keys is 'own'; expected keys='hidden'"):
        LlamaOptions(group=4)
    with pytest.raises(ValueError, match=r"group is 3; expected a divisor or a multiple of carried\.layers = 4"):
        LlamaOptions(keys="hidden", group=3)


def test_layers_of_a_group_project_one_hidden_state():
    """The memory that each of eight layers gets is what entered the first layer of its group."""
    model = model_of("keys from the hidden state of two blocks")
    entered, memories = [], []

    def note(module, args, kwargs):
        entered.append(args[0])
        memories.append(kwargs["memory"])

    for block in model.blocks:
        for layer in block.layers:
            layer.register_forward_pre_hook(note, with_kwargs=True)
    model(torch.randint(61, (1, 20)))
    assert len(memories) == 6
    for i, memory in enumerate(memories):
        assert torch.equal(memory, entered[i // 4 * 4])


@pytest.mark.parametrize(
    "options", [{}, {"scaling": "mean"}, {"scaling": "gain"}, {"windows": 9, "softcap": 2.0}], ids=str
)
def test_shared_keys_fold_exactly(options):
    config = CarriedConfig(tile=16, impl="blocked", **options)
    q, k, v = inputs()
    gain = (
        [torch.rand(4, dtype=torch.float64).requires_grad_() for _ in range(4)]
        if options.get("scaling") == "gain"
        else None
    )
    leaves = [*q, k[0], *v, *(gain or [])[1:]]
    exact = dense(config, q, [k[0]] * 4, v, gain=gain)
    carry, folded = SharedKeyCarry(config), []
    for i in range(4):
        o, carry = shared_key_attention(q[i], k[0], v[i], carry, gain=gain[i] if gain else None)
        folded.append(o)
    weights = [torch.randn_like(o) for o in exact]
    for a, b in zip(
        [*folded, *grads_of(folded, leaves, weights)], [*exact, *grads_of(exact, leaves, weights)], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    assert carry.index == 0


def test_shared_keys_refuse_what_does_not_fold():
    with pytest.raises(ValueError, match="expected one window for all layers"):
        SharedKeyCarry(CarriedConfig(windows=(9, 9, 9, None)))
    with pytest.raises(ValueError, match="detach is True; expected False"):
        SharedKeyCarry(CarriedConfig(detach=True))
    q, k, v = (torch.randn(1, n, 10, 8) for n in (4, 2, 2))
    _, carry = shared_key_attention(q, k, v, SharedKeyCarry(CarriedConfig()))
    for other, error, why in (
        ((q.half(), k.half(), v.half()), TypeError, "q is torch.float16; expected torch.float32"),
        ((q, k[:, :1], v[:, :1]), ValueError, "k has 1 heads; expected 2"),
        ((q[:, :2], k, v), ValueError, "expected .1, 4, 10, 8., as in the layers before"),
    ):
        with pytest.raises(error, match=why):
            shared_key_attention(*other, carry)


@pytest.mark.parametrize(
    "options",
    [{}, {"windows": (9, 20, 5, None)}, {"scaling": "mean", "softcap": 2.0}, {"causal": False}],
    ids=str,
)
def test_decode_equals_the_block(options):
    config = CarriedConfig(tile=16, impl="blocked", **options)
    q, k, v = inputs(T=3, Tk=30)
    block, row = run(config, q, k, v), None
    for i in range(4):
        o, row = carried_decode(q[i], k[i], v[i], row, i, config)
        torch.testing.assert_close(o, block[i], rtol=1e-11, atol=1e-12)
    assert row is None


def test_decode_of_sequences_of_different_length():
    """A cache of fixed size whose sequences hold 7 and 30 tokens, each with one new token."""
    config, lengths = CarriedConfig(tile=16, impl="blocked", windows=(9, 9, 9, None)), [7, 30]
    q, k, v = inputs(B=2, T=1, Tk=40)
    rows = {"batch": None, 0: None, 1: None}
    for i in range(4):
        o, rows["batch"] = carried_decode(q[i], k[i], v[i], rows["batch"], i, config, offset=torch.tensor(lengths) - 1)
        for b, n in enumerate(lengths):
            one = [x[b : b + 1, :, :n] for x in (k[i], v[i])]
            alone, rows[b] = carried_decode(q[i][b : b + 1], *one, rows[b], i, config)
            torch.testing.assert_close(o[b : b + 1], alone, rtol=1e-11, atol=1e-12)


def test_decode_in_16_bits_stays_near_the_block():
    q, k, v = inputs(T=1, Tk=300, d=64, dtype=torch.bfloat16)
    wide = [[x.detach().double() for x in group] for group in (q, k, v)]
    exact = dense(CarriedConfig(), *wide)
    for row_dtype, limit in ((None, 0.003), (torch.float16, 0.004)):
        row = None
        for i in range(4):
            o, row = carried_decode(q[i], k[i], v[i], row, i, CarriedConfig(), row_dtype=row_dtype)
            assert row is None or row.dtype == (row_dtype or torch.float32)
        assert ((o.double() - exact[3]).norm() / exact[3].norm()).item() < limit


def test_decode_costs_what_the_study_counted():
    cost = decode_cost(CarriedConfig(), 20, 4, 128, row_bytes=2)
    assert cost == (4 * 2048, 6 * 20 * 2, 6 * 1024)
    assert (cost.carried_share, cost.concatenated_share) == (pytest.approx(0.0293, abs=1e-4), 0.75)
    assert decode_cost(CarriedConfig(layers=1), 20, 4, 128).carried == 0


def test_decode_checks_its_arguments():
    q, k, v = (group[0].detach() for group in inputs(layers=1, T=1, Tk=9))
    with pytest.raises(ValueError, match="row has shape"):
        carried_decode(q, k, v, torch.zeros(1, 4, 1, 8), 1, CarriedConfig())
    with pytest.raises(ValueError, match="gain is None"):
        carried_decode(q, k, v, None, 1, dataclasses.replace(CarriedConfig(), scaling="gain"))
    with pytest.raises(ValueError, match="mask has bounds and offset is a tensor"):
        carried_decode(q, k, v, None, 0, CarriedConfig(), mask=Mask.lengths([9]), offset=torch.tensor([8]))
    with pytest.raises(ValueError, match="capacity is 4"):
        KeyValueCache(4).append(0, k, v)


@pytest.mark.parametrize("layers", [6, 8])
def test_blocks_of_a_model_share_one_layout(monkeypatch, layers):
    """Made from the model's mask; a last block that is shorter makes its own."""
    options = LlamaOptions(vocabulary=61, width=32, layers=layers, hidden=48, carried=CarriedConfig(tile=16))
    model, mask = CarriedLlama(options), Mask.packed([0, 5, 21])
    tokens = torch.randint(61, (1, 21))
    made = []

    class Counted(TileLayout):
        def __init__(self, *args, **kwargs):
            made.append(args)
            super().__init__(*args, **kwargs)

    x = model.embedding(tokens)
    for block in model.blocks:
        x = block(x, mask=mask, positions=torch.arange(21))
    expected = model.head(model.norm(x))
    for module in ("llama", "state"):
        monkeypatch.setattr(f"tilewise.carried.{module}.TileLayout", Counted)
    assert torch.equal(model(tokens, mask=mask), expected)
    assert len(made) == 1 + (layers % 4 > 0)
