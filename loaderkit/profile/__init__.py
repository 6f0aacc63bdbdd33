"""What a stall report is made of and how.

model.py      the report: its fields, their meaning, and its JSON
recording.py  what is noted while the loop runs: steps, moments         ──> attribute.py  turns both into a report
"""
