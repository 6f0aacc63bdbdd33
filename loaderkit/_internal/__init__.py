"""Helpers that know nothing of loading: units, dtypes, atomic files, cgroups. Nothing here is public."""
