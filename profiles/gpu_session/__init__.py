"""Everything of loaderkit that needs a GPU, in one command: see docs/gpu.md.

steps.py  what there is to do: plain data
__main__.py ──> session.py: each step in a process of its own ──> gpu.jsonl, gpu.log ──> page.py: gpu.md
                  └─> child.py ──> context.py: what a step is given, and its report ──> the step's function

What stands before child.py imports nothing but the standard library, so that a broken installation costs its steps, not the
session.
"""
