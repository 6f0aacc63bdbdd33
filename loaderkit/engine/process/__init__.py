"""The executor that makes batches in other processes of this machine, and sends them over shared memory."""
