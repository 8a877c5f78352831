"""Replay recorded routing through the engine's own cache and drop policy: what another cache, order or threshold would have read.

``routes`` turns traces into arrays, ``engine`` runs cells over them, ``bounds`` says what no policy can beat, ``sweep`` runs many cells,
``advice`` and ``plots`` present them. Importing this package imports none of them.
"""
