"""Groups of jobs, each in a process of its own that has all imports: they are half of the time of short jobs."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["groups_of", "missed_by", "run_groups"]

HERE = Path(__file__).parent


def missed_by(script: str, request, test: str, argument: str) -> tuple[dict[str, list[str]], str]:
    """({job: what missed its budget}, what was said besides) of the groups that are to be run, by one process."""
    words = words_of(chosen(request, test, argument))
    done = subprocess.run(
        [sys.executable, str(HERE / script), *words], cwd=HERE, capture_output=True, text=True, timeout=590,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = {line["name"]: line["missed"] for line in map(json.loads, done.stdout.splitlines())}
    # A process that failed shows in its jobs, unless it failed after them.
    assert done.returncode == 0 or {*words} - {*found, ","}, done.stderr[-3000:]
    return found, done.stderr


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
