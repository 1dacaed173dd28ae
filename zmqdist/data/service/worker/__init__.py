"""The data-service tasks of one worker: the machine that lists them, a runner for each kind of task, and the replies to readers."""
