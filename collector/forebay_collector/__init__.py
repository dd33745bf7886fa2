"""The collector: assembles slot results to groups, decides on them, cuts batches, reaps, dumps."""
