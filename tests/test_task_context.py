"""What a running function can ask about itself; what depends on where it runs is tested with the
slots."""

from __future__ import annotations

import threading

from zmqdist import task_context


def test_update_keys_repeat_with_function() -> None:
    def run() -> list[str]:
        with task_context.update_key("a"):
            return [task_context.key_of(about) for about in (1, 1, 2, 1)]

    assert run() == run() == ["a/1.0", "a/1.1", "a/2.0", "a/1.2"]
    assert task_context.key_of(1) == ""


def test_inheriting_threads_share_update_keys() -> None:
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
