"""The data-service tasks of one worker: which it has, what runs each of them, and how it replies to their readers."""
