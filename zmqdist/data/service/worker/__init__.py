"""The data-service tasks of one worker: the machine that begins and drops tasks, a runner for each
kind of task, the replies to readers."""
