"""Pictures decoded by DALI: the graph, the renderer that runs it, and the trial that chooses between its two forms."""
