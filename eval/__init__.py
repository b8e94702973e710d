"""How good is a head? Benchmarks, harness, metrics and reports."""
