"""What a stall report is made of and how.

model.py        the report: its fields, their meaning, and its JSON
steps.py        the loop, cut at its batches
recording.py    `with loader.profile() as report`: steps, and the accounts at three moments
attribute.py    from both to a report: verdict, steps, stages, slowest samples, first batch
patch.py        the verdict's change as values to set            yamledit.py    those, in a file, its comments kept
terminal.py     the report as text                               condition.py   --fail-if

driving.py      loops of our own                                 experiments.py variants in turns, with intervals
headspace.py    training alone, data warm, data cold             cold.py        files out of the page cache
demands.py      what a sample costs, measured                    predict.py     throughput from that: bounds
changes.py      what could be changed                            whatif.py      predicted, and tried
causal.py       the verdict, put to the test                     tuning.py      the fastest sizes, searched
others.py       what other programs use of the CPUs

What makes loaders is passed in (`experiments.Make`): this package knows none.
"""
