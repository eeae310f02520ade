"""How other actor systems make the calls of `benchmarks.calls`, each in its own natural way; imported where installed."""
