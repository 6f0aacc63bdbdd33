"""The ranks of a job: which one this is, messages and bytes between them. A rank that fails or dies is named by the
others."""
