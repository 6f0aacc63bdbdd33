"""Sources of samples that lie one behind another in large files: lines of text or JSON, TFRecords, MDS. Found through an index
of where each begins, so that each is one range."""
