"""Sources of samples that lie one behind another in large files: lines of text or JSON, TFRecords, MDS. An index says
where each sample begins, so that it can be read as one range."""
