"""Writes the samples of a pipeline as shards: its deterministic sample stages run once, and training reads the result.

split      which stages run now, and which are left for training
planning   which samples are in which shard, from sizes: decided before anything is written
job        one shard, the same bytes wherever and with whatever else it is made
run        all shards, here, in processes or on a Ray cluster; what is there already is not made again
"""
