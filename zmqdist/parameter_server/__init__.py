"""Variables on parameter servers."""
