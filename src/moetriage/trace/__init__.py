"""Routing traces: which experts a run's router chose, how much they weighed, and whether they were resident.

``schema`` defines the table, ``io`` reads and writes files, ``steps`` turns a trace into arrays for the engine. Importing this package
imports none of them: they need polars, and the engine runs without.
"""
