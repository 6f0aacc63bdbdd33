"""The executor in other processes of this machine, over shared memory."""
