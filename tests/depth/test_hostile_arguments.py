"""Every public argument of depth attention with what does not belong there: an error that names it, never a number."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from refusals import refused
from tilewise import depth
from tilewise import nn as modules
from tilewise.depth import Schedule, parallel
from tilewise.depth import stream as functional
from tilewise.nn.decoder import KVCache
from tilewise.nn.parallel import decoder_stage, tensor_parallel

D, T, N, S, L = 16, 3, 2, 4, 4
PLAN = Schedule.block(L, 2)


def x(*shape, **options):
    return torch.ones(shape, **options)


NO_TENSOR = (1.0, "x", [1.0], nn.RMSNorm(D))
NO_FLOAT = (torch.int64, torch.bool, torch.complex64)


def tensors(*shape, optional=False, defining=False):
    """What is no float tensor of `shape`; a `defining` argument is the one that the others are compared with."""
    bad = [*NO_TENSOR, *(x(*shape, dtype=dtype) for dtype in NO_FLOAT), torch.tensor(1.0)]
    bad += [] if optional else [None]
    if not defining:
        other = [(*shape[:-1], shape[-1] + 1), (*shape[:-1], 1), (1, *shape), (2, *shape)]
        bad += [x(*s) for s in other] + [x(*shape, device="meta")]
        bad += [x(shape[0] + 1, *shape[1:])] if len(shape) > 1 else []
    return bad


def statistics(*shape):
    return [*tensors(*shape), *(x(*shape, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64))]


def streams(optional=False):
    """What is no tensor like the sources, whose dtype counts as well."""
    return [*tensors(T, D, optional=optional), x(T, D, dtype=torch.float64), x(T, D, dtype=torch.bfloat16)]


def any_rows(bad, rows):
    """Without the tensors of `rows` rows: any number is legal."""
    return [v for v in bad if not (isinstance(v, torch.Tensor) and v.ndim > 1 and len(v) == rows)]


FIRST = tensors(T, D, defining=True)
VECTOR, WEIGHT = tensors(D), tensors(D, optional=True)
MATRIX, WEIGHTS = any_rows(tensors(S, D), S + 1), tensors(S, D, optional=True)
SOURCES = [
    None, 1, "xy", [], (), {}, {"a": 1}, [None], [1.0], [x(T, D), None], [x(T, D), 1], [x(T, D), x(T, D + 1)],
    [x(T, D), x(T + 1, D)], [x(T, D), x(T, D, dtype=torch.float64)], [x(T, D), x(T, D, device="meta")],
    [x(T, D, dtype=torch.int64)], [x(T, 0)], [torch.tensor(1.0)], x(D), x(N, T, D)[:0], torch.tensor(1.0),
    x(N, T, D, dtype=torch.int32), (v for v in ()),
]  # fmt: skip
EPS_ = ["1e-6", -1.0, math.nan, math.inf, True, [1e-6], torch.tensor(1e-6), 1j]
EPS = [*EPS_, None]
IMPL = [None, 3, "cuda", ["eager"], "Triton"]
NO_INT = [1.5, "2", [1], torch.tensor(1), 1j]
INT = [*NO_INT, None, True, 0, -1]
INT_ = [*NO_INT, True, 0, -1]
PLANS = [None, 4, "block", (0, 2), nn.Identity()]
NORMS = [
    1, "nnnn", {}, [x(D)] * (L - 1), [x(D)] * (L + 1), [], [x(D + 1)] * L, [None] * L, [nn.RMSNorm(D)] * L, x(L),
    [x(D, dtype=torch.int64)] * L, [x(D, device="meta")] * L, x(L, D + 1), torch.tensor(1.0), (w for w in ()),
]  # fmt: skip


def shared(**options):
    return depth.SharedSource(x(T, D, **options))


SHARED = [
    None,
    1,
    [],
    {},
    [x(T, D)],
    [None],
    [shared(), x(T, D)],
    [shared(), depth.SharedSource(x(T + 1, D))],
    x(2, T, D),
]
QUERY = {"query": VECTOR, "key_weight": WEIGHT}
QUERIES = {"queries": MATRIX, "key_weights": WEIGHTS}
NORM = {"output_weight": WEIGHT, "output_eps": EPS_}
STREAM = {"eps": EPS, "impl": IMPL}


def residual(**options):
    return modules.AttnRes(D, PLAN, **options)


def state(**options):
    return depth.InferenceState(PLAN, residual().reads(), 8, **options)


def sublayer(make, method):
    """A method of a stream made by `make`, after one read where it is a write, and after all where it is the output."""

    def call(**arguments):
        stream = make()(x(T, D))
        for l in range({"read": 0, "write": 0, "output": L}[method]):
            stream.write(l, stream.read(l))
        if method == "write":
            stream.read(0)
        getattr(stream, method)(*([0] if method != "output" else []), **arguments)

    return call


def stage(**changes):
    plan = parallel.PipelinePlan(PLAN, (0, 2, 4), 2)
    good = dict(plan=plan, index=0, residual=residual(span=(0, 2)), body=nn.Identity(), cache=parallel.SourceCache())
    return parallel.DepthStage(*(good | changes).values(), embed=nn.Identity())


def decoder():
    sizes = dict(vocab=8, d=D, layers=2, heads=2, kv_heads=1, hidden=8, residual="block", block=2)
    return modules.DecoderConfig(**sizes)


STATES = [None, 1, x(T, D), (x(T, D),), residual()]
READS = [1, "r", (), residual(), *(
    residual().reads()._replace(**changes)
    for changes in (
        {"query": x(L, D)}, {"key_weight": x(L + 2, D)}, {"query": x(L + 1, D - 1)}, {"key_weight": None},
        {"query": [x(D)] * (L + 1)}, {"last": L + 1}, {"first": -1}, {"query": x(L + 1, D, dtype=torch.int64)},
    )
)]  # fmt: skip
BEGUN = functional.begin(x(T, D))
WRITTEN = functional.read(BEGUN, PLAN, residual().reads(), 0, None)[1]
DONE = functional.begin(x(T, D))
for l in range(L):
    DONE = functional.write(functional.read(DONE, PLAN, residual().reads(), l, None)[1], x(T, D))
SIZES = dict(vocab=8, d=D, layers=2, heads=2, kv_heads=1, hidden=8)
KIMI = {"hidden_size": 8, "num_hidden_layers": 4, "attn_res_block_size": 2, "rms_norm_eps": 1e-5}
SERVE = dict(
    prefix=x(T, D), delta=x(T, D), blocks=x(T, N, D), norm_weight=x(D), qk_weight=x(D), output_norm_weight=x(D),
    num_blocks=1, block_write_idx=1, eps=1e-6, output_norm_eps=1e-6,
)  # fmt: skip
V = [x(T, D)] * N

# (call, arguments that fit, {argument: values that do not})
CASES = {
    "mix": (depth.mix, dict(sources=V, query=x(D), key_weight=x(D)), {"sources": SOURCES, **QUERY, **STREAM}),
    "mix_norm": (
        depth.mix_norm,
        dict(sources=V, query=x(D), key_weight=x(D), output_weight=x(D)),
        {"sources": SOURCES, **QUERY, **NORM, **STREAM},
    ),
    "mix_update": (
        depth.mix_update,
        dict(update=x(T, D), prefix=x(T, D), sources=V, query=x(D), key_weight=x(D), output_weight=x(D)),
        {"update": streams(), "prefix": streams(True), "sources": SOURCES, **QUERY, **NORM, **STREAM},
    ),
    "scores": (
        depth.scores, dict(sources=V, queries=x(S, D), key_weights=x(S, D)), {"sources": SOURCES, **QUERIES, **STREAM}
    ),
    "complete": (
        depth.complete,
        dict(update=x(T, D), prefix=x(T, D), queries=x(S, D), key_weights=x(S, D)),
        {"update": FIRST, "prefix": streams(), **QUERIES, **STREAM},
    ),
    "phase1": (
        depth.phase1, dict(sources=V, queries=x(S, D), key_weights=x(S, D)), {"sources": SOURCES, **QUERIES, **STREAM}
    ),
    "phase1_from_scores": (
        depth.phase1_from_scores,
        dict(sources=V, s=x(S, N, T)),
        {"sources": SOURCES, "s": any_rows(statistics(S, N, T), S + 1), "impl": IMPL},
    ),
    "phase2": (
        depth.phase2,
        dict(update=x(T, D), prefix=x(T, D), o1=x(T, D), lse=x(T), query=x(D), key_weight=x(D), output_weight=x(D)),
        {
            "update": FIRST, "prefix": streams(True), "o1": streams(), "lse": statistics(T), **QUERY, **NORM, **STREAM
        },
    ),
    "phase2_first": (depth.phase2_first, dict(o1=x(T, D), output_weight=x(D)), {
        "o1": FIRST, "output_weight": WEIGHT, "output_eps": EPS, "impl": IMPL
    }),
    "fold_queries": (depth.fold_queries, dict(queries=x(S, D), key_weights=x(S, D)), {
        "queries": tensors(S, D, defining=True), "key_weights": WEIGHTS
    }),
    "fused_attn_res": (lambda **a: depth.fused_attn_res(**(SERVE | a)), {}, {
        "prefix": FIRST, "delta": streams(True), "blocks": [*tensors(T, N, D), x(T, N, D, dtype=torch.float64)],
        "norm_weight": WEIGHT, "qk_weight": VECTOR, "output_norm_weight": WEIGHT, "num_blocks": [*NO_INT, None, -1, 3],
        "block_write_idx": [*NO_INT, None, -2, 0, 2], "eps": EPS, "output_norm_eps": EPS, "impl": IMPL,
    }),
    "mix_norm_shared": (
        depth.mix_norm_shared,
        dict(sources=[shared()], query=x(D), key_weight=x(D), output_weight=x(D)),
        {"sources": SHARED, **QUERY, **NORM, **STREAM},
    ),
    "SharedSource": (depth.SharedSource, {}, {"value": FIRST}),
    "BlockReads": (
        depth.BlockReads,
        dict(sources=[shared()], queries=x(S, D), key_weights=x(S, D), output_weights=x(S, D)),
        {"sources": SHARED, **QUERIES, "output_weights": WEIGHTS, "output_eps": EPS_, **STREAM},
    ),
    "BlockReads.merge": (
        lambda **a: depth.BlockReads([shared()], x(S, D)).merge(**(dict(i=2, update=x(T, D), prefix=x(T, D)) | a)),
        {},
        {"i": NO_INT, "update": streams(), "prefix": streams()},
    ),
    "begin": (functional.begin, {}, {"embedding": FIRST}),
    "write": (functional.write, dict(state=WRITTEN, update=x(T, D)), {"state": STATES, "update": tensors(T, D)}),
    "finish": (functional.finish, {}, {"state": STATES}),
    "read": (
        functional.read,
        dict(state=BEGUN, schedule=PLAN, reads=residual().reads(), sublayer=0, norm_weight=None),
        {"state": STATES, "schedule": PLANS, "reads": [None, 1, residual()], "sublayer": [*NO_INT, None, 1, 2]},
    ),
    "output": (
        functional.output,
        dict(state=DONE, reads=residual().reads(), norm_weight=None),
        {"state": STATES, "reads": [None, 1, residual()], "norm_weight": WEIGHT},
    ),
    "AttnRes": (
        lambda **a: modules.AttnRes(**(dict(d=D, schedule=PLAN) | a)),
        {},
        {
            "d": INT, "schedule": PLANS, "eps": EPS, "output_eps": EPS_, "impl": IMPL, "save_o1": [None, 1, "yes"],
            "span": [3, "02", (0,), (0, 5), (2, 2), (-1, 2), (0, 1.5), (0, None)], "dtype": [torch.int32, "fp32", 16],
        },
    ),
    "AttnRes.forward": (
        lambda **a: residual()(**(dict(embedding=x(T, D)) | a)),
        {},
        {
            "embedding": [*FIRST, (x(T, D),), x(T, D + 1), x(T, D, device="meta")], "norms": NORMS, "reads": READS,
            "position": [*NO_INT, True, -1, 1, 9],
        },
    ),
    "StandardResidual": (modules.StandardResidual, dict(sublayers=4), {"sublayers": INT, "output_eps": EPS}),
    "StandardResidual.forward": (
        modules.StandardResidual(L), dict(embedding=x(T, D)), {"embedding": FIRST, "norms": NORMS}
    ),
    "Residual": (
        lambda **a: modules.Residual(**(dict(d=D, sublayers=L, kind="block") | a)),
        {},
        {"d": INT, "sublayers": INT, "kind": [None, 1, "blocks", ["block"]]},
    ),
    "InferenceState": (
        lambda **a: depth.InferenceState(**(dict(schedule=PLAN, reads=residual().reads(), max_tokens=8) | a)),
        {},
        {
            "schedule": PLANS, "reads": [*READS, None, residual(span=(0, 2)).reads()], "max_tokens": INT,
            "overlap_tokens": [*NO_INT, None, -1], "dtype": [torch.int32, "fp32", 16],
        },
    ),
    "InferenceState.call": (
        lambda **a: state()(**(dict(embedding=x(T, D)) | a)),
        {},
        {"embedding": [*FIRST, x(T, D + 1), x(T, D).half(), x(T, D, device="meta"), x(9, D)], "norms": NORMS},
    ),
    "InferenceState.chunks": (lambda tokens: list(state().chunks(tokens)), {}, {"tokens": [*NO_INT, None, -1]}),
    "SequenceSharded": (
        lambda **a: parallel.SequenceSharded(**(dict(residual=residual()) | a)),
        {},
        {
            "residual": [None, 1, nn.Identity(), modules.StandardResidual(4)], "group": [1, "world", object()],
            "partial": [None, 1, "no"],
        },
    ),
    "SequenceSharded.call": (
        lambda **a: parallel.SequenceSharded(residual())(**(dict(embedding=x(T, D)) | a)),
        {},
        {"embedding": [*FIRST, x(T, D + 1)], "norms": NORMS},
    ),
    "DepthStage": (stage, {}, {
        "plan": PLANS, "index": [*NO_INT, None, -1, 2], "residual": [None, nn.Identity(), residual()],
        "body": [None, 1, "body"], "cache": [None, {}, 1],
    }),
    "PipelinePlan": (
        lambda **a: parallel.PipelinePlan(**(dict(schedule=PLAN, bounds=(0, 2, 4), ranks=2) | a)),
        {},
        {
            "schedule": PLANS, "ranks": INT,
            "bounds": [None, 4, [0, 2, 4], (), (0,), (0, 5), (1, 4), (0, 2, 2, 4), (0, 1.5, 4), (0, None, 4)],
        },
    ),
    "PipelinePlan.even": (
        lambda **a: parallel.PipelinePlan.even(**(dict(schedule=PLAN, ranks=2) | a)),
        {},
        {"schedule": [*PLANS, Schedule.block(3, 1)], "ranks": INT, "virtual": INT, "multiple": INT},
    ),
    "PipelinePlan.bytes": (
        lambda **a: parallel.PipelinePlan(PLAN, (0, 2, 4), 2).bytes(**(dict(tokens=1, d=8, itemsize=2) | a)),
        {},
        {"tokens": [*NO_INT, None, -1], "d": INT, "itemsize": INT},
    ),
    "paper_naive": (parallel.paper_naive, dict(ranks=1, virtual=1, blocks_per_stage=1), {
        "ranks": INT, "virtual": INT, "blocks_per_stage": INT
    }),
    "paper_cached": (parallel.paper_cached, dict(ranks=1, virtual=1, blocks_per_stage=1), {
        "ranks": INT, "virtual": INT, "blocks_per_stage": INT
    }),
    "Schedule": (Schedule, dict(sublayers=4, starts=(0, 2)), {
        "sublayers": INT, "starts": [None, 1, [0, 2], (), (1, 2), (0, 2, 2), (0, 4), (0, 1.5), (0, None), (0, -1)],
        "full": [None, 1, "yes"], "one_pass_sources": [*NO_INT, None, True, -1], "max_queries": INT_,
    }),
    "Schedule.block": (Schedule.block, dict(sublayers=4, size=2), {
        "sublayers": INT, "size": INT, "one_pass_sources": [*NO_INT, None, -1], "max_queries": INT_,
    }),
    "Schedule.at": (Schedule.at, dict(sublayers=4, starts=[0, 2]), {
        "sublayers": INT, "starts": [None, 1, {0, 2}, "02", [], [1], [0, 0], [0, 4], [0, 1.5], [0, None], [0, -1]],
    }),
    "Schedule.full_attention": (Schedule.full_attention, dict(sublayers=4), {
        "sublayers": INT, "group": INT_, "one_pass_sources": [*NO_INT, None, -1],
    }),
    "Schedule.kimi_k3": (Schedule.kimi_k3, {}, {
        "layers": INT, "attn_res_block_size": INT, "one_pass_sources": [*NO_INT, None, -1]
    }),
    "Schedule.visit": (PLAN.visit, {}, {"sublayer": [*NO_INT, None]}),
    "Schedule.complete_before": (PLAN.complete_before, {}, {"sublayer": [*NO_INT, None, -1, 5]}),
    "sublayers_from_layers": (
        depth.sublayers_from_layers, dict(layers=2, per_layer=2), {"layers": INT, "per_layer": INT}
    ),
    "layers_from_sublayers": (
        depth.layers_from_sublayers, dict(sublayers=2, per_layer=2), {"sublayers": [*INT, 3], "per_layer": INT}
    ),
    "plan_memory": (depth.plan_memory, dict(tokens=8, d=8, schedule=PLAN), {
        "tokens": INT, "d": INT, "schedule": PLANS, "shards": INT, "chunk": INT_, "blocks": [*NO_INT, 2],
        "dtype": [torch.int32, "bf16", None, 2],
    }),
    "memory_table": (depth.memory_table, {}, {"plans": [None, 1, [None], ["x"], {}]}),
    "DecoderConfig": (lambda **a: modules.DecoderConfig(**(SIZES | a)), {}, {
        "vocab": INT, "d": [*INT, 3], "layers": INT, "heads": [*INT, 3], "kv_heads": [*INT, 3], "hidden": INT,
        "eps": EPS,
    }),
    "KVCache": (KVCache, dict(config=decoder(), batch=2, length=4), {
        "config": [None, {}, 1], "batch": INT, "length": INT, "dtype": [torch.int32, "bf16", 16],
    }),
    "Decoder.forward": (lambda **a: modules.Decoder(decoder())(**(dict(tokens=x(1, 2).long()) | a)), {}, {
        "tokens": [None, 1, [1, 2], x(1, 2), x(2).long(), x(1, 1, 2).long()], "cache": [1, {}, [None]],
    }),
    "attn_res_from_config": (lambda **a: modules.attn_res_from_config(KIMI | a), {}, {
        "hidden_size": INT_, "num_hidden_layers": INT_, "attn_res_block_size": INT_, "rms_norm_eps": EPS_,
    }),
    "load_kimi_k3": (
        modules.load_kimi_k3,
        dict(module=residual(), state_dict=modules.kimi_k3_state_dict(residual())),
        {"module": [None, nn.Identity()], "state_dict": [None, 1, [], {}], "prefix": [1, ["model."]]},
    ),
    "kimi_k3_state_dict": (modules.kimi_k3_state_dict, dict(module=residual()), {
        "module": [None, nn.Identity()], "prefix": [None, 1]
    }),
    "decoder_stage": (
        decoder_stage,
        dict(model=modules.Decoder(decoder()), plan=parallel.PipelinePlan(PLAN, (0, 2, 4), 2), index=0, cache=None),
        {"model": [None, nn.Identity()], "plan": PLANS, "index": [*NO_INT, None, -1, 2]},
    ),
    "tensor_parallel": (tensor_parallel, dict(model=modules.Decoder(decoder())), {
        "model": [None, nn.Identity()], "group": [1, "world"]
    }),
}  # fmt: skip
for name, make in {
    "Stream": residual, "StandardStream": lambda: modules.StandardResidual(L), "InferenceStream": state,
    "ShardedStream": lambda: parallel.SequenceSharded(residual()),
    "SharedStream": lambda: lambda e: residual()(e, norms=x(L, D).unbind(0)),
}.items():  # fmt: skip
    CASES[f"{name}.read"] = sublayer(make, "read"), {}, {"norm_weight": WEIGHT}
    CASES[f"{name}.write"] = sublayer(make, "write"), dict(update=x(T, D)), {"update": tensors(T, D)}
    CASES[f"{name}.output"] = sublayer(make, "output"), {}, {"norm_weight": WEIGHT}
ARGUMENTS = [(name, argument) for name, (_, _, bad) in CASES.items() for argument in bad]


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_what_does_not_belong_there_is_named(name, argument):
    for value, text in refused(CASES[name], argument):
        assert argument in text.split(" found ")[0], f"{value!r}: {text}"
        assert "expected" in text, f"{value!r}: {text}"


@pytest.mark.parametrize("name", [name for name, (_, good, _) in CASES.items() if good and name != "decoder_stage"])
def test_what_belongs_there_is_taken(name):
    call, good, _ = CASES[name]
    call(**good)
