"""`kind: zarr` and `kind: hdf5`: named arrays in stores and files, of which only the chunks that a sample needs are read."""
