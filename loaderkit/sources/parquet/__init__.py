"""`kind: parquet`: the rows of Parquet files, decoded row group by row group.

footers.py   the footer of a file, read by ranges, and kept on this machine for files in a remote store
arrow.py     all that pyarrow does: what a footer says, and the columns of a row group from their bytes
columns.py   the columns of a decoded row group, as NumPy arrays over Arrow's memory, and how rows are taken from them
row_groups.py a decoded row group
held.py      decoded row groups in memory, within a bound
reader.py    the rows of a chunk, from row groups that are decoded once and held
source.py    the arguments, and the source: sample -> file, row group, row
"""
