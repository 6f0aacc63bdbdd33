"""The engine: destinations opened within a budget, chunks carried through pools of workers, and every wait accounted for.

plan.open() ──> Destination ──> Intake ──chunks──> pool ──Buffer──> pool ... ──land──> batch stages ──> consumer
    ^                                                                                              │
    └────────────── room: fewer than `batches` open, and a slab's bytes left in `memory` ──────────┘
"""
