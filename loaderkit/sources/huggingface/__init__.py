"""`kind: huggingface`: reads what Hugging Face's datasets have on disk, without that package.

args.py     the arguments, and where the cache of datasets is
located.py  the files of a split, of a saved data set or of a cached one, by their JSON files
batches.py  the record batches of an Arrow file: found once, mapped or read, and decoded
source.py   the source: sample -> file, record batch, row
"""
