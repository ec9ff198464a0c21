"""Groups of jobs, each in a process of its own that has all imports: they are half of the time of short jobs."""

import os
import sys
import traceback
from collections.abc import Callable, Iterable

__all__ = ["chosen", "groups_of", "run_groups", "words_of"]


def chosen(request, test: str, argument: str) -> list[list[str]]:
    """The groups that a pytest session runs of `test`, whose parameter `argument` is a group, for a fixture."""
    items = [x for x in request.session.items if x.path == request.path and getattr(x, "originalname", "") == test]
    return [list(item.callspec.params[argument]) for item in items]


def words_of(groups: list[list[str]]) -> list[str]:
    """The inverse of :func:`groups_of`."""
    return [word for n, group in enumerate(groups) for word in ([",", *group] if n else group)]


def groups_of(words: Iterable[str]) -> list[list[str]]:
    """Words that a comma separates."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word == ",":
            groups.append([])
        else:
            groups[-1].append(word)
    return groups


def run_groups(groups: list[list[str]], work: Callable[[list[str]], None]) -> None:
    """`work(group)` for one group after the other; those after one that fails run, too. Exits with 1 if any failed."""
    failed = False
    for group in groups:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(group)
                sys.stdout.flush()
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        failed |= status != 0
    sys.exit(int(failed))
