"""Adapters: a module per engine with `connect(**options)`, which returns a `bench.workloads.Peer`.

A peer may also have `about` (facts for the report), `reset()` (forget cached prefixes), `counters(waves)`, `valid(ids)`
and `close()`.
"""
