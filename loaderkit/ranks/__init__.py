"""The ranks of a job: which one this is, messages between them, and bytes; a rank that fails or dies is named by the others."""
