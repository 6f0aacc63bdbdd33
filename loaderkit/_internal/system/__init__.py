"""What the operating system gives: processes and their ends, descriptors, signals, cgroups, NUMA nodes."""
