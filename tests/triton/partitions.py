"""Barriers in shared memory, and partitions of a warp-specialised program: threads of which one runs at a time.

Where partitions synchronise, the foremost of those that can go on does; so one order of precedence lets the producer
overwrite what is freed at once, another lets a group run as far ahead as the barriers allow. Where none can go on, that
is an error.
"""

import itertools
import threading


class Barrier:
    """Completes a phase once `count` have arrived; copies land when somebody waits for it."""

    def __init__(self):
        self.count = self.arrived = self.done = self.bytes = 0
        self.copies = []

    def passed(self, phase):
        return (self.done - 1) % 2 == phase

    @property
    def complete(self):
        copied = sum(c[1].numel() * c[1].element_size() for c in self.copies)
        assert copied <= self.bytes, f"a barrier expects {self.bytes} bytes, and {copied} are copied"
        return 0 < self.count == self.arrived and copied == self.bytes

    def arrive(self, n=1):
        assert self.count, "a barrier is told before it is made"
        self.arrived += n
        assert self.arrived <= self.count, "a barrier is told too often in one phase"
        if not self.bytes and self.complete:
            self.land()

    def land(self):
        for source, to in self.copies:
            to.copy_(source)
        self.done, self.arrived, self.bytes, self.copies = self.done + 1, 0, 0, []


class Barriers:
    """Shared memory that holds barriers."""

    def __init__(self, n):
        self.all = [Barrier() for _ in range(n)]

    def index(self, n):
        return self.all[int(n)]


class Stopped(BaseException):
    """Ends a partition where another one has failed."""


def order_of(n: int, count: int) -> tuple[int, ...]:
    """The precedence of `count` partitions in the n-th program: all orders in turn, each followed by its reverse."""
    orders = list(itertools.permutations(range(count)))
    order = orders[n // 2 % len(orders)]
    return order if n % 2 else order[::-1]


class Partitions:
    """The partitions of one program. Outside of :meth:`run` there is one, which nothing interrupts."""

    def __init__(self):
        self.current, self.order, self.error = None, (), None
        self.turns, self.ready = [], {}

    def run(self, functions, order) -> None:
        """Run the functions to their ends; raises what the first to fail raised."""
        self.order = order
        self.turns = [threading.Semaphore(0) for _ in functions]
        self.ready = dict.fromkeys(range(len(functions)), lambda: True)
        threads = [threading.Thread(target=self._one, args=each, daemon=True) for each in enumerate(functions)]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()
        self.current = None
        if self.error is not None:
            raise self.error

    def switch(self, ready=lambda: True) -> None:
        """Let the foremost partition go on; this one does once `ready()`."""
        if self.current is None:
            return
        me = self.current
        self.ready[me] = ready
        self._next()
        self._await(me)

    def _next(self) -> None:
        able = [n for n in self.order if n in self.ready and self.ready[n]()]
        if able:
            self.current = able[0]
            self.turns[able[0]].release()
        elif self.ready:
            self._fail(AssertionError(f"no partition can go on: {sorted(self.ready)} wait for one another"))

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        for turn in self.turns:
            turn.release()

    def _await(self, me: int) -> None:
        self.turns[me].acquire()
        if self.error is not None:
            raise Stopped

    def _one(self, me: int, function) -> None:
        try:
            self._await(me)
            function()
            del self.ready[me]
            self._next()
        except Stopped:
            return
        except BaseException as error:
            self._fail(error)
