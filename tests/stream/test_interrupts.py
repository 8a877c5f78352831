"""When Ctrl-C is taken: at once, or at the end of a write, but never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from moetriage.stream.interrupts import Interrupts


@pytest.fixture
def done() -> list[str]:
    """What the tested block got through."""
    return []


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def within(block: Callable[[Interrupts], None]) -> None:
    with Interrupts() as interrupts:
        block(interrupts)


def test_it_is_taken_at_once_outside_of_a_write(done: list[str]) -> None:
    def block(_interrupts: Interrupts) -> None:
        ctrl_c()
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        within(block)
    assert done == []


def test_it_waits_for_the_end_of_a_write(done: list[str]) -> None:
    def block(interrupts: Interrupts) -> None:
        with interrupts.held():
            ctrl_c()
            done.append("written")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        within(block)
    assert done == ["written"]


def test_a_second_one_does_not_wait(done: list[str]) -> None:
    def block(interrupts: Interrupts) -> None:
        with interrupts.held():
            ctrl_c()
            done.append("first")
            ctrl_c()
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        within(block)
    assert done == ["first"]


def test_one_that_came_while_held_is_taken_at_the_end(done: list[str]) -> None:
    def block(interrupts: Interrupts) -> None:
        interrupts.hold()
        ctrl_c()
        done.append("written")

    with pytest.raises(KeyboardInterrupt):
        within(block)
    assert done == ["written"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_write_comes_before_it() -> None:
    def block(interrupts: Interrupts) -> None:
        with interrupts.held():
            ctrl_c()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        within(block)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone() -> None:
    seen: list[object] = []
    thread = threading.Thread(target=within, args=[lambda _interrupts: seen.append(signal.getsignal(signal.SIGINT))])
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
