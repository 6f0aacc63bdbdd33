"""The nodes of a job, each with a local folder of its own, as one store."""
