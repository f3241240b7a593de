"""Benchmarks. Each module is one, with a `main` of its own or a command of `jaxlookahead`."""
