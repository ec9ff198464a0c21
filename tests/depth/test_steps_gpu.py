"""Whole steps on a CUDA device: repeatable gradients, graphs, narrow queries, banks over 2^31 elements, wide rows."""

import gc

import device_cases as cases
import operator_cases as operators
import pytest
import torch

from tilewise.depth import Schedule
from tilewise.testing import assert_within_budget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = ["block", "full"]


@pytest.fixture
def freed():
    """Gigabytes go back to the other processes that share the GPU."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("freed")
def test_serving_contract_in_a_bank_of_over_2_31_elements():
    assert 40_000 * 9 * 7168 > 2**31
    cases.serving_in_a_large_bank(40_000, 9, 7168, torch.bfloat16, "cuda", "triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "d"), [(513, 1024), (2001, 2304)])
def test_a_training_step_twice_gives_the_same_bits(kind, dtype, T, d):
    cases.steps_are_repeatable(cases.TrainingStep(cases.SCHEDULES[kind](16), T, d, dtype, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_gradients_within_budget(kind, dtype):
    cases.assert_gradients_within_budget(cases.training_gradients(cases.SCHEDULES[kind](16), 513, 1024, dtype, "cuda"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [64, 2048])
def test_a_training_step_in_a_cuda_graph(kind, T):
    cases.replays_equal_eager(cases.TrainingStep(cases.SCHEDULES[kind](12), T, 1024, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("T", [8, 2048])
def test_the_serving_contract_in_a_cuda_graph(T):
    cases.replays_equal_eager(cases.ServingStep(T, 6, 1024, torch.bfloat16, "cuda", "triton"))


@pytest.mark.parametrize("T", [8, 2048])
def test_full_inference_in_a_cuda_graph(T):
    cases.replays_equal_eager(cases.InferenceStep(Schedule.full_attention(24), T, 1024, torch.bfloat16, "cuda"))


@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("std", [0.02, 0.5])
def test_narrow_queries_of_merges_within_budget(std):
    """Queries of merges are fp16 beside bf16 sources: 128 sublayers of decode, at scores of about 2 and of about 40."""
    state, *values = cases.inference_reads(Schedule.block(128, 16), 128, 7168, torch.bfloat16, "cuda", std)
    assert {q.dtype for q in state.merge_q} == {torch.float16}
    assert_within_budget("reads", *values)


@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("T", [40, 1100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_16384_columns_within_budget(dtype, T):
    torch.manual_seed(2)
    tensors = operators.tensors(5, 3, T, 16384, dtype, "cuda")
    for name, case in operators.calls(*tensors).items():
        for k, values in enumerate(operators.results(*case, "triton")):
            assert_within_budget(f"{name}, result {k}", *values)
    with torch.no_grad():
        for name, values in operators.inference_results(*tensors, "triton").items():
            assert_within_budget(name, *values)
