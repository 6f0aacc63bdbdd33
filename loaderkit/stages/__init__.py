"""What is done to samples and batches. One module a stage or a family; they do not know one another.

A *sample stage* is a plain function `(sample, draws) -> None` that changes the sample in place; `draws` are its uniform
random numbers in [0, 1), float64 [num_draws], which depend on (seed, epoch, sample, stage name) alone. A *chunk stage*
(`read`, `batch`) takes a chunk, a *batch stage* a finished batch. A function that cannot do its work raises; the runner
adds which stage, sample and object it was.
"""
