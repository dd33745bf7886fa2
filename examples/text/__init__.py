"""A real instruct model answers real questions through the pipeline; nothing is trained."""
