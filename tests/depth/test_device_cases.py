"""What the tests on a GPU run, without one: the same functions at small sizes, by the eager path."""

import device_cases as cases
import operator_cases as operators
import pytest
import torch

from tilewise.depth import Schedule
from tilewise.testing import assert_within_budget

KINDS = ["block", "full"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators(dtype):
    tensors = operators.tensors(3, 2, 5, 32, dtype, "cpu", 0.5)
    for name, case in operators.calls(*tensors).items():
        for k, values in enumerate(operators.results(*case, "eager")):
            assert_within_budget(f"{name}, result {k}", *values)
    with torch.no_grad():
        for name, values in operators.inference_results(*tensors, "eager").items():
            assert_within_budget(name, *values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_serving_in_a_bank(dtype):
    cases.serving_in_a_large_bank(12, 3, 32, dtype, "cpu", "eager")


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_twice(kind):
    cases.steps_are_repeatable(cases.TrainingStep(cases.SCHEDULES[kind](8), 5, 16, torch.bfloat16, "cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_training_gradients(kind, dtype):
    cases.assert_gradients_within_budget(cases.training_gradients(cases.SCHEDULES[kind](8), 33, 64, dtype, "cpu"))


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_inference_reads(std):
    state, *values = cases.inference_reads(Schedule.block(16, 4), 9, 64, torch.bfloat16, "cpu", std)
    assert state.merge_q[0].dtype == torch.float32
    assert_within_budget("reads", *values)


def again(step):
    """In place of a graph: the step itself, into the same results."""
    results = step()

    def replay():
        for kept, new in zip(results, step(), strict=True):
            kept.copy_(new)

    return replay, results


def test_replays():
    for step in (
        cases.TrainingStep(cases.SCHEDULES["full"](8), 5, 16, torch.float32, "cpu"),
        cases.ServingStep(5, 4, 16, torch.float32, "cpu"),
        cases.InferenceStep(cases.SCHEDULES["full"](8), 5, 16, torch.float32, "cpu"),
    ):
        cases.replays_equal_eager(step, again)
        with pytest.raises(AssertionError, match="result 0"):
            cases.replays_equal_eager(step, lambda step: (lambda: None, step()))
