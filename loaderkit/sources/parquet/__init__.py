"""`kind: parquet`: the rows of Parquet files, decoded row group by row group.

footers.py    the footer of a file, read by ranges, and kept on this machine for files in a remote store
arrow.py      all that pyarrow does: what a footer says, and the columns of a row group from their bytes
groups.py     row groups, read through a connector and decoded
slices.py     row groups too large to be decoded at once
partitions.py columns that the folders of a file name
tokens.py     documents of tokens in Parquet files
source.py     the arguments, and the source: sample -> file, row group, row
"""
