"""What a running function can ask about itself; what depends on where it runs is tested with the
slots."""

from __future__ import annotations

import threading

from zmqdist import task_context


def test_updates_have_keys_in_a_function_that_counts_once_and_the_same_each_time_it_runs() -> None:
    def run() -> list[str]:
        with task_context.update_key("a"):
            return [task_context.key_of(about) for about in (1, 1, 2, 1)]

    assert run() == run() == ["a/1.0", "a/1.1", "a/2.0", "a/1.2"]
    assert task_context.key_of(1) == ""


def test_threads_that_inherit_count_with_their_function() -> None:
    keys = []
    with task_context.update_key("a"):
        enter = task_context.inherit()

        def inside() -> None:
            enter()
            keys.append(task_context.key_of(1))

        def outside() -> None:
            keys.append(task_context.key_of(1))

        for target in (inside, outside):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        keys.append(task_context.key_of(1))
    assert keys == ["a/1.0", "", "a/1.1"]
