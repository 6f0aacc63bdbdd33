"""Columns of Arrow as fields of samples, and the reader of sources whose samples are rows of these columns.

types.py      which field a type of Arrow's becomes
choice.py     which columns become fields, and that files agree in them
buffers.py    what lies in the buffers of Arrow's arrays
messages.py   the messages of an Arrow file, of which only the metadata is read
convert.py    a column of a decoded row group, from Arrow's array
columns.py    such columns, as NumPy arrays over Arrow's memory, and how rows are taken from them
nested.py     lists of texts, pictures or structs, and structs: values of Python, row by row
decimals.py   decimals as numbers, where they lose nothing
row_groups.py a decoded row group
reader.py     the rows of a chunk, from row groups that are decoded once and held
"""
