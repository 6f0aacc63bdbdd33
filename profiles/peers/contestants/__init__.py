"""One module a peer: `WORKS[work](places, settings)` builds what is iterated, `PACKAGE` is whose version is reported.

What is built can be iterated again and again, and says in its batches what `looks.py` expects. Where a peer can be told
to go on without end it is, so that no contestant pays for the ends of short epochs. Only `ours.py` and `limits.py` import
loaderkit.
"""
