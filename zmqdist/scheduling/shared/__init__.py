"""What coordinators, dispatchers and workers share: configs, references to large values, and the
stores that hold the values."""
