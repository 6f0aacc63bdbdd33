"""What is done to samples and batches. One module a stage or a family; they do not know one another.

A *sample stage* is a plain function `(sample, draws, scratch) -> jobs` that changes the sample in place; `draws` are its
uniform random numbers in [0, 1), float64 [num_draws], which depend on (seed, epoch, sample, stage name) alone, `scratch` is
memory it may reuse, or None, and the jobs, if any, are what is done for all samples of a chunk at once. A *chunk stage*
(`read`, `batch`) takes a chunk, a *batch stage* a finished batch. A function that cannot do its work raises; the runner
adds which stage, sample and object it was.
"""
