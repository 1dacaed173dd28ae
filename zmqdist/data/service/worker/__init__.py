"""The tasks of one worker: which it has, what runs each of them, and how its readers are answered."""
