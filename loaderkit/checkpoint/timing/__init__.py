"""When to save and how much: what saving costs, what fits into the time that is left, the best interval, the end of a job."""
