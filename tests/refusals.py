"""What calls say of arguments that do not belong there."""

from collections.abc import Callable, Iterator

import pytest

__all__ = ["refused"]


def refused(case: tuple[Callable, dict, dict[str, list]], argument: str) -> Iterator[tuple[object, str]]:
    """(value, message) of each value of `argument` that must be refused; `case` is (call, good arguments, bad ones)."""
    call, good, bad = case
    for value in bad[argument]:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(**(good | {argument: value}))
        yield value, str(caught.value)
