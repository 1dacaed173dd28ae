"""The simulation; its names are those of zmqdist.testing."""
