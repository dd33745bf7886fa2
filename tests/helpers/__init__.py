"""What several tests share: builders of values, and module-level workflows and reward functions to import by name."""
